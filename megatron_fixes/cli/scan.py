# SPDX-License-Identifier: Apache-2.0
"""``megatron-fixes scan``: what each fix is to a target, why, and what to type next. Reads only.

Exit code 0 whatever was found; with ``--check`` 1 if a fix is needed, a touched function has drifted, or an apply or
revert was cut short, whose end is open. Gated fixes do not count there: what ``apply`` without names leaves alone is no
failure. What differs in a drifted function is shown up
to 20 lines a fix.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, get_args

import click

from megatron_fixes.catalog import without_local
from megatron_fixes.catalog.ranges import compact
from megatron_fixes.catalog.verdict import Verdict
from megatron_fixes.cli import output
from megatron_fixes.cli.options import apply_again, as_typed, json_option, named, note_tree_here
from megatron_fixes.errors import RefusedError
from megatron_fixes.patching.shell import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_fixes.catalog import Catalog
    from megatron_fixes.catalog.likeness import Likeness
    from megatron_fixes.catalog.verdict import Difference
    from megatron_fixes.patching.scan import Row
    from megatron_fixes.patching.target import Target

MAX_DIFFERENCE_LINES = 20


def row_reason(row: Row) -> str:
    """Why the verdict is what it is and, where a patch doesn't fit, why not; one line."""
    return f"{row.finding.reason}; the patch does not fit: {row.misfit}" if row.misfit else row.finding.reason


