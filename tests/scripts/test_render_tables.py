# SPDX-License-Identifier: Apache-2.0
"""The README's table and docs/status: generated from the matrix, and nothing else of the README touched."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import ModuleType

import pytest

from megatron_fixes import catalog
from megatron_fixes.errors import UsageError

from ..loading import load_program

CATALOG = catalog.load()
EMPTY = "# Title\n\nabove\n\n<!-- table:fixes -->\nwas here \\1 | x\n<!-- /table:fixes -->\n\nbelow\n"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_program("scripts/render_tables.py")


def rows(text: str, name: str) -> list[list[str]]:
    table = (
        text.split(f"<!-- table:{name} -->\n")[1]
        .split("\n\n", maxsplit=1)[0]
        .split(f"\n<!-- /table:{name} -->", maxsplit=1)[0]
    )
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines()]
    return [[cell.strip() for cell in line] for line in lines]


def test_only_what_is_between_the_markers_changes(script: ModuleType) -> None:
    text = script.render(EMPTY, CATALOG)
    outside = re.compile(r"<!-- table:(\w+) -->.*?<!-- /table:\1 -->", re.DOTALL)
    assert outside.sub("", text) == outside.sub("", EMPTY)
    assert "was here" not in text
    assert script.render(text, CATALOG) == text


def test_a_row_a_fix_begins_with_the_symptom(script: ModuleType) -> None:
    table = rows(script.render(EMPTY, CATALOG), "fixes")
    assert table[0][0] == "What you see" and len({len(row) for row in table}) == 1
    for row, (fix_id, fix) in zip(table[2:], sorted(CATALOG.matrix.fixes.items()), strict=True):
        assert row[:2] == [fix.symptom, f"**{fix_id}** {fix.slug}"]


def test_the_status_has_a_cell_for_every_fix_and_release(script: ModuleType) -> None:
    found = json.loads(script.status_json(CATALOG))
    assert list(found["releases"]) == list(CATALOG.matrix.releases)
    for fix_id, fix in CATALOG.matrix.fixes.items():
        for release, known in fix.cells.items():
            cell = found["fixes"][fix_id]["cells"][release]
            patch = CATALOG.patch(fix_id, release)
            gated = patch is not None and patch.gated
            remedy = ("by name" if gated else "patch") if patch else "none"
            assert cell["verdict"] == known.verdict
            assert cell["remedy"] == (remedy if known.verdict == "needed" else None)
            assert cell["tested"] == list(known.tested)


def test_the_grid_has_a_row_a_fix_and_a_column_a_line(script: ModuleType) -> None:
    grid = [line for line in script.status(CATALOG).splitlines() if line.startswith("| ")][
        : len(CATALOG.matrix.fixes) + 2
    ]
    assert all(line.count(" | ") == len(CATALOG.matrix.lines()) for line in grid)
    for line, (fix_id, fix) in zip(grid[2:], sorted(CATALOG.matrix.fixes.items()), strict=True):
        assert line.startswith(f"| **{fix_id}** {fix.slug} | ")
        for cell, releases in zip(line.split(" | ")[1:], CATALOG.matrix.lines().values(), strict=True):
            verdicts = {fix.cells[release].verdict for release in releases}
            assert ("upstream" in cell) == ("fixed-upstream" in verdicts)
            assert ("\N{EN DASH}" in cell) == ("not-affected" in verdicts)


@pytest.mark.parametrize(
    "spoilt",
    [
        EMPTY.replace("<!-- /table:fixes -->", ""),
        EMPTY.replace("<!-- table:fixes -->", ""),
        EMPTY + "<!-- table:fixes -->",
        EMPTY.replace("table:fixes", "x").replace("/x", "table:fixes").replace("<!-- x", "<!-- /table:fixes"),
    ],
)
def test_markers_that_do_not_pair_are_refused(script: ModuleType, spoilt: str) -> None:
    with pytest.raises(UsageError):
        script.render(spoilt, CATALOG)


def test_check_fails_until_the_files_are_written(script: ModuleType, tmp_path: Path) -> None:
    readme, status = tmp_path / "README.md", tmp_path / "status.md"
    assert script.main(["--check"], readme, status) == 2
    readme.write_text(EMPTY, encoding="utf-8")
    assert script.main(["--check"], readme, status) == 1
    assert readme.read_text(encoding="utf-8") == EMPTY
    assert script.main([], readme, status) == 0
    assert script.main(["--check"], readme, status) == 0
    for path in (readme, status, status.with_suffix(".json")):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace("0.16.0", "0.16.9", 1), encoding="utf-8")
        assert script.main(["--check"], readme, status) == 1
        path.write_text(text, encoding="utf-8")
