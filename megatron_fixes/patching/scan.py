# SPDX-License-Identifier: Apache-2.0
"""What each fix is to a target, and what can be done about it; reads files, imports and writes nothing.

The verdict comes from ``catalog.verdict``. For ``needed`` the remedy is found by applying the patch (with what
it requires and the target lacks) in memory: ``patch`` if it fits and the touched functions come out as known
texts with the fix in them, ``does-not-fit`` if not, ``none`` if there is no patch for that release yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from megatron_fixes.catalog.fingerprint import functions
from megatron_fixes.catalog.verdict import Finding, Seen, judge
from megatron_fixes.errors import DoesNotFitError, UsageError
from megatron_fixes.patching.hunks import apply_patch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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


def look(names: Iterable[str], files: Mapping[str, bytes]) -> dict[str, Seen]:
    """Fingerprint named functions (``path::qualname``) as they are in some files."""
    wanted: dict[str, list[str]] = {}
    for name in names:
        wanted.setdefault(name.split("::")[0], []).append(name)
    seen: dict[str, Seen] = {}
    for path, inside in wanted.items():
        problem = ""
        found: dict[str, list[FunctionPrint]] = {}
        source: tuple[str, ...] = ()
        if path not in files:
            problem = f"{path} not found"
        else:
            try:
                found = functions(files[path])
                source = tuple(files[path].decode("utf-8", "replace").splitlines())
            except (SyntaxError, ValueError) as error:
                problem = f"{path} is not Python that this interpreter reads ({error})"
        for name in inside:
            seen[name] = Seen(tuple(found.get(name.split("::")[1], ())), problem, source)
    return seen


def verdicts(catalog: Catalog, files: Mapping[str, bytes], claimed: str | None) -> dict[str, Finding]:
    """What each fix is to some files of a target."""
    seen = look({name for names in catalog.known.touches.values() for name in names}, files)
    return {fix_id: judge(fix_id, fix, catalog.known, seen, claimed) for fix_id, fix in catalog.matrix.fixes.items()}


def apply_all(
    catalog: Catalog, patches: Iterable[PatchFile], files: Mapping[str, bytes], claimed: str | None
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
    after = verdicts(catalog, {**files, **changed}, claimed)
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
    return [_remedied(findings, fix_id, catalog, files, claimed) for fix_id in sorted(findings)]


def _remedied(
    findings: Mapping[str, Finding], fix_id: str, catalog: Catalog, files: Mapping[str, bytes], claimed: str | None
) -> Row:
    finding = findings[fix_id]
    if finding.verdict != "needed" or finding.release is None:
        return Row(finding)
    patch = catalog.patch(fix_id, finding.release)
    if patch is None:
        return Row(finding, "none")
    series = catalog.series[catalog.matrix.releases[finding.release].line]
    missing = [p for p in series.closure([fix_id]) if findings[p.fix_id].verdict != "applied"]
    try:
        apply_all(catalog, missing, files, claimed)
    except DoesNotFitError as error:
        return Row(finding, "does-not-fit", f"{error.context}: {error.message}", error.hint)
    return Row(finding, "patch")
