# SPDX-License-Identifier: Apache-2.0
"""What ``ci/gpu_collectives`` runs needs no more than torch and wrapt, and tells what it saw, also when cut short.

Without GPUs: the script runs with a double of Python that writes down what it is asked for.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_fixes.proofs import ranks
from megatron_fixes.proofs.world import run

from ..loading import ROOT, load_program

# A machine with GPUs has torch, and may have no network to fetch these from.
ABSENT = ("click", "msgspec", "rich", "unidiff", "yaml")
PROGRAMS = f"""
import sys
for name in {ABSENT}:
    sys.modules[name] = None
sys.path.insert(0, "benchmarks")
import collective_cost, drills, guarded_step
from megatron_fixes import guards
from megatron_fixes.guards import attach, late, lifecycle, streams, teardown
from megatron_fixes.proofs import parent
guards.install()
"""
DOUBLE = """#!/usr/bin/env bash
echo "$*" >>"$CALLS"
case "$*" in
  *proofs.releases*) echo "0.16.1  /a/tree" ;;
  *"$FAILS"*) exit 3 ;;
esac
"""


def test_the_programs_need_torch_and_wrapt_and_no_more() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", PROGRAMS], cwd=ROOT, env=environment, check=True)


@pytest.fixture
def called(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[int, list[str], str]:
    """The script's exit code, what it called and its summary; one of the parts fails, or none."""
    double, calls = tmp_path / "python", tmp_path / "calls"
    double.write_text(DOUBLE)
    double.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(double), "CALLS": str(calls), "FAILS": request.param}
    command = [str(ROOT / "ci" / "gpu_collectives"), str(tmp_path / "out")]
    code = subprocess.run(command, env=environment, capture_output=True, check=False).returncode
    return code, calls.read_text().splitlines(), (tmp_path / "out" / "summary").read_text()


@pytest.mark.parametrize("called", ["nothing fails"], indirect=True)
def test_the_tree_is_the_one_that_was_fetched(called: tuple[int, list[str], str]) -> None:
    code, calls, summary = called
    assert code == 0 and summary.count("exit status 0") == 3
    (guarded,) = (call for call in calls if "guarded_step.py" in call)
    assert "--tree /a/tree " in guarded


@pytest.mark.parametrize("called", ["collective_cost.py"], indirect=True)
def test_a_part_that_fails_is_told_and_the_others_run(called: tuple[int, list[str], str]) -> None:
    code, calls, summary = called
    assert code == 1 and "cost: exit status 3" in summary and summary.count("exit status 0") == 2
    assert "benchmarks/drills.py" in calls[-1]


def test_who_still_ran_when_a_peer_was_killed_is_told_with_its_own_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(rank: int) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(2, b"\xff\n")
        time.sleep(60)

    monkeypatch.setattr(ranks, "GRACE_S", 0.5)
    words = [load_program("benchmarks/drills.py").words(rank) for rank in run(body, 2, tmp_path, within_s=30)]
    assert re.fullmatch(r"still running after [0-9] s", words[0]) and words[1] == "ended by SIGKILL"
