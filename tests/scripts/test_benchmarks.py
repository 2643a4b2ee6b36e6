# SPDX-License-Identifier: Apache-2.0
"""Benchmarks run and say what they measured; how long anything takes is not looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fixes import catalog

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPT = BENCHMARKS / "run.py"


@pytest.mark.usefixtures("release_tree")
def test_one_command_measures_all_commands_of_a_release() -> None:
    command = [sys.executable, SCRIPT, "--rounds", "1", "--without-proofs", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"machine", "python", "torch", "git", "date"} <= found.keys()
    series = catalog.load().series["core_v0.16"].patches
    expected = [p.fix_id for p in series if "0.16.1" in p.header.applies_to and not p.gated]
    assert (found["release"], found["rounds"], found["fixes"]) == ("0.16.1", 1, expected)
    assert [row["command"].split()[1] for row in found["commands"]] == ["--help", "scan", "apply"]
    for row in found["commands"]:
        assert row["ms"] > 0 and row["beside_ms"] > 0
        assert row["ratio"] == pytest.approx(row["ms"] / row["beside_ms"], rel=0.05)
    planning, writing, both = found["in_process_ms"].values()
    assert planning > 0 and writing > 0 and both == pytest.approx(planning + writing, abs=0.2)


def test_what_the_look_at_the_machine_costs_is_measured_by_one_command() -> None:
    command = [sys.executable, BENCHMARKS / "machine_cost.py", "--rounds", "2", "--markdown"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert [row.split("|")[1].split(",")[0].strip() for row in done.stdout.splitlines()[4:]] == ["apply"] * 2 + [
        "overlay"
    ] * 4
