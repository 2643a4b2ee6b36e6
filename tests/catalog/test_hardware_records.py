# SPDX-License-Identifier: Apache-2.0
"""Every cell of the GPU table is covered by a record that was made with the CUDA source as it is now.

``docs/records/matrix.json`` is a run of ``make matrix``; a cell that ``ran`` has one of ``ci/gpu_smoke`` beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from megatron_fixes.catalog import hardware
from megatron_fixes.catalog.data import matrix_path
from megatron_fixes.catalog.hardware import GpuCell
from megatron_fixes.catalog.matrix import load_matrix
from tests.loading import load_program

FOLDER = Path(__file__).parents[2] / "docs" / "records"
COMPILED = json.loads((FOLDER / "matrix.json").read_text("utf-8"))
GPU_RECORDS = [json.loads(path.read_text("utf-8")) for path in sorted(FOLDER.glob("*.json"))]
MATRIX = load_matrix(matrix_path())
CELLS = list(hardware.each_cell(MATRIX.gpus))
CLAIMS = load_program("ci/kernels/claims.py")


def ran(records: Iterable[dict[str, Any]], architecture: str, cuda: str, precision: str, cell: GpuCell) -> bool:
    """Whether a record shows that the source as it is now ran there, on two ranks, with the CPU's result."""
    source = CLAIMS.SOURCES[precision]
    for record in records:
        kernels = record.get("kernels", {"sources": {}, "cells": []})
        if kernels["sources"].get(source) != CLAIMS.digest(source) or record["machine"]["date"] != cell.date:
            continue
        wanted = {"architecture": architecture, "cuda": cuda, "precision": precision, "ranks": 2, "outcome": "same"}
        if any(wanted.items() <= seen.items() for seen in kernels["cells"]):
            return True
    return False


@pytest.mark.parametrize(("architecture", "cuda", "precision", "cell"), CELLS)
def test_the_compiler_was_seen_to_do_what_the_cell_says(
    architecture: str, cuda: str, precision: str, cell: GpuCell
) -> None:
    column = COMPILED["cuda"][cuda]
    assert (column["nvrtc"], column["runtime"]) == (MATRIX.cuda[cuda].nvrtc, MATRIX.cuda[cuda].runtime)
    seen = column["cells"][architecture][precision]
    assert seen["outcome"] == ("compiled" if cell.works else "refused")
    assert seen["sources"] == [CLAIMS.SOURCES[precision]]
    assert {source: COMPILED["sources"][source] for source in seen["sources"]} == {
        source: CLAIMS.digest(source) for source in seen["sources"]
    }


def test_cells_that_ran_have_a_record_of_a_gpu() -> None:
    assert [one[:3] for one in CELLS if one[3].status == "ran" and not ran(GPU_RECORDS, *one)] == []


def test_a_record_shows_nothing_of_other_sources_cells_ranks_or_outcomes() -> None:
    cell = GpuCell(status="ran", machine="two H200", date="2026-12-01")
    where = ("sm_90", "13.0", "fp8")
    seen = {"architecture": "sm_90", "cuda": "13.0", "precision": "fp8", "ranks": 2, "outcome": "same", "said": ""}

    def record(sources: dict[str, str] | None = None, date: str = "2026-12-01", **other: object) -> dict[str, Any]:
        kernels = {"sources": CLAIMS.digests() if sources is None else sources, "cells": [{**seen, **other}]}
        return {"machine": {"date": date}, "kernels": kernels}

    assert ran([{"machine": {}}, record()], *where, cell)
    assert not ran([record(sources={"ci/kernels/warp_sum.cu": "0" * 64})], *where, cell)
    assert not ran([record(date="2026-12-02")], *where, cell)
    for other in ({"ranks": 1}, {"outcome": "differs"}, {"precision": "bf16"}, {"cuda": "12.8"}):
        assert not ran([record(**other)], *where, cell)
    assert not ran([], *where, cell)
