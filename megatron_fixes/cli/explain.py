# SPDX-License-Identifier: Apache-2.0
"""``megatron-fixes explain``: one fix on one screen.

Symptom, cause, who is hit, since when, how it was shown, what the patch does. Taken from the matrix and from
the head of the newest patch; a fix without a patch shows what the matrix knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from megatron_fixes.catalog.ranges import compact
from megatron_fixes.cli import output
from megatron_fixes.cli.options import json_option
from megatron_fixes.patching.ids import known_fixes
from megatron_fixes.patching.shell import quote

if TYPE_CHECKING:
    from megatron_fixes.catalog import Catalog
    from megatron_fixes.catalog.matrix import Fix, Matrix
    from megatron_fixes.catalog.series import PatchFile

_LABEL = 12
NUMERICS = {
    "neutral": "neutral: runs that were right stay bit-identical",
    "changing": "changing: numbers that were wrong change",
    "gated": "gated: changes training in a debatable way, applied only by name",
}
MEANS = {
    "gloo": "real process groups on CPU",
    "recorder": "happens-before recorder on CPU",
    "nccl-h200": "NVIDIA H200, with NCCL where there are several ranks",
    "untested": "not tested",
}


def changed_lines(patch: PatchFile) -> tuple[int, int]:
    """How many lines a patch adds and removes."""
    from unidiff.patch import PatchSet

    files = PatchSet(patch.text)
    return sum(file.added for file in files), sum(file.removed for file in files)


def tested_ranges(fix: Fix, matrix: Matrix) -> dict[str, str]:
    """Means of testing to the releases it was used on, as ranges."""
    found: dict[str, list[str]] = {}
    for release, cell in fix.cells.items():
        for means in cell.tested:
            found.setdefault(means, []).append(release)
    return {means: compact(releases, matrix.releases) for means, releases in found.items()}


def facts(catalog: Catalog, fix_id: str) -> dict[str, Any]:
    """All that is known of a fix, as plain values; what only a patch's head says is None without one."""
    fix, patches = catalog.matrix.fixes[fix_id], catalog.patches_of(fix_id)
    header = patches[-1].header if patches else None
    return {
        "id": fix_id,
        "slug": fix.slug,
        "symptom": fix.symptom,
        "cause": header.paragraphs["Cause"] if header else None,
        "hit": fix.hit,
        "since": fix.since,
        "affected": list(fix.affected()),
        "fixed_in": fix.first_fixed(),
        "upstream_status": header.upstream_status if header else None,
        "patch_for": list(catalog.patched_releases(fix_id)),
        "after": header.paragraphs["After this patch"] if header else None,
        "numerics": header.numerics if header else None,
        "before_you_apply": fix.before_you_apply or None,
        "requires": list(header.requires) if header else [],
        "proof": header.proof if header else f"megatron_fixes.proofs.{fix_id.lower()}",
        "on_cpu": fix.on_cpu or None,
        "tested": {release: list(cell.tested) for release, cell in fix.cells.items()},
        "patches": [_patch_facts(patch) for patch in patches],
        "links": [{"url": link.url, "kind": link.kind, "about": link.about or None} for link in fix.links],
    }


def _patch_facts(patch: PatchFile) -> dict[str, Any]:
    from megatron_fixes.patching.unified import touched_paths

    added, removed = changed_lines(patch)
    files = list(touched_paths(patch.text, source=patch.name))
    releases = list(patch.header.applies_to)
    return {"path": str(patch.path), "releases": releases, "files": files, "added": added, "removed": removed}


def _print(known: dict[str, Any], catalog: Catalog, fix: Fix) -> None:
    matrix = catalog.matrix

    def line(label: str, text: str, *, wrap: bool = True) -> None:
        output.labelled(label, text, _LABEL, wrap=wrap)

    output.say(f"{known['id']}  {known['slug']}", "bold")
    output.say()
    line("symptom", known["symptom"])
    if known["cause"]:
        line("cause", known["cause"])
    line("who is hit", known["hit"])
    line("since", known["since"])
    line("affected", compact(known["affected"], matrix.releases) or "none of the known releases")
    status = f" (Upstream-Status: {known['upstream_status']})" if known["upstream_status"] else ""
    line("fixed in", (known["fixed_in"] or "no release yet") + status)
    output.say()
    if known["after"]:
        line("patched", known["after"])
        line("numerics", NUMERICS[known["numerics"]])
        if known["before_you_apply"]:
            line("beforehand", known["before_you_apply"])
        line("requires", ", ".join(known["requires"]) or "no other fix")
    else:
        line("patched", "there is no patch yet")
    for at, patch in enumerate(known["patches"]):
        size = f"{compact(patch['releases'], matrix.releases)} (+{patch['added']} -{patch['removed']})"
        line("" if at else "patches", f"git apply {quote(patch['path'])}  # {size}", wrap=False)
    for at, path in enumerate(dict.fromkeys(path for patch in known["patches"] for path in patch["files"])):
        line("" if at else "files", path, wrap=False)
    output.say()
    for at, (means, releases) in enumerate(tested_ranges(fix, matrix).items()):
        line("" if at else "tested", f"{means} ({MEANS[means]}): {releases}")
    if known["on_cpu"]:
        line("on the CPU", known["on_cpu"])
    line("proof", known["proof"], wrap=False)
    release = (known["patch_for"] or known["affected"] or [*matrix.releases])[-1]
    line("", f"megatron-fixes prove {known['id']} --release {release}", wrap=False)
    for at, link in enumerate(known["links"]):
        line("" if at else "links", link["url"], wrap=False)
        if link["about"]:
            line("", f"  related: {link['about']}")


@click.command("explain")
@click.argument("fix_id", metavar="MF0001")
@json_option
def explain_command(fix_id: str, as_json: bool) -> int:
    """Explain one fix: symptom, cause, who is hit, since when, how it was shown, what its patch does.

    The fix is named by its id or its slug.
    """
    from megatron_fixes.catalog import load

    catalog = load()
    (fix_id,) = known_fixes(catalog.matrix, [fix_id])
    known = facts(catalog, fix_id)
    if as_json:
        output.print_json(known)
    else:
        _print(known, catalog, catalog.matrix.fixes[fix_id])
    return 0
