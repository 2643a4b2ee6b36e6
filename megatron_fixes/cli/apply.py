# SPDX-License-Identifier: Apache-2.0
"""``megatron-fixes apply``: puts the needed fixes into a target, all or nothing, and says how to take them out.

What can't work on this machine is refused before anything is written, unless ``--force`` overrides it. An interrupted
earlier transaction is mended first and said. ``--dry-run`` prints the plan and a diff that ``git apply`` takes, and
writes nothing, not even that mending. An installed package is written to only with ``--installed``.
Of fixes after which something that worked does not go on as it did, it says what to know.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import click

from megatron_fixes.cli import output
from megatron_fixes.cli.machine import before_apply
from megatron_fixes.cli.options import apply_again, as_typed, json_option, only_option
from megatron_fixes.cli.scan import (
    from_other_patches,
    interruption,
    likeness_of,
    other_patches_sentence,
    print_head,
    renew,
    row_reason,
)
from megatron_fixes.errors import RefusedError
from megatron_fixes.patching.ids import known_fixes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from megatron_fixes.catalog import Catalog
    from megatron_fixes.patching.outcome import Recovery
    from megatron_fixes.patching.plan import Plan
    from megatron_fixes.patching.scan import Row
    from megatron_fixes.patching.target import Target

_LABEL = 10
_NO_LINE_END = "\\ No newline at end of file\n"


def unified_diff(changes: Mapping[str, tuple[bytes, bytes]]) -> Iterator[str]:
    """Yield the lines of a git diff of changed files, each with its line end; bytes that aren't UTF-8 are escaped."""
    from megatron_fixes.patching.unified import split_lines

    for path in sorted(changes):
        before, after = (split_lines(content.decode("utf-8", "surrogateescape"), "\n") for content in changes[path])
        yield f"diff --git a/{path} b/{path}\n"
        for line in difflib.unified_diff(before, after, f"a/{path}", f"b/{path}"):
            yield line if line.endswith("\n") else f"{line}\n{_NO_LINE_END}"


def recovery_sentence(recovery: Recovery) -> str:
    """What was mended, as a sentence."""
    done = "undone" if recovery.action == "apply" else "completed"
    return f"mended: an interrupted {recovery.action} was {done} ({', '.join(recovery.fixes) or 'no fix'})"


def recovery_json(recovery: Recovery | None) -> dict[str, Any] | None:
    """What was mended, as plain values."""
    if recovery is None:
        return None
    return {"action": recovery.action, "files": list(recovery.files), "fixes": list(recovery.fixes)}


def _only_again(only: Sequence[str]) -> str:
    return f" --only {','.join(only)}" if only else ""


def _refuse_installed(target: Target, only: Sequence[str], where: str) -> None:
    if target.installed:
        raise RefusedError(
            "got an installed megatron-core, expected a checkout or an unpacked copy: an upgrade would lose the "
            "fixes, and every program of this environment would run them",
            context=str(target.root),
            hint=f"Apply to an unpacked copy that stands first on PYTHONPATH, or repeat with: "
            f"{apply_again(target, where)}{_only_again(only)}",
        )


def _requirers(plan: Plan, fix_id: str) -> str:
    return ", ".join(patch.fix_id for patch in plan.patches if fix_id in patch.header.requires)


def _before(plan: Plan, catalog: Catalog) -> dict[str, str]:
    """What to know before these fixes are put in; fix to sentence, for those of which there is something."""
    known = {patch.fix_id: catalog.matrix.fixes[patch.fix_id].before_you_apply for patch in plan.patches}
    return {fix_id: sentence for fix_id, sentence in known.items() if sentence}


def _print_plan(plan: Plan, catalog: Catalog, *, done: bool) -> None:
    verb = "applied" if done else "to apply"
    for patch in plan.patches:
        output.labelled(verb, f"{patch.fix_id}  {patch.header.description}", _LABEL, wrap=False)
    for fix_id in plan.required:
        output.labelled("", f"pulled in {fix_id} because {_requirers(plan, fix_id)} requires it", _LABEL, wrap=False)
    for fix_id, sentence in _before(plan, catalog).items():
        output.fact("note", f"{fix_id}  {sentence}", _LABEL)
    for row in plan.already:
        text = f"{row.finding.fix_id}  {row.finding.verdict}: {row_reason(row)}"
        output.labelled("no change", text, _LABEL, wrap=False)
    for label, rows, why in _left(plan):
        for row in rows:
            output.labelled(label, f"{row.finding.fix_id}  needed, but {why(row)}", _LABEL, wrap=False)
    for path in plan.changes:
        output.labelled("wrote" if done else "to write", path, _LABEL, wrap=False)


def _left(plan: Plan) -> tuple[tuple[str, Sequence[Row], Callable[[Row], str]], ...]:
    """The needed fixes that are not applied: label, rows, and why."""
    return (
        ("no patch", plan.without_patch, lambda row: f"there is no patch for {row.finding.release} yet"),
        ("gated", plan.gated, lambda row: f"only applied by name: --only {row.finding.fix_id}"),
    )


