# SPDX-License-Identifier: Apache-2.0
"""``megatron-fixes list``: the known fixes; with ``--release``, what each one is to that release.

Says what is known of releases as published, from the matrix alone. What a tree at hand has is ``scan``'s question.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from megatron_fixes.catalog.ranges import compact
from megatron_fixes.cli import output
from megatron_fixes.cli.options import json_option, known_releases, named, release_option

if TYPE_CHECKING:
    from megatron_fixes.catalog import Catalog


def overview(catalog: Catalog) -> list[dict[str, Any]]:
    """Every fix over all releases, as plain values."""
    return [
        {
            "id": fix_id,
            "slug": fix.slug,
            "symptom": fix.symptom,
            "hit": fix.hit,
            "since": fix.since,
            "affected": list(fix.affected()),
            "fixed_in": fix.first_fixed(),
            "patch_for": list(catalog.patched_releases(fix_id)),
            "gated": catalog.is_gated(fix_id),
            "links": [{"url": link.url, "kind": link.kind, "about": link.about or None} for link in fix.links],
        }
        for fix_id, fix in sorted(catalog.matrix.fixes.items())
    ]


def column(catalog: Catalog, release: str) -> dict[str, Any]:
    """Every fix for one release, as plain values."""
    fixes = []
    for fix_id, fix in sorted(catalog.matrix.fixes.items()):
        cell = fix.cells[release]
        remedy = None
        if cell.verdict == "needed":
            remedy = "patch" if catalog.patch(fix_id, release) else "none"
        tested = list(cell.tested)
        row = {"id": fix_id, "slug": fix.slug, "verdict": cell.verdict, "remedy": remedy, "tested": tested}
        fixes.append({**row, "gated": catalog.is_gated(fix_id), "symptom": fix.symptom})
    return {"release": release, "yanked": catalog.matrix.releases[release].yanked, "fixes": fixes}


def _print_overview(catalog: Catalog) -> None:
    known = catalog.matrix.releases
    rows = [
        (
            row["id"],
            compact(row["affected"], known) or "none",
            row["fixed_in"] or "open",
            compact(row["patch_for"], known) or "none",
            named(catalog, row["id"]),
            row["symptom"],
        )
        for row in overview(catalog)
    ]
    output.table(("fix", "affected", "fixed in", "patch for", "what", "symptom"), rows, stacked=2)


def _print_columns(catalog: Catalog, columns: list[dict[str, Any]]) -> None:
    headers: tuple[str, ...] = ("fix", "verdict", "remedy", "tested", "what", "symptom")
    rows: list[tuple[str, ...]] = []
    for column in columns:
        for row in column["fixes"]:
            tested = ", ".join(row["tested"])
            what = named(catalog, row["id"])
            cells = (row["id"], row["verdict"], row["remedy"] or "", tested, what, row["symptom"])
            rows.append(cells if len(columns) == 1 else (column["release"], *cells))
    if len(columns) == 1:
        withdrawn = " (withdrawn from PyPI by its maintainers: yanked)" if columns[0]["yanked"] else ""
        output.labelled("release", columns[0]["release"] + withdrawn, 9)
        output.say()
    else:
        headers = ("release", *headers)
    output.table(headers, rows, stacked=2)


@click.command("list")
@release_option
@json_option
def list_command(releases: tuple[str, ...], as_json: bool) -> int:
    """List the known fixes.

    With --release: what each fix is to that release, whether there is a patch, and how that was tested.
    """
    from megatron_fixes.catalog import load

    catalog = load()
    columns = [column(catalog, release) for release in known_releases(catalog.matrix, releases)]
    if as_json:
        output.print_json((columns[0] if len(columns) == 1 else columns) if columns else {"fixes": overview(catalog)})
    elif columns:
        _print_columns(catalog, columns)
    else:
        _print_overview(catalog)
        output.say()
        output.say("next: megatron-fixes explain MF0001, or megatron-fixes scan DIR")
    return 0
