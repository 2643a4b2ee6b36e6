# SPDX-License-Identifier: Apache-2.0
"""``megatron-fixes revert``: brings back the bytes that the target's files had before the first apply.

Takes back what ``apply`` wrote, and nothing else: fixes that came by ``git apply`` have no journal, so they are
named, with the command that takes them out. Where a file was edited since, nothing is lost: the command that takes
the fixes out and keeps the edits is shown, and once they are out, ``revert`` removes the journal and says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from megatron_fixes.cli import output
from megatron_fixes.cli.apply import recovery_json, recovery_sentence
from megatron_fixes.cli.options import apply_again, as_typed, json_option
from megatron_fixes.cli.plain_git import git_apply
from megatron_fixes.cli.scan import likeness_of, print_head
from megatron_fixes.errors import DoesNotFitError, RefusedError
from megatron_fixes.patching.shell import quote, shown

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from megatron_fixes.catalog import Catalog
    from megatron_fixes.catalog.series import PatchFile
    from megatron_fixes.patching.outcome import EditedError, Reverted
    from megatron_fixes.patching.scan import Row
    from megatron_fixes.patching.target import Target

_LABEL = 10


def patches_inside(rows: Iterable[Row], catalog: Catalog) -> list[PatchFile]:
    """The patches of the fixes that the target's text carries, in series order."""
    found: list[PatchFile] = []
    for row in rows:
        finding = row.finding
        if finding.verdict == "applied" and finding.release is not None:
            patch = catalog.patch(finding.fix_id, finding.release)
            found += [patch] if patch else []
    order = [patch.name for series in catalog.series.values() for patch in series.patches]
    return sorted(found, key=lambda patch: order.index(patch.name))


def come_out(patches: Sequence[PatchFile], files: Mapping[str, bytes]) -> bool:
    """Whether plain git can take patches out of some files, the last one first."""
    from megatron_fixes.patching.hunks import reverse_patch

    now = dict(files)
    try:
        for patch in reversed(patches):
            now.update(reverse_patch(patch.text, now, source=patch.name))
    except DoesNotFitError:
        return False
    return True


def _out_already(edited: EditedError, rows: Iterable[Row]) -> bool:
    """Whether none of a journal's fixes is in the target, wholly or in part, as far as its text tells."""
    out = {row.finding.fix_id for row in rows if row.finding.verdict not in ("applied", "drifted")}
    return not edited.some_intact and out.issuperset(edited.fixes)


def _way_out(edited: EditedError, target: Target, catalog: Catalog, rows: Iterable[Row], where: str) -> str:
    """What to type so that the fixes go and the edits stay; where git can't tell them apart, what else to do."""
    from megatron_fixes.patching.scan import read_files

    inside = [patch for patch in patches_inside(rows, catalog) if patch.fix_id in edited.fixes]
    drifted = {row.finding.fix_id for row in rows if row.finding.verdict == "drifted"}
    again = f"megatron-fixes revert {where}"
    if inside and not drifted.intersection(edited.fixes) and come_out(inside, read_files(target, catalog)):
        command = git_apply(target, [patch.path for patch in inside], reverse=True)
        return f"Take the fixes out, keep your edits, and let revert forget the rest: {command} && {again}"
    return (
        f"Your edits touch the fixes' own lines. To give the edits up: {edited.give_up} && {again}. To keep them: take "
        f"{', '.join(edited.fixes)} out by hand, then forget the bytes from before: rm -r {quote(edited.journal)}"
    )


def _revert(target: Target, catalog: Catalog, where: str) -> Reverted:
    """Bring back the bytes; or, where files were edited and the fixes are out already, only forget them."""
    from megatron_fixes.patching.outcome import EditedError
    from megatron_fixes.patching.scan import scan
    from megatron_fixes.patching.transaction import revert, settle

    try:
        return revert(target)
    except EditedError as error:
        rows = scan(target, catalog)
        if _out_already(error, rows):
            return settle(target)
        error.hint = _way_out(error, target, catalog, rows, where)
        raise


def _half_in(rows: Iterable[Row], reverted: Reverted) -> list[str]:
    """Sentences on fixes that an apply had put in and of which something may be left, in files that were edited."""
    ours = {*reverted.fixes, *reverted.edited}
    drifted = [row.finding for row in rows if row.finding.verdict == "drifted" and row.finding.fix_id in ours]
    return [f"{found.fix_id} may be in the tree in part, look with `megatron-fixes scan`: {found.reason}"
            for found in drifted]  # fmt: skip


