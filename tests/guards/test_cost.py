# SPDX-License-Identifier: Apache-2.0
"""What the guards' wrappers cost is measured by one command; how long anything takes is not looked at."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "guard_wrappers.py"


def test_one_command_measures_the_wrappers_on_a_release(release_tree: Path) -> None:
    command = [sys.executable, SCRIPT, "--tree", release_tree, "--rounds", "2", "--markdown"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = [row.split("|")[1].strip() for row in done.stdout.splitlines()[4:]]
    assert rows == ["gradient reduction", "gradient reduction and parameter gather"]