def _nothing(plan: Plan) -> str:
    left = [f"{row.finding.fix_id} is needed, but {why(row)}" for _, rows, why in _left(plan) for row in rows]
    return f"nothing to apply: {'; '.join(left)}" if left else "nothing to do"


def _to_json(
    target: Target, catalog: Catalog, plan: Plan, notes: Sequence[str], recovered: Recovery | None, dry_run: bool
) -> Any:
    return {
        "target": str(target.root),
        "release": target.release,
        "applied": [patch.fix_id for patch in plan.patches],
        "already": [row.finding.fix_id for row in plan.already],
        "without_patch": [row.finding.fix_id for row in plan.without_patch],
        "gated": [row.finding.fix_id for row in plan.gated],
        "required": list(plan.required),
        "before_you_apply": _before(plan, catalog),
        "files": sorted(plan.changes),
        "notes": list(notes),
        "recovered": recovery_json(recovered),
        "dry_run": dry_run,
    }


def _plan(target: Target, catalog: Catalog, only: Sequence[str], where: str) -> tuple[Plan, list[str]]:
    """Plan; also return a note, or none, on fixes that came from other patches than this version's.

    Raises:
        RefusedError: As ``make_plan``; the hint tells of what is the likelier reason: another command that is at work
            or was cut short, or other patches.
    """
    from megatron_fixes.patching.plan import make_plan

    others = from_other_patches(target, catalog)
    try:
        return make_plan(target, catalog, only), [other_patches_sentence(others)] if others else []
    except RefusedError as error:
        if sentence := interruption(target):
            error.hint = f"Repeat when no other megatron-fixes is at work ({sentence})."
        elif others:
            error.hint = f"{other_patches_sentence(others)}. Renew them: {renew(target, where)}"
        raise


def _dry_run(target: Target, catalog: Catalog, plan: Plan, notes: Sequence[str], as_json: bool) -> int:
    if as_json:
        output.print_json(_to_json(target, catalog, plan, notes, None, dry_run=True))
        return 0
    print_head(target, catalog, likeness_of(target, catalog))
    output.say()
    for sentence in notes:
        output.say(sentence, "bold yellow")
    _print_plan(plan, catalog, done=False)
    output.say("dry run: nothing was written" if plan.changes else _nothing(plan), "bold")
    if plan.changes:
        output.say()
        output.diff(unified_diff(plan.changes))
    return 0


def _print_outcome(plan: Plan, catalog: Catalog, notes: Sequence[str], where: str) -> None:
    _print_plan(plan, catalog, done=True)
    for sentence in notes:
        output.labelled("note", sentence, _LABEL, wrap=False)
    output.say()
    output.say(f"to take them out: megatron-fixes revert {where}" if plan.changes else _nothing(plan))


@click.command("apply")
@click.argument("target_path", metavar="TARGET")
@only_option
@click.option("--dry-run", is_flag=True, help="Print the plan and the diff; write nothing.")
@click.option("--installed", is_flag=True, help="Write even into an installed megatron-core.")
@click.option(
    "--force", is_flag=True, help="Apply even if training can't work on this machine; say what is overridden."
)
@json_option
def apply_command(
    target_path: str, only: tuple[str, ...], dry_run: bool, installed: bool, force: bool, as_json: bool
) -> int:
    """Put the needed fixes into a Megatron-LM tree, all or nothing.

    TARGET is a checkout, an unpacked source tree or a site-packages folder. Without --only: every needed fix
    that has a patch for the tree's release; a gated one, which changes training in a debatable way, is put in only by
    name. Refused as a whole if one of them has drifted or does not fit.
    """
    from megatron_fixes.catalog import load
    from megatron_fixes.patching.target import find_target
    from megatron_fixes.patching.transaction import commit, recover

    catalog = load(compiled=True)
    only = known_fixes(catalog.matrix, only)
    target = find_target(target_path)
    where = as_typed(target, target_path)
    if not installed:
        _refuse_installed(target, only, where)
    again = f"{apply_again(target, where)}{_only_again(only)} --force"
    machine = before_apply(target.release, catalog.matrix, again, force=force, dry_run=dry_run)
    if dry_run:
        notes = [sentence] if (sentence := interruption(target)) else []
        plan, others = _plan(target, catalog, only, where)
        return _dry_run(target, catalog, plan, [*machine, *notes, *others], as_json)
    recovered = recover(target)
    if recovered is not None and not as_json:
        with output.telling(recovery_sentence(recovered)):
            output.say(recovery_sentence(recovered), "bold yellow")
    plan, others = _plan(target, catalog, only, where)
    notes = [*machine, *others]
    # Asked before its text changes, so that it is what scan says.
    like = likeness_of(target, catalog)
    if plan.changes:
        committed = commit(target, plan.changes, plan.fixes, release=target.release)
        recovered = recovered or committed.recovered
        notes += committed.notes
    done = f"{', '.join(patch.fix_id for patch in plan.patches)} applied to {where}" if plan.changes else ""
    with output.telling(done):
        if as_json:
            output.print_json(_to_json(target, catalog, plan, notes, recovered, dry_run=False))
        else:
            print_head(target, catalog, like)
            output.say()
            _print_outcome(plan, catalog, notes, where)
    return 0
