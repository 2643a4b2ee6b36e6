# SPDX-License-Identifier: Apache-2.0
"""The comparison of checkers runs a case in a process of its own, survives one that fails, and lays out what it got."""

from __future__ import annotations

import pytest
import torch

from ..loading import load_program

benchmark = load_program("benchmarks/stream_checkers.py")
CASE = "consumer does not wait"


def answers(wrong: str, right: str) -> dict[str, dict[str, object]]:
    return {"wrong": {"outcome": wrong, "told": ["why"]}, "right": {"outcome": right, "told": ["why"]}}


def test_a_case_runs_on_two_ranks_and_tells_what_was_found() -> None:
    said = benchmark.answer(CASE, benchmark.OURS, right=False, world_size=1 if torch.cuda.device_count() == 1 else 2)
    assert said["outcome"] == "found", said
    assert "stream_cases.py:" in said["told"][0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_a_case_that_fails_is_told_as_an_error() -> None:
    said = benchmark.answer("no such case", benchmark.OURS, right=False, world_size=1)
    assert said == {"outcome": "error", "told": ["KeyError: 'no such case'"]}


@pytest.mark.parametrize("devices", [0, 1])
def test_the_table_says_what_each_checker_found_and_where(devices: int) -> None:
    told = answers("found", "nothing"), answers("error", "nothing")
    found = {
        "devices": devices,
        **dict.fromkeys(("device", "nccl", "machine", "python", "torch", "date"), "x"),
        "cases": {CASE: {benchmark.OURS: told[0], benchmark.SANITIZER: told[1]}},
    }
    text = benchmark.table(found, markdown=True)
    assert f"| {CASE} | found | nothing | error | nothing |" in text
    assert f"{CASE}, CUDA Sanitizer, wrong: why" in text
    assert ("needs a CUDA device" in text) == (devices == 0)
