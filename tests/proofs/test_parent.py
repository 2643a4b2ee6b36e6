# SPDX-License-Identifier: Apache-2.0
"""The harness tells a defect from a proof that could not be carried out, is bounded in time, and leaves no process.

Real ranks over gloo. Each scenario is a case of its own, run in a process of its own as the harness is.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_fixes.proofs.proof import overall

PREAMBLE = """
import json, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from megatron_fixes.proofs.parent import run_case
from megatron_fixes.proofs.proof import Case, Judgement

def add(rank):
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    return {"sum": value.item()}

def judge(evidence):
    good = all(e["sum"] == 3.0 for e in evidence)
    return Judgement("clean" if good else "defect", f"{len(evidence)} ranks")
"""

SCENARIOS = {
    "right": ("add", "clean", "3 ranks"),
    "wrong": ("lambda rank: {**add(rank), 'sum': rank}", "defect", "3 ranks"),
    "raises": (
        "lambda rank: add(rank) if rank else 1 / 0",
        "not-runnable",
        "rank 0: ZeroDivisionError: division by zero",
    ),
    "killed": (
        "lambda rank: add(rank) if rank else os.kill(os.getpid(), signal.SIGKILL)",
        "not-runnable",
        "rank 0: ended with exit code -9",
    ),
    "hangs": (
        "lambda rank: add(rank) if rank < 2 else time.sleep(60)",
        "timeout",
        "ranks [0, 1, 2] not done after 2 s",
    ),
    "says nothing": ("lambda rank: {**add(rank), 'time': object()}", "not-runnable", "not JSON serializable"),
}


def processes(marker: str) -> list[Path]:
    """Every process whose command line holds a marker."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if marker.encode() in path.read_bytes():
                found.append(path)
    return found


def run(code: str) -> tuple[dict[str, Any], float]:
    program = f"{PREAMBLE}\ncase = Case('c', 'gloo', 3, {code}, judge, timeout_s=2.0)\n"
    program += "print(json.dumps(run_case(case, 'MF0000', Path('.'))))\n"
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), time.monotonic() - started


@pytest.mark.parametrize("name", SCENARIOS)
def test_what_ranks_do_becomes_the_right_outcome(name: str) -> None:
    code, outcome, summary = SCENARIOS[name]
    report, _ = run(code)
    assert report["outcome"] == outcome
    assert summary in report["summary"]
    assert ("by_rank" in report) == (outcome in ("clean", "defect"))


def test_a_case_whose_rank_crashed_is_run_once_more_and_says_so(tmp_path: Path) -> None:
    mark = str(tmp_path / "tried")
    crash = "os.kill(os.getpid(), signal.SIGABRT)"
    report, _ = run(f"lambda rank: add(rank) if rank or os.path.exists({mark!r}) else (open({mark!r}, 'w'), {crash})")
    assert (report["outcome"], report["summary"]) == ("clean", "3 ranks")
    assert report["again_after"] == "rank 0: ended with exit code -6"


def test_a_case_whose_rank_crashes_again_was_not_carried_out() -> None:
    report, _ = run("lambda rank: add(rank) if rank else os.kill(os.getpid(), signal.SIGSEGV)")
    assert (report["outcome"], report["summary"]) == ("not-runnable", "rank 0: ended with exit code -11")
    assert report["again_after"] == report["summary"]


def test_other_ends_are_not_tried_again() -> None:
    for name in ("right", "raises", "killed", "hangs"):
        report, _ = run(SCENARIOS[name][0])
        assert "again_after" not in report


def test_a_hanging_rank_is_ended_and_nothing_is_left_running() -> None:
    marker = f"hanging-rank-of-{os.getpid()}"
    report, elapsed = run(f"lambda rank: ({marker!r}, time.sleep(600))")
    assert report["outcome"] == "timeout"
    assert elapsed < 30
    assert processes(marker) == []


def test_ranks_whose_peer_failed_are_not_waited_for_until_the_deadline() -> None:
    program = (
        f"{PREAMBLE}\ncase = Case('c', 'gloo', 2, lambda r: 1 / 0 if r else time.sleep(600), judge, timeout_s=120.0)\n"
    )
    program += "print(json.dumps(run_case(case, 'MF0000', Path('.'))))\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["outcome"] == "not-runnable"
    assert "rank 1: ZeroDivisionError" in report["summary"]
    assert report["seconds"] < 30


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_ranks_end_with_the_process_that_started_them(how: signal.Signals, tmp_path: Path) -> None:
    marker = f"rank-of-{how.name}-{os.getpid()}"
    program = f"{PREAMBLE}\ncase = Case({marker!r}, 'gloo', 3, lambda r: (Path({str(tmp_path)!r}, str(r)).touch(), "
    program += "time.sleep(600)), judge, timeout_s=600.0)\nrun_case(case, 'MF0000', Path('.'))\n"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.iterdir())) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(processes(marker)) == 5  # the parent, three ranks, and the one that keeps their store
        process.send_signal(how)
        process.wait(timeout=30)
        deadline = time.monotonic() + 10
        while processes(marker) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert processes(marker) == []
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("shown", "controls", "expected"),
    [
        (["defect"], ["clean"], "defect"),
        (["clean"], ["clean"], "clean"),
        (["clean"], [], "clean"),
        (["clean"], ["defect"], "defect"),
        (["defect"], ["defect"], "not-runnable"),
        (["clean"], ["timeout"], "timeout"),
        (["defect", "not-runnable"], ["clean"], "not-runnable"),
        ([], ["clean"], "not-runnable"),
    ],
)
def test_a_control_that_fails_is_never_taken_for_a_proof(shown: list[str], controls: list[str], expected: str) -> None:
    assert overall(shown, controls) == expected  # type: ignore[arg-type]
