# SPDX-License-Identifier: Apache-2.0
"""The program that tries activations that are freed while they are sent: its clean control, and what it needs.

Not held here: that elements are wrong where they are freed, which depends on timing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "freed_activation.py"


def run(tree: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, "--tree", tree, *options]
    # As on a machine without GPUs, wherever this runs.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_all_arrives_whole_where_nothing_is_freed(release_tree: Path) -> None:
    done = run(release_tree, "--gloo", "--kept")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"rank (\d): .*'received': [1-9]\d+, 'wrong': (\d+)", done.stdout) == [("0", "0"), ("1", "0")]


def test_it_says_that_it_needs_two_gpus(release_tree: Path) -> None:
    done = run(release_tree)
    assert (done.returncode, "this needs two CUDA devices" in done.stderr) == (2, True)
