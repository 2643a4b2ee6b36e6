# SPDX-License-Identifier: Apache-2.0
"""``megatron-fixes doctor``: what a training job in this environment would get, and whether the overlay would be in it.

Reads metadata and files, and asks the driver; imports neither torch nor Megatron. Speaks of the interpreter and the
machine that run it: run it where, and as, the job runs. Ends with 1 under ``--check`` if something needs doing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from megatron_fixes.cli import machine as machine_block
from megatron_fixes.cli import output
from megatron_fixes.cli.options import GATED, json_option, note_tree_here
from megatron_fixes.config import ALL, FIXES, asked_fixes
from megatron_fixes.machine.finding import printable
from megatron_fixes.machine.packages import Package, packages
from megatron_fixes.patching.ids import did_you_mean, id_of

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from megatron_fixes.catalog import Catalog
    from megatron_fixes.overlay.origin import Facts
    from megatron_fixes.patching.scan import Row

_LABEL = 27


def megatron_core(catalog: Catalog) -> tuple[Package, list[Row], str]:
    """The megatron-core that would be imported, what each fix is to it, and why the overlay would not take it."""
    from megatron_fixes.cli.scan import for_apply_only, is_yanked
    from megatron_fixes.errors import UsageError
    from megatron_fixes.patching.scan import scan
    from megatron_fixes.patching.target import find_target

    try:
        target = find_target(None)
        note_tree_here(target)
    except UsageError as error:
        note_tree_here(None)
        return Package("megatron-core", None, None, error.message), [], ""
    note = target.release_source + ("; withdrawn from PyPI (yanked)" if is_yanked(target, catalog) else "")
    core = Package("megatron-core", target.release or "unknown", str(target.root), note)
    return core, scan(target, catalog), for_apply_only(target, catalog)


def overlay_line(facts: Facts, no_overlay: str) -> str:
    """Whether a job started now would run with the overlay, and why; ``no_overlay`` as in ``advice``."""
    asked, written = _asked(facts), os.environ.get(FIXES)
    if not asked and written:
        return f"off: MEGATRON_FIXES is {written!r}, which names no fix; MEGATRON_FIXES=all turns it on"
    if not asked:
        return "off: MEGATRON_FIXES is not set; MEGATRON_FIXES=all turns it on"
    if facts.pth_problem:
        return f"NOT in force, though MEGATRON_FIXES={asked}"
    return f"NOT in force, though MEGATRON_FIXES={asked}: {no_overlay}" if no_overlay else f"on: MEGATRON_FIXES={asked}"


def advice(found: Sequence[Package], rows: Sequence[Row], facts: Facts, catalog: Catalog, no_overlay: str) -> list[str]:
    """What needs doing, one sentence each.

    Args:
        found: The packages.
        rows: What each fix is to megatron-core; none if there is no megatron-core.
        facts: Of the overlay.
        catalog: The known fixes.
        no_overlay: Why the overlay would not take this megatron-core, or empty.
    """
    todo = [
        f"{package.name}: {package.note}" for package in found if package.name == "apex" and "uninstall" in package.note
    ]
    if facts.pth_problem:
        todo.append(f"overlay: {facts.pth_problem}")
    todo += facts.setting_problems
    slugs, asked = _slugs(catalog), _asked_ids(facts, catalog)
    todo += [
        f"MEGATRON_FIXES: no fix is called {name}; {did_you_mean(name, slugs, ALL) or 'known: ' + ', '.join(slugs)}"
        for name in asked
        if name != ALL and name not in slugs
    ]
    if len(facts.trees) > 1:
        todo.append(f"megatron-core lies in several places, and the first is used: {', '.join(facts.trees)}")
    if not rows:
        look = "run this as the job runs, or look at a tree with `megatron-fixes scan DIR`"
        return [*todo, f"megatron-core: none found; {look}"]
    return todo + _about_fixes(rows, asked, [fix_id for fix_id in slugs if catalog.is_gated(fix_id)], no_overlay)


def _about_fixes(rows: Sequence[Row], asked: Sequence[str], gated: Collection[str], no_overlay: str) -> list[str]:
    open_ = [row for row in rows if row.finding.verdict in ("needed", "drifted")]
    wanted = ", ".join(row.finding.fix_id for row in open_ if row.finding.fix_id not in gated)
    if no_overlay and asked:
        end = "apply the patches, and unset MEGATRON_FIXES" if wanted else "unset MEGATRON_FIXES"
        return [f"{no_overlay}; MEGATRON_FIXES_STRICT=1 would stop the job: {end}"]
    if no_overlay and wanted:
        return [f"{wanted} would be wanted, and {no_overlay}: apply the patches"]
    todo = []
    if wanted and not asked:
        todo.append(f"the overlay is off, and {wanted} would be wanted: set MEGATRON_FIXES=all, or apply the patches")
    for row in open_ if asked else ():
        fix_id = row.finding.fix_id
        if row.remedy != "patch" and (fix_id in asked or (ALL in asked and fix_id not in gated)):
            why = "has drifted" if row.remedy is None else "does not fit" if row.remedy != "none" else "has no patch"
            end = "it is not in force, and MEGATRON_FIXES_STRICT=1 would stop the job; see `megatron-fixes scan`"
            todo.append(f"{fix_id} is asked for and {why} for this megatron-core: {end}")
    return todo


def _slugs(catalog: Catalog) -> dict[str, str]:
    return {fix_id: fix.slug for fix_id, fix in catalog.matrix.fixes.items()}


def _asked_ids(facts: Facts, catalog: Catalog) -> list[str]:
    """The fixes that MEGATRON_FIXES names, and ``all``; a name that no fix has stays."""
    return [id_of(name, _slugs(catalog)) for name in asked_fixes(_asked(facts))]


def _asked(facts: Facts) -> str:
    return next((setting["value"] for setting in facts.settings if setting["name"] == FIXES), "")


def _to_json(
    found: Sequence[Package],
    rows: Sequence[Row],
    facts: Facts,
    catalog: Catalog,
    machine: dict[str, Any],
    todo: Sequence[str],
) -> dict[str, Any]:
    fixes = [
        {
            "id": row.finding.fix_id,
            "verdict": row.finding.verdict,
            "remedy": row.remedy,
            "gated": catalog.is_gated(row.finding.fix_id),
        }
        for row in rows
    ]
    return {
        "packages": [{"name": p.name, "version": p.version, "where": p.where, "note": p.note} for p in found],
        "machine": machine,
        "fixes": fixes,
        "overlay": facts.to_json(),
        "todo": list(todo),
    }


def _print_packages(found: Sequence[Package]) -> None:
    for package in found:
        text = "none" if package.version is None else f"{package.version}  {package.where}"
        note = f"  ({package.note})" if package.note else ""
        output.fact(package.name, printable(text + note), _LABEL)
    output.say()


def _print(
    rows: Sequence[Row], facts: Facts, catalog: Catalog, release: str | None, no_overlay: str, todo: Sequence[str]
) -> None:
    asked = _asked_ids(facts, catalog)
    output.say()
    for row in rows:
        remedy = f", remedy {row.remedy}" if row.remedy else ""
        remedy += f" ({GATED})" if catalog.is_gated(row.finding.fix_id) else ""
        if row.finding.fix_id in asked and row.finding.verdict in ("fixed-upstream", "not-affected"):
            remedy += f" (asked for, and not needed by {release})"
        output.fact(row.finding.fix_id, f"{row.finding.verdict}{remedy}", _LABEL)
    if rows:
        output.say()
    output.fact("overlay", overlay_line(facts, no_overlay), _LABEL)
    output.fact(".pth", ", ".join(facts.pth_found) or "none", _LABEL)
    for setting in facts.settings:
        output.fact(setting["name"], f"{setting['value'] or '-'}  ({setting['source']})", _LABEL)
    output.say()
    for sentence in todo:
        output.fact("to do", sentence, _LABEL)
    output.say("" if todo else "nothing to do", "bold")


@click.command("doctor")
@click.option("--check", is_flag=True, help="End with 1 if something needs doing.")
@click.option("--import-torch", is_flag=True, help="Ask torch itself, in a process of its own: seconds.")
@json_option
def doctor_command(check: bool, import_torch: bool, as_json: bool) -> int:
    """Show what a training job in this environment would get, and whether the overlay would be in it.

    Python, torch, megatron-core, Apex (NVIDIA's, or the unrelated project of that name), TransformerEngine, where
    the overlay would come from, and every setting with its source. The driver, the GPUs, and what torch has code for,
    against the compatibility matrix. Imports none of them.
    """
    from megatron_fixes import overlay
    from megatron_fixes.catalog import load

    facts = overlay.where_from()
    catalog = load(compiled=True)
    core, rows, no_overlay = megatron_core(catalog)
    machine, findings = machine_block.look(core, catalog.matrix, import_torch=import_torch)
    found = [*packages(machine.torch.value), core]
    todo = machine_block.todo(findings) + advice(found, rows, facts, catalog, no_overlay)
    if as_json:
        output.print_json(_to_json(found, rows, facts, catalog, machine_block.to_json(machine, findings), todo))
    else:
        _print_packages(found)
        machine_block.show(machine, findings, _LABEL)
        _print(rows, facts, catalog, core.version, no_overlay, todo)
    return 1 if check and todo else 0
