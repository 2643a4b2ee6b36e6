# SPDX-License-Identifier: Apache-2.0
"""The README's tables: generated between their markers from the matrix, and nothing else touched."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from megatron_fixes import catalog
from megatron_fixes.errors import UsageError

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "render_tables.py"
CATALOG = catalog.load()
EMPTY = (
    "# Title\n\nabove\n\n<!-- table:fixes -->\nwas here \\1 | x\n<!-- /table:fixes -->\n\nbetween\n\n"
    "<!-- table:releases -->\n<!-- /table:releases -->\nbelow\n"
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render_tables", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
        assert row[:3] == [fix.symptom, fix.hit, f"**{fix_id}** {fix.slug}"]


def test_the_grid_has_every_release_and_every_fix(script: ModuleType) -> None:
    text = script.render(EMPTY, CATALOG)
    table = rows(text, "releases")
    assert table[0] == ["megatron-core", *sorted(CATALOG.matrix.fixes)]
    assert [row[0].split()[0] for row in table[2:]] == list(CATALOG.matrix.releases)
    for row in table[2:]:
        for fix_id, cell in zip(table[0][1:], row[1:], strict=True):
            known = CATALOG.matrix.fixes[fix_id].cells[row[0].split()[0]]
            patch = CATALOG.patch(fix_id, row[0].split()[0]) is not None
            wanted = {"needed": "*patch*" if patch else "**needed**", "fixed-upstream": "*upstream*"}
            assert cell.split()[0] == wanted.get(known.verdict, "\N{EN DASH}")
    for word in ("*patch*", "**needed**", "*upstream*"):
        assert word in script.LEGEND


@pytest.mark.parametrize(
    "spoilt",
    [
        EMPTY.replace("<!-- /table:fixes -->", ""),
        EMPTY.replace("<!-- table:releases -->", ""),
        EMPTY + "<!-- table:fixes -->",
        EMPTY.replace("table:fixes", "x").replace("/x", "table:fixes").replace("<!-- x", "<!-- /table:fixes"),
    ],
)
def test_markers_that_do_not_pair_are_refused(script: ModuleType, spoilt: str) -> None:
    with pytest.raises(UsageError):
        script.render(spoilt, CATALOG)


def test_check_fails_until_the_tables_are_written(script: ModuleType, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    assert script.main(["--check"], readme) == 2
    readme.write_text(EMPTY, encoding="utf-8")
    assert script.main(["--check"], readme) == 1
    assert readme.read_text(encoding="utf-8") == EMPTY
    assert script.main([], readme) == 0
    assert script.main(["--check"], readme) == 0
    readme.write_text(readme.read_text(encoding="utf-8").replace("*patch*", "**needed**", 1), encoding="utf-8")
    assert script.main(["--check"], readme) == 1