def _again(target: Target, rows: Iterable[Row], catalog: Catalog, reverted: Reverted, where: str) -> str:
    """The command that puts in what was taken out, and nothing else."""
    fitting = {row.finding.fix_id for row in rows if row.remedy == "patch" and not catalog.is_gated(row.finding.fix_id)}
    only = "" if fitting == set(reverted.fixes) else f" --only {','.join(reverted.fixes)}"
    return apply_again(target, where) + only


def _notes(target: Target, catalog: Catalog, reverted: Reverted, rows: Sequence[Row]) -> list[str]:
    """Which fixes are in the tree all the same, wholly or in part, why, and how to take them out.

    Raises:
        RefusedError: There are some, and there was no journal.
    """
    inside = patches_inside(rows, catalog)
    ids = ", ".join(patch.fix_id for patch in inside)
    command = git_apply(target, [patch.path for patch in inside], reverse=True)
    if reverted.nothing and inside:
        raise RefusedError(
            f"got {ids} in the tree but no journal that could take them out: they came another way, such as git "
            "apply, or are part of bytes that a revert brought back",
            context=shown(target.root),
            hint=f"Take them out with: {command}",
        )
    notes = _half_in(rows, reverted)
    if reverted.forgotten:
        gone = ", ".join(reverted.forgotten)
        notes.append(f"{gone} out already, so only the journal was removed; no file was changed")
    before_edit = [patch.fix_id for patch in inside if patch.fix_id in reverted.edited]
    other = [patch.fix_id for patch in inside if patch.fix_id not in reverted.edited]
    why = []
    if before_edit:
        names = ", ".join(before_edit)
        why.append(f"{names} stayed: applied before a file was edited, and revert brought back the bytes of the edit")
    if other:
        why.append(f"{', '.join(other)} stayed, since no apply put them in")
    if why:
        notes.append(f"{'; '.join(why)}; take out with: {command}")
    return notes


def _what_was_done(reverted: Reverted, where: str) -> str:
    if reverted.nothing:
        return ""
    what = "the journal was removed" if reverted.forgotten else f"{', '.join(reverted.fixes) or 'files'} reverted"
    return f"{what} ({where})"


def _to_json(target: Target, reverted: Reverted, notes: Sequence[str]) -> dict[str, Any]:
    return {
        "target": str(target.root),
        "release": target.release,
        "reverted": list(reverted.fixes),
        "forgotten": list(reverted.forgotten),
        "files": list(reverted.files),
        "notes": list(notes),
        "recovered": recovery_json(reverted.recovered),
    }


def _print(target: Target, catalog: Catalog, reverted: Reverted, notes: Sequence[str], again: str) -> None:
    print_head(target, catalog, likeness_of(target, catalog))
    output.say()
    for fix_id in reverted.fixes:
        slug = catalog.matrix.fixes[fix_id].slug if fix_id in catalog.matrix.fixes else ""
        output.labelled("reverted", f"{fix_id}  {slug}".rstrip(), _LABEL, wrap=False)
    for path in reverted.files:
        output.labelled("restored", path, _LABEL, wrap=False)
    for note in notes:
        output.labelled("note", note, _LABEL, wrap=False)
    if reverted.nothing:
        output.say("nothing to revert")
    elif not reverted.forgotten and reverted.fixes:
        output.say()
        output.say(f"to put them in again: {again}")


@click.command("revert")
@click.argument("target_path", metavar="TARGET")
@json_option
def revert_command(target_path: str, as_json: bool) -> int:
    """Take out what `apply` put into a tree: every file gets its bytes of before.

    Refused if one of the files was edited since, with the command that takes the fixes out and keeps the edits. To
    take out one fix of several, revert, then put the others in again with `apply --only`.
    """
    from megatron_fixes.catalog import load
    from megatron_fixes.patching.scan import scan
    from megatron_fixes.patching.target import find_target

    catalog = load(compiled=True)
    target = find_target(target_path)
    where = as_typed(target, target_path)
    reverted = _revert(target, catalog, where)
    with output.telling(_what_was_done(reverted, where)):
        if reverted.recovered is not None and not as_json:
            output.say(recovery_sentence(reverted.recovered), "bold yellow")
        rows = scan(target, catalog)
        notes = _notes(target, catalog, reverted, rows)
        if as_json:
            output.print_json(_to_json(target, reverted, notes))
        else:
            _print(target, catalog, reverted, notes, _again(target, rows, catalog, reverted, where))
    return 0