def to_json(target: Target, rows: Sequence[Row], catalog: Catalog, like: Likeness | None) -> dict[str, Any]:
    """The findings as plain values."""
    matrix = catalog.matrix
    fixes = [
        {
            "id": row.finding.fix_id,
            "slug": matrix.fixes[row.finding.fix_id].slug,
            "verdict": row.finding.verdict,
            "remedy": row.remedy,
            "gated": catalog.is_gated(row.finding.fix_id),
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
        "yanked": is_yanked(target, catalog),
        "looks_like": like and {"releases": list(like.alike), "functions": like.functions, "of": like.of},
        "interrupted": interruption(target) or None,
        "from_other_patches": from_other_patches(target, catalog),
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


def details(target: Target, rows: Sequence[Row]) -> dict[tuple[str, tuple[str, ...]], list[str]]:
    """What differs, each with the fixes that it is the reason for: several may touch one function."""
    from megatron_fixes.patching.plan import to_finish

    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for row in rows:
        lines = difference_lines(row.finding.differences)
        lines += [f"  {row.misfit}", f"    hint: {row.misfit_hint}"] if row.misfit else []
        if half := row.finding.half:
            lines += [f"  {row.finding.reason}", f"    hint: {to_finish(target, half)}"]
        if lines:
            what = "drifted" if row.finding.verdict == "drifted" else "does not fit"
            found.setdefault((what, tuple(lines)), []).append(row.finding.fix_id)
    return found


def counts(rows: Sequence[Row]) -> str:
    """How many fixes are what, and how many of the needed ones can be put in."""
    number = Counter(row.finding.verdict for row in rows)
    fitting = sum(row.remedy == "patch" for row in rows) or "none"
    have = "has" if fitting == 1 else "have"
    needed = f"{number['needed']} needed"
    needed += f", of which {fitting} {have} a patch that fits" if number["needed"] else ""
    others = [verdict for verdict in get_args(Verdict) if verdict != "needed" and number[verdict]]
    return "; ".join([needed, *(f"{number[verdict]} {verdict.replace('-', ' ')}" for verdict in others)])


def next_step(rows: Sequence[Row], catalog: Catalog, release: str | None, where: str) -> str:
    """The one command to type after this scan, or that nothing is left to do.

    Args:
        rows: What each fix is to the target.
        catalog: The known fixes.
        release: The known release that the target is, or looks like, if any.
        where: The target as a word for the shell.
    """
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
    if any(row.finding.verdict == "applied" for row in rows) and release is not None:
        return f"nothing is left to do; megatron-fixes prove --release {release} shows what they do"
    return "megatron-fixes list"


def read_on(rows: Sequence[Row], release: str | None) -> str:
    """Where to read what needed fixes do, and what is seen of their defects; empty if none is needed."""
    needed = [row.finding.fix_id for row in rows if row.finding.verdict == "needed"]
    if not needed:
        return ""
    of = f" --release {release}" if release else ""
    return f"what each does: megatron-fixes list{of}; one of them: megatron-fixes explain {needed[0]}"


def renew(target: Target, where: str) -> str:
    """The command that puts this version's patches in place of another's."""
    return f"megatron-fixes revert {where} && {apply_again(target, where)}"


def likeness_of(target: Target, catalog: Catalog) -> Likeness | None:
    """The release that the target looks like, whose patches it takes; None if it looks like none."""
    from megatron_fixes.patching.scan import looks_like, read_files

    return looks_like(catalog, read_files(target, catalog), target.release)


def print_head(target: Target, catalog: Catalog, like: Likeness | None) -> None:
    """Print which tree it is, its release, what named the release, and which one it looks like if that is not known."""
    output.labelled("target", shown(target.root) + (" (installed)" if target.installed else ""), 9, wrap=False)
    release = f"{target.release} ({target.release_source})" if target.release else "unknown (no file or tag names it)"
    if is_yanked(target, catalog):
        release += ", withdrawn from PyPI by its maintainers (yanked)"
    output.labelled("release", "; ".join([release, *_code_of(target, catalog, like)]), 9, wrap=False)


def is_yanked(target: Target, catalog: Catalog) -> bool:
    """Whether the target is a release that was withdrawn."""
    known = catalog.matrix.releases.get(without_local(target.release or ""))
    return known is not None and known.yanked


def _code_of(target: Target, catalog: Catalog, like: Likeness | None) -> list[str]:
    """Which release the target's code is, where its name does not say that; one sentence at most."""
    known = catalog.knows(target.release)
    if like is None:
        return [] if known or target.release is None else ["this is no release that is known here"]
    if known and like.release == without_local(target.release or ""):
        return []
    whose = compact(like.alike, catalog.matrix.releases)
    what = f"its code is that of {whose} in {like.functions} of {like.of} functions that fixes touch"
    return [what if known or target.release is None else f"this is no release that is known here; {what}"]


def for_apply_only(target: Target, catalog: Catalog) -> str:
    """That the overlay takes no such target, as a sentence; empty if it does."""
    if catalog.knows(target.release):
        return ""
    name = f"megatron-core {target.release}" if target.release else "a megatron-core that names no release"
    return f"the overlay puts nothing into {name}, which is not known here: only apply takes it"


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


def by_name(rows: Sequence[Row], catalog: Catalog, where: str) -> str:
    """The command that puts in what is needed and gated; empty if nothing is."""
    ids = [row.finding.fix_id for row in rows if row.remedy == "patch" and catalog.is_gated(row.finding.fix_id)]
    return f"megatron-fixes apply {where} --only {','.join(ids)}" if ids else ""


def _print(target: Target, rows: Sequence[Row], catalog: Catalog, where: str, like: Likeness | None) -> None:
    print_head(target, catalog, like)
    output.say()
    output.table(
        ("fix", "verdict", "remedy", "what", "reason", "symptom"),
        [
            (
                row.finding.fix_id,
                row.finding.verdict,
                row.remedy or "",
                named(catalog, row.finding.fix_id),
                row.finding.reason,
                # Of a defect that is not there nobody sees anything.
                catalog.matrix.fixes[row.finding.fix_id].symptom
                if row.finding.verdict in ("needed", "drifted")
                else "",
            )
            for row in rows
        ],
        stacked=3,
        # The symptom would double the width of a line; `explain` has it.
        piped=5,
    )
    output.say()
    output.labelled("", counts(rows), 0, wrap=output.is_terminal())
    for (what, lines), fix_ids in details(target, rows).items():
        output.say()
        output.say(f"{', '.join(fix_ids)} {what}:", "bold yellow")
        for line in lines:
            output.say(line)
    output.say()
    fitting = any(row.remedy == "patch" for row in rows)
    for sentence in (interruption(target), for_apply_only(target, catalog) if fitting else ""):
        if sentence:
            output.say(sentence, "bold yellow")
    claimed = without_local(target.release or "")
    release = claimed if catalog.knows(claimed) else like.release if like else None
    if sentence := read_on(rows, release):
        output.say(sentence)
    if command := by_name(rows, catalog, where):
        output.say(f"only by name: {command}")
    if others := from_other_patches(target, catalog):
        output.say(other_patches_sentence(others), "bold yellow")
        output.say(f"next: {renew(target, where)}")
    else:
        output.say(f"next: {next_step(rows, catalog, release, where)}")


@click.command("scan")
@click.argument("target", required=False)
@click.option(
    "--check",
    is_flag=True,
    help="End with 1 if a fix is needed or has drifted (gated ones don't count), or an apply was cut short.",
)
@json_option
def scan_command(target: str | None, check: bool, as_json: bool) -> int:
    """Say what each fix is to a Megatron-LM tree. Writes nothing.

    TARGET is a checkout, an unpacked source tree or a site-packages folder; left out, it is what `import
    megatron.core` would choose here. A gated fix changes training in a debatable way, and only `apply --only` with its
    name puts it in: --check is about what `apply` without names would do.
    """
    from megatron_fixes.catalog import load
    from megatron_fixes.patching.scan import looks_like, read_files, scan_files
    from megatron_fixes.patching.target import find_target

    catalog = load(compiled=True)
    found = find_target(target)
    if target is None:
        note_tree_here(found)
    files = read_files(found, catalog)
    rows, like = scan_files(files, catalog, found.release), looks_like(catalog, files, found.release)
    if as_json:
        output.print_json(to_json(found, rows, catalog, like))
    else:
        _print(found, rows, catalog, as_typed(found, target), like)
    bad = any(row.finding.verdict in ("needed", "drifted") and not catalog.is_gated(row.finding.fix_id) for row in rows)
    return 1 if check and (bad or interruption(found)) else 0
