# SPDX-License-Identifier: Apache-2.0
"""``megatron-fixes scan``: what each fix is to a target, why, and what to type next. Reads only.

Exit code 0 whatever was found; with ``--check`` 1 if a fix is needed or a touched function has drifted. What
differs in a drifted function is shown up to 20 lines a fix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from megatron_fixes.cli import output
from megatron_fixes.cli.options import as_typed, json_option, note_tree_here
from megatron_fixes.errors import RefusedError
from megatron_fixes.patching.shell import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_fixes.catalog import Catalog
    from megatron_fixes.catalog.matrix import Matrix
    from megatron_fixes.catalog.verdict import Difference
    from megatron_fixes.patching.scan import Row
    from megatron_fixes.patching.target import Target

MAX_DIFFERENCE_LINES = 20


def row_reason(row: Row) -> str:
    """Why the verdict is what it is and, where a patch doesn't fit, why not; one line."""
    return f"{row.finding.reason}; the patch does not fit: {row.misfit}" if row.misfit else row.finding.reason


def to_json(
    target: Target, rows: Sequence[Row], matrix: Matrix, interrupted: str, others: Sequence[str]
) -> dict[str, Any]:
    """The findings as plain values."""
    fixes = [
        {
            "id": row.finding.fix_id,
            "slug": matrix.fixes[row.finding.fix_id].slug,
            "verdict": row.finding.verdict,
            "remedy": row.remedy,
            "reason": row_reason(row),
            "differences": [
                {"function": known.function, "nearest": known.nearest, "changes": list(known.changes)}
                for known in row.finding.differences
            ],
            "misfit": row.misfit or None,
        }
        for row in rows
    ]
    return {
        "target": str(target.root),
        "release": target.release,
        "release_source": target.release_source or None,
        "interrupted": interrupted or None,
        "from_other_patches": list(others),
        "fixes": fixes,
    }


def difference_lines(differences: Sequence[Difference], limit: int = MAX_DIFFERENCE_LINES) -> list[str]:
    """How functions differ from the nearest known texts: a line each for the function and its changes."""
    lines: list[str] = []
    for difference in differences:
        path, _, name = difference.function.partition("::")
        lines.append(f"  {name} in {path}, nearest known text: {difference.nearest}")
        lines += [f"    {change}" for change in difference.changes]
    if len(lines) > limit:
        lines[limit:] = [f"    ... and {len(lines) - limit} more"]
    return lines


def details(rows: Sequence[Row]) -> dict[tuple[str, tuple[str, ...]], list[str]]:
    """What differs, each with the fixes that it is the reason for: several may touch one function."""
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for row in rows:
        lines = difference_lines(row.finding.differences)
        lines += [f"  {row.misfit}", f"    hint: {row.misfit_hint}"] if row.misfit else []
        if lines:
            what = "drifted" if row.finding.verdict == "drifted" else "does not fit"
            found.setdefault((what, tuple(lines)), []).append(row.finding.fix_id)
    return found


def next_step(rows: Sequence[Row], catalog: Catalog, target: Target, where: str) -> str:
    """The one command to type after this scan, and what it is for where that could be mistaken."""
    ids = {row.finding.fix_id: row for row in rows if not catalog.is_gated(row.finding.fix_id)}
    fitting = [fix_id for fix_id, row in ids.items() if row.remedy == "patch"]
    blocked = [
        fix_id for fix_id, row in ids.items() if row.finding.verdict == "drifted" or row.remedy == "does-not-fit"
    ]
    bare = [fix_id for fix_id, row in ids.items() if row.remedy == "none"]
    if fitting:
        only = f" --only {','.join(fitting)}" if blocked else ""
        return f"megatron-fixes apply {where}{only}"
    if blocked or bare:
        return f"megatron-fixes explain {(blocked or bare)[0]}"
    if any(row.finding.verdict == "applied" for row in rows) and target.release in catalog.matrix.releases:
        return f"megatron-fixes prove --release {target.release} shows them on the published release"
    return "megatron-fixes list"


def renew(where: str) -> str:
    """The command that puts this version's patches in place of another's."""
    return f"megatron-fixes revert {where} && megatron-fixes apply {where}"


