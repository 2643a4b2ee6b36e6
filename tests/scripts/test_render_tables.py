# SPDX-License-Identifier: Apache-2.0
"""README's tables, docs/status and the workflow's list: generated from the matrix, and nothing else touched."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_fixes import catalog
from megatron_fixes.errors import UsageError

from ..loading import load_program

RENDER = load_program("scripts/render_tables.py")
CATALOG = catalog.load()
GPUS = "<!-- table:gpus -->\n<!-- /table:gpus -->\n"
EMPTY = f"# Title\n\nabove\n\n<!-- table:fixes -->\nwas here \\1 | x\n<!-- /table:fixes -->\n\nbelow\n{GPUS}"
JOBS = "matrix:\n    # table:cuda\n    was here\n    # /table:cuda\nsteps:\n"


def rows(text: str, name: str) -> list[list[str]]:
    table = text.partition(f"<!-- table:{name} -->\n")[2].partition(f"\n<!-- /table:{name} -->")[0]
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table.splitlines()]
    return [[cell.strip() for cell in line] for line in lines]


def test_only_what_is_between_the_markers_changes() -> None:
    text = RENDER.render(EMPTY, CATALOG)
    outside = re.compile(r"<!-- table:(\w+) -->.*?<!-- /table:\1 -->", re.DOTALL)
    assert outside.sub("", text) == outside.sub("", EMPTY)
    assert "was here" not in text
    assert RENDER.render(text, CATALOG) == text


def test_a_row_a_fix_begins_with_the_symptom() -> None:
    table = rows(RENDER.render(EMPTY, CATALOG), "fixes")
    assert table[0][0] == "What you see" and len({len(row) for row in table}) == 1
    for row, (fix_id, fix) in zip(table[2:], sorted(CATALOG.matrix.fixes.items()), strict=True):
        assert row[:2] == [fix.symptom, f"**{fix_id}** {fix.slug}"]


def test_the_status_has_a_cell_for_every_fix_and_release() -> None:
    found = json.loads(RENDER.status_json(CATALOG))
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


@pytest.mark.parametrize("note", RENDER.NOTES)
def test_a_note_of_a_fix_stands_in_both_forms_of_the_status(note: str) -> None:
    noted = {fix_id: text for fix_id, fix in CATALOG.matrix.fixes.items() if (text := getattr(fix, note))}
    assert noted
    lines = RENDER.status(CATALOG).splitlines()
    assert all(f"| **{i}** {CATALOG.matrix.fixes[i].slug} | {text} |" in lines for i, text in noted.items())
    fixes = json.loads(RENDER.status_json(CATALOG))["fixes"]
    assert {fix_id: fix[note] for fix_id, fix in fixes.items() if note in fix} == noted


def test_what_gloo_shows_is_told_of_fixes_whose_harm_it_can_not_show() -> None:
    fixes = CATALOG.matrix.fixes
    assert "a wrong file, shows on a GPU only" in fixes["MF0021"].on_cpu
    for fix_id, fix in fixes.items():
        means = {means for release in fix.affected() for means in fix.cells[release].tested}
        assert not fix.on_cpu or "gloo" in means, fix_id


def test_the_grid_has_a_row_a_fix_and_a_column_a_line() -> None:
    lines = [line for line in RENDER.status(CATALOG).splitlines() if line.startswith("| ")]
    grid = lines[: len(CATALOG.matrix.fixes) + 2]
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
def test_markers_that_do_not_pair_are_refused(spoilt: str) -> None:
    with pytest.raises(UsageError):
        RENDER.render(spoilt, CATALOG)


def test_check_fails_until_the_files_are_written(tmp_path: Path) -> None:
    files = readme, status, workflow = [tmp_path / name for name in ("README.md", "status.md", "ci.yml")]
    assert RENDER.main(["--check"], *files) == 2
    readme.write_text(EMPTY, encoding="utf-8")
    assert RENDER.main(["--check"], *files) == 2
    workflow.write_text(JOBS, encoding="utf-8")
    assert RENDER.main(["--check"], *files) == 1
    assert (readme.read_text(encoding="utf-8"), workflow.read_text(encoding="utf-8")) == (EMPTY, JOBS)
    assert RENDER.main([], *files) == 0
    assert RENDER.main(["--check"], *files) == 0
    for path in (*files, status.with_suffix(".json"), status.with_name("compatibility.md")):
        text = path.read_text(encoding="utf-8")
        spoilt = re.sub(r"0\.16\.0|12\.6", "0.16.9", text, count=1)
        assert spoilt != text
        path.write_text(spoilt, encoding="utf-8")
        assert RENDER.main(["--check"], *files) == 1
        path.write_text(text, encoding="utf-8")


def test_the_workflow_lists_every_cuda_version_where_its_marker_stands() -> None:
    text = RENDER.between(JOBS, "cuda", RENDER.compatibility.jobs(CATALOG.matrix), "# {}", "ci.yml")
    listed = ", ".join(f'"{cuda}"' for cuda in CATALOG.matrix.cuda)
    assert text == f"matrix:\n    # table:cuda\n    cuda: [{listed}]\n    # /table:cuda\nsteps:\n"


def test_a_cell_names_the_precisions_that_can_be_had() -> None:
    table = rows(RENDER.render(EMPTY, CATALOG), "gpus")
    for row, (architecture, columns) in zip(table[2:], CATALOG.matrix.gpus.items(), strict=True):
        assert f"({architecture})" in row[0]
        for text, cells in zip(row[1:], columns.values(), strict=True):
            had = [precision for precision, cell in cells.items() if cell.works]
            assert text.replace("*", "").split() == (had or ["\N{EN DASH}"])
            ran = {precision for precision, cell in cells.items() if cell.status == "ran"}
            assert set(re.findall(r"\*\*(\w+)\*\*", text)) == ran


def test_the_page_says_every_reason_and_limit_once_and_leads_to_it() -> None:
    page, matrix = RENDER.compatibility.page(CATALOG), CATALOG.matrix
    said = re.findall(r"^(\d+)\. ([\w, ]+): (.*) \(\[source\]\((.*)\)\)$", page, re.MULTILINE)
    assert [int(at) for at, *_ in said] == list(range(1, len(said) + 1))
    table = [line for line in page.splitlines() if re.match(r"\| .*\(sm_\d+\)", line)][: len(matrix.gpus)]
    for line, (_, columns) in zip(table, matrix.gpus.items(), strict=True):
        for text, cells in zip(line.split(" | ")[1:], columns.values(), strict=True):
            marked = re.search("<sup>(.*)</sup>", text)
            lead = [said[int(at) - 1] for at in (marked[1].split() if marked else ())]
            told = [(precision, cell) for precision, cell in cells.items() if cell.reason or cell.note or cell.rule]
            assert {words for _, _, words, _ in lead} == {cell.reason or cell.note or cell.rule for _, cell in told}
            for precision, cell in told:
                assert any(precision in about and cell.source == source for _, about, _, source in lead)


def test_the_first_table_stands_beside_what_is_right() -> None:
    page = RENDER.compatibility.page(CATALOG).rpartition("\n## ")[2]
    lines = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ")]
    found = [[cell.strip() for cell in line] for line in lines[2:]]
    assert len(found) == 9
    assert all("https://" in row[-1] for row in found)
    is_ = {(row[0], row[1]): (row[2], row[3]) for row in found}
    assert is_["H100, H200 (sm_90)", "11.8"] == ("no", "bf16 fp16 fp8")
    assert is_["L4 (sm_89)", "12.4"] == ("FP8 only", "bf16 fp16 fp8")
    assert is_["A100 (sm_80)", "12.4"] == ("yes", "bf16 fp16")


def test_each_trap_shows_what_is_said_of_its_machine() -> None:
    traps = RENDER.compatibility.traps
    for trap in traps.TRAPS:
        assert traps.answers(trap, CATALOG.matrix), trap.record
    recorded = {path.stem for path in traps.RECORDS.glob("*.json")}
    assert {trap.record for trap in traps.TRAPS} <= recorded
    stopping = [
        trap.record for trap in traps.TRAPS if any("stops" in line for line in traps.answers(trap, CATALOG.matrix))
    ]
    assert stopping == ["no-code-for-blackwell", "driver-too-old"]
