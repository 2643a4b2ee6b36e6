# SPDX-License-Identifier: Apache-2.0
"""Decides, in memory and before anything is written, what ``apply`` does to a target.

Without names: every needed fix that has a patch, gated ones left out, whatever the target makes of them; a fix that is
needed but has no patch is reported and left. With names: those, and what they require. Refused as a whole, so that
nothing is half applied, if any fix that was asked for (or, without names, any but a gated one) has drifted or does not
fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_fixes.errors import RefusedError
from megatron_fixes.patching.gitfiles import is_sparse
from megatron_fixes.patching.hunks import touched_paths
from megatron_fixes.patching.ids import known_fixes
from megatron_fixes.patching.journal import AppliedFix
from megatron_fixes.patching.scan import Row, apply_all, patches_for, read_files, scan_files
from megatron_fixes.patching.shell import quote

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from megatron_fixes.catalog import Catalog
    from megatron_fixes.catalog.series import PatchFile
    from megatron_fixes.patching.target import Target


@dataclass(frozen=True)
class Plan:
    """What is to be written.

    Attributes:
        patches: To apply, in series order.
        changes: Path below the root to its bytes before and after.
        already: Fixes asked for that the target already has (applied or fixed upstream) or does not need.
        without_patch: Fixes that the target needs and no patch exists for.
        gated: Needed fixes that only an apply by name puts in; empty if names were given.
        required: Fixes that were not asked for but come along.
    """

    patches: tuple[PatchFile, ...]
    changes: dict[str, tuple[bytes, bytes]]
    already: tuple[Row, ...]
    without_patch: tuple[Row, ...]
    gated: tuple[Row, ...]
    required: tuple[str, ...]

    @property
    def fixes(self) -> tuple[AppliedFix, ...]:
        """The fixes that the changes bring, as the journal names them."""
        return tuple(AppliedFix(p.fix_id, p.sha256, touched_paths(p.text, source=p.name)) for p in self.patches)


def make_plan(target: Target, catalog: Catalog, only: Sequence[str] = ()) -> Plan:
    """Plan an apply.

    Args:
        target: Read, not written.
        catalog: The known fixes.
        only: Fixes asked for, by id or slug; empty for all.

    Raises:
        UsageError: An id that is not a known fix.
        RefusedError: A fix has drifted, does not fit, or was asked for and has no patch for this release; or the
            files changed while they were read.
    """
    only = known_fixes(catalog.matrix, only)
    files = read_files(target, catalog)
    try:
        return _plan(target, catalog, only, files)
    except RefusedError as error:
        if read_files(target, catalog) == files:
            raise
        raise RefusedError(
            "got files that changed while they were read, expected them to stand still",
            context=str(target.root),
            hint="Repeat the command when nothing else, such as another megatron-fixes, writes to the target.",
        ) from error


def _plan(target: Target, catalog: Catalog, only: Sequence[str], files: Mapping[str, bytes]) -> Plan:
    rows = {row.finding.fix_id: row for row in scan_files(files, catalog, target.release)}
    gated = {} if only else {fix_id: row for fix_id, row in rows.items() if catalog.is_gated(fix_id)}
    asked = {fix_id: row for fix_id, row in rows.items() if fix_id not in gated and (not only or fix_id in only)}
    chosen = [fix_id for fix_id, row in asked.items() if row.remedy == "patch"]
    _refuse(target, asked, chosen, _missing(catalog, asked, files), named=bool(only))
    patches = patches_for(catalog, {fix_id: row.finding for fix_id, row in rows.items()}, chosen)
    after = apply_all(catalog, patches, files, target.release) if patches else {}
    return Plan(
        patches=tuple(patches),
        changes={path: (files[path], content) for path, content in after.items()},
        already=tuple(row for fix_id, row in rows.items() if _needs_nothing(row) and (not only or fix_id in only)),
        without_patch=tuple(row for row in asked.values() if row.remedy == "none"),
        gated=tuple(row for row in gated.values() if row.remedy == "patch"),
        required=tuple(patch.fix_id for patch in patches if patch.fix_id not in asked),
    )


def _needs_nothing(row: Row) -> bool:
    return row.finding.verdict not in ("needed", "drifted")


def _missing(catalog: Catalog, asked: Iterable[str], files: Mapping[str, bytes]) -> list[str]:
    """The files that fixes asked for touch and the target has not."""
    touched = {function.split("::")[0] for fix_id in asked for function in catalog.known.touches[fix_id]}
    return sorted(touched.difference(files))


def to_finish(target: Target, half: Iterable[str]) -> str:
    """What to do where files have a part of a fix: there is no telling which hunks are missing, so all go in anew."""
    paths = sorted(set(half))
    back = f"put {', '.join(paths)} back as the release has it"
    if target.git_dir is not None:
        words = " ".join(map(quote, paths))
        back += (
            f" (if the last commit does: git -C {quote(target.root)} checkout HEAD -- {words}, which drops all edits)"
        )
    return f"{back}, or take a pristine tree; then apply"


def _refuse(
    target: Target, asked: Mapping[str, Row], fitting: Sequence[str], absent: Sequence[str], *, named: bool
) -> None:
    drifted = [row for row in asked.values() if row.finding.verdict == "drifted"]
    misfits = [row for row in asked.values() if row.remedy == "does-not-fit"]
    missing = [row for row in asked.values() if row.remedy == "none" and named]
    reasons = [f"{row.finding.fix_id} drifted ({row.finding.reason})" for row in drifted]
    reasons += [f"{row.finding.fix_id} does not fit ({row.misfit})" for row in misfits]
    reasons += [f"{row.finding.fix_id} has no patch for {row.finding.release} yet" for row in missing]
    if not reasons:
        return
    half = [path for row in drifted for path in row.finding.half]
    ways = [f"apply only what fits: --only {','.join(fitting)}"] if fitting else []
    advice = {row.misfit_hint: None for row in misfits if row.misfit_hint}
    if half:
        ways.append(to_finish(target, half))
    elif absent and is_sparse(target.git_dir):
        folders = " ".join(quote(folder) for folder in sorted({path.rpartition("/")[0] for path in absent}))
        ways.append(
            f"get the missing files, the checkout is sparse: git -C {quote(target.root)} sparse-checkout add {folders}"
        )
    elif len(advice) == 1 and not drifted:
        ways.append(next(iter(advice)))
    elif (drifted or misfits) and not fitting:
        ways.append("see what differs: `megatron-fixes scan` names the functions and the lines")
    elif not fitting:
        ways.append("see `megatron-fixes list` for the releases that each fix has a patch for")
    hint = "; or ".join(ways)
    hint = hint[0].upper() + hint[1:]
    raise RefusedError("nothing was changed: " + "; ".join(reasons), context=str(target.root), hint=hint)