def print_head(target: Target) -> None:
    """Print which tree it is, its release, and what named the release."""
    output.labelled("target", shown(target.root) + (" (installed)" if target.installed else ""), 9, wrap=False)
    release = f"{target.release} ({target.release_source})" if target.release else "unknown (no file or tag names it)"
    output.labelled("release", release, 9, wrap=False)


def interruption(target: Target) -> str:
    """What the journal says of a transaction that was cut short, as a sentence; empty if nothing was."""
    from megatron_fixes.patching.transaction import read_state

    try:
        state = read_state(target)
    except RefusedError as error:
        return f"the journal can't be read: {error.message} ({shown(error.context)})"
    if state is None or state.interrupted is None:
        return ""
    way = "undo" if state.interrupted == "apply" else "complete"
    return f"interrupted: an earlier {state.interrupted} was cut short; the next apply or revert will {way} it"


def from_other_patches(target: Target, catalog: Catalog) -> list[str]:
    """Ids of fixes that the journal holds and whose patches this version does not have: another one applied them."""
    from megatron_fixes.patching.transaction import read_state

    try:
        state = read_state(target)
    except RefusedError:
        return []
    if state is None:
        return []
    ours = {(patch.fix_id, patch.sha256) for series in catalog.series.values() for patch in series.patches}
    patched = {file.path for file in state.files if file.status == "patched"}
    others = [fix for fix in state.fixes if (fix.id, fix.patch_sha256) not in ours]
    return [fix.id for fix in others if patched.intersection(fix.files or patched)]


def other_patches_sentence(others: Sequence[str]) -> str:
    """What those fixes mean for the user; empty if there are none."""
    what = f"{', '.join(others)} came from patches that this version of megatron-fixes does not have"
    return f"{what}; revert takes them out all the same" if others else ""


def _print(target: Target, rows: Sequence[Row], catalog: Catalog, where: str) -> None:
    print_head(target)
    output.say()
    output.table(
        ("fix", "verdict", "remedy", "what", "reason", "symptom"),
        [
            (
                row.finding.fix_id,
                row.finding.verdict,
                row.remedy or "",
                catalog.matrix.fixes[row.finding.fix_id].slug,
                row.finding.reason,
                # Of a defect that is not there nobody sees anything.
                catalog.matrix.fixes[row.finding.fix_id].symptom
                if row.finding.verdict in ("needed", "drifted")
                else "",
            )
            for row in rows
        ],
        stacked=3,
    )
    for (what, lines), fix_ids in details(rows).items():
        output.say()
        output.say(f"{', '.join(fix_ids)} {what}:", "bold yellow")
        for line in lines:
            output.say(line)
    output.say()
    if sentence := interruption(target):
        output.say(sentence, "bold yellow")
    if others := from_other_patches(target, catalog):
        output.say(other_patches_sentence(others), "bold yellow")
        output.say(f"next: {renew(where)}")
    else:
        output.say(f"next: {next_step(rows, catalog, target, where)}")


@click.command("scan")
@click.argument("target", required=False)
@click.option("--check", is_flag=True, help="End with 1 if a fix is needed or has drifted.")
@json_option
def scan_command(target: str | None, check: bool, as_json: bool) -> int:
    """Say what each fix is to a Megatron-LM tree. Writes nothing.

    TARGET is a checkout, an unpacked source tree or a site-packages folder; left out, it is what `import
    megatron.core` would choose here.
    """
    from megatron_fixes.catalog import load
    from megatron_fixes.patching.scan import scan
    from megatron_fixes.patching.target import find_target

    catalog = load(compiled=True)
    found = find_target(target)
    if target is None:
        note_tree_here(found)
    rows = scan(found, catalog)
    if as_json:
        others = from_other_patches(found, catalog)
        output.print_json(to_json(found, rows, catalog.matrix, interruption(found), others))
    else:
        _print(found, rows, catalog, as_typed(found, target))
    bad = any(row.finding.verdict in ("needed", "drifted") for row in rows)
    return 1 if check and bad else 0
