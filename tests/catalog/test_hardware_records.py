# SPDX-License-Identifier: Apache-2.0
"""Every cell of the GPU table is covered by a record that was made with the CUDA source as it is now.

``docs/records/matrix.json`` is a run of ``make matrix``; a cell that ``ran`` has one of ``ci/gpu_smoke`` beside it.
"""

from __future__ import annotations

import copy
import json
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


@pytest.mark.parametrize(("architecture", "cuda", "precision", "cell"), CELLS)
def test_the_compiler_was_seen_to_do_what_the_cell_says(
    architecture: str, cuda: str, precision: str, cell: GpuCell
) -> None:
    assert CLAIMS.compiled(COMPILED, MATRIX, architecture, cuda, precision)


def test_no_cell_is_uncovered_and_those_that_ran_have_a_record_of_a_gpu() -> None:
    assert CLAIMS.uncovered(MATRIX, COMPILED, GPU_RECORDS) == []


def test_a_record_covers_no_cell_after_a_change_of_source_wheel_or_outcome() -> None:
    ran_cells = sum(cell.status == "ran" for *_, cell in CELLS)
    assert len(CLAIMS.uncovered(MATRIX, COMPILED, [])) == ran_cells
    other_source = {**COMPILED, "sources": dict.fromkeys(COMPILED["sources"], "0" * 64)}
    assert len(CLAIMS.uncovered(MATRIX, other_source, GPU_RECORDS)) == len(CELLS)
    for spoil in (
        lambda column: column.update(nvrtc="nvidia-cuda-nvrtc-cu12==0"),
        lambda column: [one.update(outcome="broken") for row in column["cells"].values() for one in row.values()],
        lambda column: column["cells"].clear(),
    ):
        record = copy.deepcopy(COMPILED)
        spoil(record["cuda"]["12.4"])
        assert len(CLAIMS.uncovered(MATRIX, record, GPU_RECORDS)) == len(CELLS) // len(MATRIX.cuda)
    assert len(CLAIMS.uncovered(MATRIX, {**COMPILED, "cuda": {}}, GPU_RECORDS)) == len(CELLS)


def test_a_record_shows_nothing_of_other_sources_cells_ranks_or_outcomes() -> None:
    cell = GpuCell(status="ran", machine="two H200", date="2026-12-01")
    where = ("sm_90", "13.0", "fp8")
    seen = {"architecture": "sm_90", "cuda": "13.0", "precision": "fp8", "ranks": 2, "outcome": "same", "said": ""}

    def record(sources: dict[str, str] | None = None, date: str = "2026-12-01", **other: object) -> dict[str, Any]:
        kernels = {"sources": CLAIMS.digests() if sources is None else sources, "cells": [{**seen, **other}]}
        return {"machine": {"date": date}, "kernels": kernels}

    assert CLAIMS.ran([{"machine": {}}, record()], *where, cell)
    assert not CLAIMS.ran([record(sources={"ci/kernels/warp_sum.cu": "0" * 64})], *where, cell)
    assert not CLAIMS.ran([record(date="2026-12-02")], *where, cell)
    for other in ({"ranks": 1}, {"outcome": "differs"}, {"precision": "bf16"}, {"cuda": "12.8"}):
        assert not CLAIMS.ran([record(**other)], *where, cell)
    assert not CLAIMS.ran([], *where, cell)
