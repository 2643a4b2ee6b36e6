# SPDX-License-Identifier: Apache-2.0
"""What each fix is to a target, and what can be done about it; reads files, imports and writes nothing.

The verdict comes from ``catalog.verdict``. For ``needed`` the remedy is found by applying the patch (with what
it requires and the target lacks) in memory: ``patch`` if it fits and the touched functions come out as known
texts with the fix in them, ``does-not-fit`` if not, ``none`` if there is no patch for that release yet.

The work grows with the touched files and functions, not with the fixes times the files: all patches are tried together
first, and one by one only if they don't all fit; a text is parsed once, and only touched functions are fingerprinted. A
file as a release has it, or with the whole series in it, is known by its hash and not parsed at all.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_fixes.catalog import without_local
from megatron_fixes.catalog.fingerprint import FunctionPrint, functions
from megatron_fixes.catalog.known import ABSENT
from megatron_fixes.catalog.likeness import likeness
from megatron_fixes.catalog.verdict import Finding, Seen, judge
from megatron_fixes.errors import DoesNotFitError, UsageError
from megatron_fixes.patching.hunks import apply_patch
from megatron_fixes.regular import read_regular

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from megatron_fixes.catalog import Catalog
    from megatron_fixes.catalog.known import Known
    from megatron_fixes.catalog.likeness import Likeness
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
            files[path] = read_regular(target.root / path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise UsageError(
                f"can't read a file that fixes touch: {error.strerror}",
                context=str(target.root / path),
                hint="See what it is, and whose: put the file of the release there, or make it readable.",
            ) from error
    return files


@functools.lru_cache(maxsize=64)
def _prints(content: bytes, qualnames: frozenset[str]) -> Mapping[str, list[FunctionPrint]]:
    return functions(content, qualnames)


@functools.lru_cache(maxsize=64)
def _lines(content: bytes) -> tuple[str, ...]:
    return tuple(content.decode("utf-8", "replace").splitlines())


def look(names: Iterable[str], files: Mapping[str, bytes], known: Known) -> dict[str, Seen]:
    """Fingerprint named functions (``path::qualname``) as they are in some files.

    A file that is known byte for byte is not parsed: what its functions are stands in the table.
    """
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
        elif place := known.place_of(path, files[path]):
            seen.update((name, _as_recorded(name, known.hash_at(name, place))) for name in inside)
            continue
        else:
            try:
                found = _prints(files[path], frozenset(name.split("::")[1] for name in inside))
                source = _lines(files[path])
            except (SyntaxError, ValueError) as error:
                problem = f"{path} is not Python that this interpreter reads ({error})"
        for name in inside:
            seen[name] = Seen(tuple(found.get(name.split("::")[1], ())), problem, source, path not in files)
    return seen


def _as_recorded(name: str, recorded: str) -> Seen:
    print_ = FunctionPrint(name.split("::")[1], recorded, 0, ())
    return Seen(() if recorded == ABSENT else (print_,))


def looks_like(catalog: Catalog, files: Mapping[str, bytes], claimed: str | None) -> Likeness | None:
    """The release that some files of a target look like, if they look like one."""
    seen = look(_touched(catalog), files, catalog.known)
    return likeness(catalog.known, catalog.matrix.releases, seen, claimed and without_local(claimed))


def _touched(catalog: Catalog) -> set[str]:
    return {name for names in catalog.known.touches.values() for name in names}


def verdicts(
    catalog: Catalog,
    files: Mapping[str, bytes],
    claimed: str | None,
    only: Iterable[str] | None = None,
    like: str | None = None,
) -> dict[str, Finding]:
    """What each fix, or each that is named, is to some files of a target.

    Args:
        catalog: The known fixes.
        files: Path below the root to bytes.
        claimed: The release that the target says it is.
        only: The fixes that are named.
        like: The release that the target looks like.
    """
    fixes = catalog.matrix.fixes
    named = list(fixes if only is None else only)
    # All functions of a file are looked at together, so that its text is parsed once whatever is asked first.
    paths = {name.split("::")[0] for fix_id in named for name in catalog.known.touches[fix_id]}
    seen = look({name for name in _touched(catalog) if name.split("::")[0] in paths}, files, catalog.known)
    release = claimed and without_local(claimed)
    return {fix_id: judge(fix_id, fixes[fix_id], catalog.known, seen, release, like) for fix_id in named}


def patches_for(catalog: Catalog, findings: Mapping[str, Finding], chosen: Sequence[str]) -> list[PatchFile]:
    """The patches of some needed fixes, and of what they require and the target lacks; each fix once.

    Returns:
        In series order; where a target is judged by the text of several lines, one line after the other. A fix that is
        required in one line and judged by the text of another has the patch that it would have by itself.
    """
    by_line: dict[str, list[str]] = {}
    for fix_id in chosen:
        by_line.setdefault(_line(catalog, findings[fix_id]), []).append(fix_id)
    patches: dict[str, PatchFile] = {}
    for line, wanted in by_line.items():
        for patch in catalog.series[line].closure(wanted):
            finding = findings[patch.fix_id]
            own = catalog.patch(patch.fix_id, finding.release) if finding.release else None
            if finding.verdict != "applied":
                patches.setdefault(patch.fix_id, patch if own is None or finding.verdict != "needed" else own)
    return [*patches.values()]


def _line(catalog: Catalog, finding: Finding) -> str:
    assert finding.release is not None
    return catalog.matrix.releases[finding.release].line


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
    # What the target looks like is asked of it as it was: its own text decides what it is, and not what we put in.
    like = _release(looks_like(catalog, files, claimed))
    after = verdicts(catalog, {**files, **changed}, claimed, [patch.fix_id for patch in patches], like)
    for patch in patches:
        finding = after[patch.fix_id]
        if finding.verdict != "applied":
            raise DoesNotFitError(
                f"got another text than the known one after applying {patch.fix_id}: {finding.reason}",
                context=patch.name,
                hint="Report this with the output of `megatron-fixes scan --json`.",
            )
    return changed


def _release(like: Likeness | None) -> str | None:
    return like.release if like else None


def scan(target: Target, catalog: Catalog) -> list[Row]:
    """What every known fix is to a target, in order of number.

    Raises:
        UsageError: A file that fixes touch can't be read.
    """
    return scan_files(read_files(target, catalog), catalog, target.release)


def scan_files(files: Mapping[str, bytes], catalog: Catalog, claimed: str | None) -> list[Row]:
    """What every known fix is to some files of a target that claims to be a release, in order of number."""
    findings = verdicts(catalog, files, claimed, like=_release(looks_like(catalog, files, claimed)))
    rows: dict[str, Row] = {}
    with_patch: list[str] = []
    for fix_id, finding in findings.items():
        if finding.verdict != "needed" or finding.release is None:
            rows[fix_id] = Row(finding)
        elif catalog.patch(fix_id, finding.release) is None:
            rows[fix_id] = Row(finding, "none")
        else:
            with_patch.append(fix_id)
    rows.update(_tried(findings, with_patch, catalog, files, claimed))
    return [rows[fix_id] for fix_id in sorted(rows)]


def _tried(
    findings: Mapping[str, Finding],
    fix_ids: Sequence[str],
    catalog: Catalog,
    files: Mapping[str, bytes],
    claimed: str | None,
) -> dict[str, Row]:
    """Try the patches of needed fixes in memory: together, and one by one if they don't all fit.

    Of patches of several lines that fit one by one and not together, those of the line that has most of them count.
    """

    def misfit(wanted: Sequence[str]) -> DoesNotFitError | None:
        try:
            apply_all(catalog, patches_for(catalog, findings, wanted), files, claimed)
        except DoesNotFitError as error:
            return error
        return None

    def row(fix_id: str, error: DoesNotFitError | None, why: str = "") -> Row:
        if error is None:
            return Row(findings[fix_id], "patch")
        return Row(findings[fix_id], "does-not-fit", f"{why}{error.context}: {error.message}", error.hint)

    if not fix_ids or misfit(fix_ids) is None:
        return {fix_id: row(fix_id, None) for fix_id in fix_ids}
    rows = {fix_id: row(fix_id, misfit([fix_id])) for fix_id in fix_ids}
    lines = [_line(catalog, findings[fix_id]) for fix_id, found in rows.items() if found.remedy == "patch"]
    together: list[str] = []
    for line in sorted(set(lines), key=lambda line: (-lines.count(line), line)):
        for fix_id in fix_ids:
            if rows[fix_id].remedy == "patch" and _line(catalog, findings[fix_id]) == line:
                error = misfit([*together, fix_id]) if together else None
                rows[fix_id] = row(fix_id, error, "the target is a mixture of releases, and beside other fixes ")
                together += [fix_id] if error is None else []
    return rows
