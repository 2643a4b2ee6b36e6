# SPDX-License-Identifier: Apache-2.0
"""What each fix is to a target, and what can be done about it; reads files, imports and writes nothing.

The verdict comes from ``catalog.verdict``. For ``needed`` the remedy is found by applying the patch (with what
it requires and the target lacks) in memory: ``patch`` if it fits and the touched functions come out as known
texts with the fix in them, ``does-not-fit`` if not, ``none`` if there is no patch for that release yet.

The work grows with the touched files and functions, not with the fixes times the files: all patches are tried together
first, and one by one only if they don't all fit; a text is parsed once, and only touched functions are fingerprinted.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_fixes.catalog import without_local
from megatron_fixes.catalog.fingerprint import functions
from megatron_fixes.catalog.verdict import Finding, Seen, judge
from megatron_fixes.errors import DoesNotFitError, UsageError
from megatron_fixes.patching.hunks import apply_patch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from megatron_fixes.catalog import Catalog
    from megatron_fixes.catalog.fingerprint import FunctionPrint
    from megatron_fixes.catalog.series import PatchFile
    from megatron_fixes.patching.target import Target

Remedy = Literal["patch", "none", "does-not-fit"]


@dataclass(frozen=True)
class Row:
    """A finding with its remedy.

    Attributes:
        remedy: None unless the fix is needed.
        misfit: Why the patch doesn't fit, in one line; empty if it does.
        misfit_hint: What to do about that.
    """

    finding: Finding
    remedy: Remedy | None = None
    misfit: str = ""
    misfit_hint: str = ""


def read_files(target: Target, catalog: Catalog) -> dict[str, bytes]:
    """The target's bytes of every file that any known fix touches; missing files are left out.

    Raises:
        UsageError: A file is there but can't be read.
    """
    files = {}
    for path in sorted({function.split("::")[0] for names in catalog.known.touches.values() for function in names}):
        try:
            files[path] = (target.root / path).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise UsageError(
                f"can't read a file that fixes touch: {error.strerror}",
                context=str(target.root / path),
                hint="Check its permissions.",
            ) from error
    return files


@functools.lru_cache(maxsize=64)
def _prints(content: bytes, qualnames: frozenset[str]) -> Mapping[str, list[FunctionPrint]]:
    return functions(content, qualnames)


def look(names: Iterable[str], files: Mapping[str, bytes]) -> dict[str, Seen]:
    """Fingerprint named functions (``path::qualname``) as they are in some files."""
    wanted: dict[str, set[str]] = {}
    for name in names:
        wanted.setdefault(name.split("::")[0], set()).add(name)
    seen: dict[str, Seen] = {}
    for path, inside in wanted.items():
        problem = ""
        found: Mapping[str, list[FunctionPrint]] = {}
        source: tuple[str, ...] = ()
        if path not in files:
            problem = f"{path} not found"
        else:
            try:
                found = _prints(files[path], frozenset(name.split("::")[1] for name in inside))
                source = tuple(files[path].decode("utf-8", "replace").splitlines())
            except (SyntaxError, ValueError) as error:
                problem = f"{path} is not Python that this interpreter reads ({error})"
        for name in inside:
            seen[name] = Seen(tuple(found.get(name.split("::")[1], ())), problem, source, path not in files)
    return seen


def verdicts(
    catalog: Catalog, files: Mapping[str, bytes], claimed: str | None, only: Iterable[str] | None = None
) -> dict[str, Finding]:
    """What each fix, or each that is named, is to some files of a target."""
    fixes = catalog.matrix.fixes
    named = list(fixes if only is None else only)
    # All functions of a file are looked at together, so that its text is parsed once whatever is asked first.
    paths = {name.split("::")[0] for fix_id in named for name in catalog.known.touches[fix_id]}
    touched = {name for names in catalog.known.touches.values() for name in names}
    seen = look({name for name in touched if name.split("::")[0] in paths}, files)
    release = claimed and without_local(claimed)
    return {fix_id: judge(fix_id, fixes[fix_id], catalog.known, seen, release) for fix_id in named}


def apply_all(
    catalog: Catalog, patches: Sequence[PatchFile], files: Mapping[str, bytes], claimed: str | None
) -> dict[str, bytes]:
    """Apply patches in memory, in order, and check what came out.

    Returns:
        The changed files.

    Raises:
        DoesNotFitError: A hunk doesn't fit, or a touched function did not come out as the known text with the fix.
    """
    changed: dict[str, bytes] = {}
    for patch in patches:
        changed.update(apply_patch(patch.text, {**files, **changed}, source=patch.name))
    after = verdicts(catalog, {**files, **changed}, claimed, [patch.fix_id for patch in patches])
    for patch in patches:
        finding = after[patch.fix_id]
        if finding.verdict != "applied":
            raise DoesNotFitError(
                f"got another text than the known one after applying {patch.fix_id}: {finding.reason}",
                context=patch.name,
                hint="Report this with the output of `megatron-fixes scan --json`.",
            )
    return changed


def scan(target: Target, catalog: Catalog) -> list[Row]:
    """What every known fix is to a target, in order of number.

    Raises:
        UsageError: A file that fixes touch can't be read.
    """
    return scan_files(read_files(target, catalog), catalog, target.release)


def scan_files(files: Mapping[str, bytes], catalog: Catalog, claimed: str | None) -> list[Row]:
    """What every known fix is to some files of a target that claims to be a release, in order of number."""
    findings = verdicts(catalog, files, claimed)
    rows: dict[str, Row] = {}
    with_patch: dict[str, list[str]] = {}
    for fix_id, finding in findings.items():
        if finding.verdict != "needed" or finding.release is None:
            rows[fix_id] = Row(finding)
        elif catalog.patch(fix_id, finding.release) is None:
            rows[fix_id] = Row(finding, "none")
        else:
            with_patch.setdefault(catalog.matrix.releases[finding.release].line, []).append(fix_id)
    for line, fix_ids in with_patch.items():
        rows.update(_tried(findings, line, fix_ids, catalog, files, claimed))
    return [rows[fix_id] for fix_id in sorted(rows)]


def _tried(
    findings: Mapping[str, Finding],
    line: str,
    fix_ids: Sequence[str],
    catalog: Catalog,
    files: Mapping[str, bytes],
    claimed: str | None,
) -> dict[str, Row]:
    """Try the patches of needed fixes in memory: together, and one by one if they don't all fit."""

    def misfit(wanted: Sequence[str]) -> DoesNotFitError | None:
        missing = [p for p in catalog.series[line].closure(wanted) if findings[p.fix_id].verdict != "applied"]
        try:
            apply_all(catalog, missing, files, claimed)
        except DoesNotFitError as error:
            return error
        return None

    if misfit(fix_ids) is None:
        return {fix_id: Row(findings[fix_id], "patch") for fix_id in fix_ids}
    rows = {}
    for fix_id in fix_ids:
        error = misfit([fix_id])
        rows[fix_id] = (
            Row(findings[fix_id], "patch")
            if error is None
            else Row(findings[fix_id], "does-not-fit", f"{error.context}: {error.message}", error.hint)
        )
    return rows
