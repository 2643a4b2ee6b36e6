# SPDX-License-Identifier: Apache-2.0
"""``megatron-fixes revert``: brings back the bytes that the target's files had before the first apply.

Takes back what ``apply`` wrote, and nothing else: fixes that came by ``git apply`` have no journal, so they are
named, with the command that takes them out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from megatron_fixes.cli import output
from megatron_fixes.cli.apply import recovery_json, recovery_sentence
from megatron_fixes.cli.options import as_typed, json_option
from megatron_fixes.cli.plain_git import git_apply
from megatron_fixes.cli.scan import print_head
from megatron_fixes.errors import RefusedError

if TYPE_CHECKING:
    from megatron_fixes.catalog import Catalog
    from megatron_fixes.catalog.series import PatchFile
    from megatron_fixes.patching.target import Target

_LABEL = 10


def patches_inside(target: Target, catalog: Catalog) -> list[PatchFile]:
    """The patches of the fixes that the target's text carries, in series order."""
    from megatron_fixes.patching.scan import scan

    found: list[PatchFile] = []
    for row in scan(target, catalog):
        finding = row.finding
        if finding.verdict == "applied" and finding.release is not None:
            patch = catalog.patch(finding.fix_id, finding.release)
            found += [patch] if patch else []
    order = [patch.name for series in catalog.series.values() for patch in series.patches]
    return sorted(found, key=lambda patch: order.index(patch.name))


@click.command("revert")
@click.argument("target_path", metavar="TARGET")
@json_option
def revert_command(target_path: str, as_json: bool) -> int:
    """Take out what `apply` put into a tree: every file gets its bytes of before.

    Refused if one of the files was edited since.
    """
    from megatron_fixes.catalog import load
    from megatron_fixes.patching.target import find_target
    from megatron_fixes.patching.transaction import revert

    catalog = load()
    target = find_target(target_path)
    reverted = revert(target)
    if reverted.recovered is not None and not as_json:
        output.say(recovery_sentence(reverted.recovered), "bold yellow")
    inside = patches_inside(target, catalog)
    ids = ", ".join(patch.fix_id for patch in inside)
    command = git_apply(target, [patch.path for patch in inside], reverse=True)
    if reverted.nothing and inside:
        raise RefusedError(
            f"got {ids} in the tree but no journal of an apply: they came another way, such as git apply",
            context=str(target.root),
            hint=f"Take them out with: {command}",
        )
    notes = [f"{ids} stayed, since no apply put them in; take them out with: {command}"] if inside else []
    if as_json:
        output.print_json(
            {
                "target": str(target.root),
                "release": target.release,
                "reverted": list(reverted.fixes),
                "files": list(reverted.files),
                "notes": notes,
                "recovered": recovery_json(reverted.recovered),
            }
        )
        return 0
    print_head(target)
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
    else:
        output.say()
        output.say(f"to put them in again: megatron-fixes apply {as_typed(target, target_path)}")
    return 0
