# SPDX-License-Identifier: Apache-2.0
"""Scripts and benchmarks that are asked for help, or wrongly, say so and write nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(
    path.relative_to(ROOT)
    for folder in ("scripts", "benchmarks")
    for path in (ROOT / folder).glob("*.py")
    if "__main__" in path.read_text("utf-8")
)
WRITTEN = ("README.md", "docs/upstream_reports.md", "docs/status.md", "docs/status.json", "docs/demo.svg")


def times() -> list[int]:
    generated = [ROOT / "megatron_fixes/catalog" / name for name in ("matrix.json", "fingerprints.json")]
    return [path.stat().st_mtime_ns for path in [*(ROOT / name for name in WRITTEN), *generated]]


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--no-such-option", 2)])
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_a_program_reads_its_arguments_before_it_writes(program: Path, argument: str, code: int) -> None:
    before = times()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(program), argument]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    assert "usage: " in (done.stderr if code else done.stdout)
    assert times() == before


def test_there_are_programs() -> None:
    assert Path("scripts/render_reports.py") in PROGRAMS
