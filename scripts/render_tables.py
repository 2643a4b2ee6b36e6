#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of README.md from ``compat_matrix.yaml`` and the patches.

A table stands between ``<!-- table:NAME -->`` and ``<!-- /table:NAME -->``; nothing else of the file is touched.
Run after a change to the matrix or to a patch's ``Applies-To``; ``--check`` only says whether the tables are current.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_fixes.catalog import load
from megatron_fixes.catalog.ranges import compact
from megatron_fixes.cli.explain import tested_ranges
from megatron_fixes.cli.list import patched_releases
from megatron_fixes.errors import MegatronFixesError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from megatron_fixes.catalog import Catalog

README = Path(__file__).resolve().parent.parent / "README.md"
LETTERS = {"gloo": "g", "recorder": "r", "nccl-h200": "n", "untested": "?"}
LEGEND = """\
*patch*: needed, and there is a patch; **needed**: no patch for this release yet; *upstream*: fixed by Megatron-LM;
\N{EN DASH}: does not have the defect. Seen by `megatron-fixes prove` with g: real process groups on CPU (gloo), r: the
happens-before recorder on CPU, n: NCCL on two NVIDIA H200; ?: not tested."""


def markdown(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out a Markdown table."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def fixes_table(catalog: Catalog) -> str:
    """Symptom first: one row a fix."""
    known = catalog.matrix.releases
    rows = []
    for fix_id, fix in sorted(catalog.matrix.fixes.items()):
        tested = tested_ranges(fix, catalog.matrix)
        rows.append(
            (
                fix.symptom,
                fix.hit,
                f"**{fix_id}** {fix.slug}",
                compact(fix.affected(), known) or "none",
                compact(patched_releases(catalog, fix_id), known) or "none yet",
                fix.first_fixed() or "open",
                "; ".join(f"{means}: {releases}" for means, releases in tested.items()),
            )
        )
    return markdown(("What you see", "Who is hit", "Fix", "Affected", "Patch for", "Fixed in", "Tested"), rows)


def cell_text(catalog: Catalog, fix_id: str, release: str) -> str:
    """One cell of the grid: what the fix is to the release, and by which means that was seen."""
    cell = catalog.matrix.fixes[fix_id].cells[release]
    words = {"fixed-upstream": "*upstream*", "not-affected": "\N{EN DASH}"}
    needed = "*patch*" if catalog.patch(fix_id, release) else "**needed**"
    return f"{words.get(cell.verdict, needed)} {' '.join(LETTERS[means] for means in cell.tested)}"


def releases_table(catalog: Catalog) -> str:
    """One row a release, one column a fix, the legend below."""
    fix_ids = sorted(catalog.matrix.fixes)
    rows = [
        (release + (" (yanked)" if row.yanked else ""), *(cell_text(catalog, fix_id, release) for fix_id in fix_ids))
        for release, row in catalog.matrix.releases.items()
    ]
    return f"{markdown(('megatron-core', *fix_ids), rows)}\n\n{LEGEND}"


TABLES = {"fixes": fixes_table, "releases": releases_table}


def render(text: str, catalog: Catalog) -> str:
    """Return a README's text with its tables as they should be.

    Raises:
        UsageError: A table's markers are missing, doubled or out of order.
    """
    for name, table in TABLES.items():
        start, end = f"<!-- table:{name} -->", f"<!-- /table:{name} -->"
        if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
            raise UsageError(
                f"got {text.count(start)} {start} and {text.count(end)} {end}, expected one of each, in this order",
                context=README.name,
                hint="Put the two markers on lines of their own where the table belongs.",
            )
        between = re.compile(f"{re.escape(start)}.*{re.escape(end)}", re.DOTALL)
        content = f"{start}\n{table(catalog)}\n{end}"
        text = between.sub(lambda _, content=content: content, text)
    return text


def main(arguments: Sequence[str], readme: Path = README) -> int:
    """Write the tables, or with ``--check`` say whether they are what would be written."""
    try:
        text = readme.read_text(encoding="utf-8")
        wanted = render(text, load())
    except FileNotFoundError:
        print(f"error: got no {readme.name}, expected it beside compat_matrix.yaml", file=sys.stderr)
        return 2
    except MegatronFixesError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if text == wanted:
        print(f"{readme.name}: the tables are current")
        return 0
    if "--check" in arguments:
        print(f"{readme.name}: the tables are out of date; run scripts/render_tables.py", file=sys.stderr)
        return 1
    readme.write_text(wanted, encoding="utf-8")
    print(f"wrote {readme.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
