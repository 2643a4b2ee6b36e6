# SPDX-License-Identifier: Apache-2.0
"""``megatron-fixes doctor``: what a training job in this environment would get, and whether the overlay would be in it.

Reads metadata and files; imports neither torch nor Megatron. Speaks of the interpreter that runs it: run it
where, and as, the job runs. Ends with 1 under ``--check`` if something needs doing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from megatron_fixes.cli import output
from megatron_fixes.cli.environment import Package, packages
from megatron_fixes.cli.options import json_option, note_tree_here
from megatron_fixes.config import ALL, FIXES, asked_fixes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_fixes.overlay.origin import Facts
    from megatron_fixes.patching.scan import Row

_LABEL = 22


def megatron_core() -> tuple[Package, list[Row]]:
    """The megatron-core that would be imported, and what each fix is to it."""
    from megatron_fixes.catalog import load
    from megatron_fixes.errors import UsageError
    from megatron_fixes.patching.scan import scan
    from megatron_fixes.patching.target import find_target

    try:
        target = find_target(None)
        note_tree_here(target)
    except UsageError as error:
        note_tree_here(None)
        return Package("megatron-core", None, None, error.message), []
    release = target.release or "unknown"
    return Package("megatron-core", release, str(target.root), target.release_source), scan(target, load())


def overlay_line(facts: Facts) -> str:
    """Whether a job started now would run with the overlay, and why."""
    asked = _asked(facts)
    if not asked:
        return "off: MEGATRON_FIXES is not set; MEGATRON_FIXES=all turns it on"
    if facts.pth_problem:
        return f"NOT in force, though MEGATRON_FIXES={asked}"
    return f"on: MEGATRON_FIXES={asked}"


def advice(found: Sequence[Package], rows: Sequence[Row], facts: Facts) -> list[str]:
    """What needs doing, one sentence each."""
    todo = [
        f"{package.name}: {package.note}" for package in found if package.name == "apex" and "uninstall" in package.note
    ]
    if facts.pth_problem:
        todo.append(f"overlay: {facts.pth_problem}")
    if len(facts.trees) > 1:
        todo.append(f"megatron-core lies in several places, and the first is used: {', '.join(facts.trees)}")
    return todo + _about_fixes(rows, asked_fixes(_asked(facts)))


def _about_fixes(rows: Sequence[Row], asked: Sequence[str]) -> list[str]:
    if not rows:
        return ["megatron-core: none found; run this as the job runs, or look at a tree with `megatron-fixes scan DIR`"]
    todo = [f"MEGATRON_FIXES: no fix is called {fix}" for fix in asked if fix != ALL and fix not in _ids(rows)]
    needed = [row for row in rows if row.finding.verdict in ("needed", "drifted")]
    if needed and not asked:
        ids = ", ".join(row.finding.fix_id for row in needed)
        todo.append(f"the overlay is off, and {ids} would be wanted: set MEGATRON_FIXES=all, or apply the patches")
    for row in needed if asked else ():
        if row.remedy != "patch" and (ALL in asked or row.finding.fix_id in asked):
            why = "has drifted" if row.remedy is None else "does not fit" if row.remedy != "none" else "has no patch"
            end = "it is not in force, and MEGATRON_FIXES_STRICT=1 would stop the job; see `megatron-fixes scan`"
            todo.append(f"{row.finding.fix_id} is asked for and {why} for this megatron-core: {end}")
    return todo


def _ids(rows: Sequence[Row]) -> set[str]:
    return {row.finding.fix_id for row in rows}


def _asked(facts: Facts) -> str:
    return next((setting["value"] for setting in facts.settings if setting["name"] == FIXES), "")


def _to_json(found: Sequence[Package], rows: Sequence[Row], facts: Facts, todo: Sequence[str]) -> dict[str, Any]:
    return {
        "packages": [{"name": p.name, "version": p.version, "where": p.where, "note": p.note} for p in found],
        "fixes": [{"id": r.finding.fix_id, "verdict": r.finding.verdict, "remedy": r.remedy} for r in rows],
        "overlay": facts.to_json(),
        "todo": list(todo),
    }


def _print(found: Sequence[Package], rows: Sequence[Row], facts: Facts, todo: Sequence[str]) -> None:
    for package in found:
        text = "none" if package.version is None else f"{package.version}  {package.where}"
        note = f"  ({package.note})" if package.note else ""
        output.labelled(package.name, text + note, _LABEL, wrap=False)
    output.say()
    for row in rows:
        remedy = f", remedy {row.remedy}" if row.remedy else ""
        output.labelled(row.finding.fix_id, f"{row.finding.verdict}{remedy}", _LABEL, wrap=False)
    output.say()
    output.labelled("overlay", overlay_line(facts), _LABEL, wrap=False)
    output.labelled(".pth", ", ".join(facts.pth_found) or "none", _LABEL, wrap=False)
    for setting in facts.settings:
        output.labelled(setting["name"], f"{setting['value'] or '-'}  ({setting['source']})", _LABEL, wrap=False)
    output.say()
    for sentence in todo:
        output.labelled("to do", sentence, _LABEL, wrap=False)
    output.say("" if todo else "nothing to do", "bold")


@click.command("doctor")
@click.option("--check", is_flag=True, help="End with 1 if something needs doing.")
@json_option
def doctor_command(check: bool, as_json: bool) -> int:
    """Show what a training job in this environment would get, and whether the overlay would be in it.

    Python, torch, megatron-core, Apex (NVIDIA's, or the unrelated project of that name), TransformerEngine, where
    the overlay would come from, and every setting with its source. Imports none of them.
    """
    from megatron_fixes import overlay

    facts = overlay.where_from()
    core, rows = megatron_core()
    found = [*packages(), core]
    todo = advice(found, rows, facts)
    if as_json:
        output.print_json(_to_json(found, rows, facts, todo))
    else:
        _print(found, rows, facts, todo)
    return 1 if check and todo else 0
