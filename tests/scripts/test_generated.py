# SPDX-License-Identifier: Apache-2.0
"""Generated files are what would be generated; a mistake in the matrix is told as an error, and nothing is written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loading import ROOT, load_program

GENERATORS = load_program("scripts/release_dist.py").GENERATORS


@pytest.mark.parametrize("name", GENERATORS)
def test_every_generated_file_of_this_tree_is_what_would_be_written(name: str) -> None:
    command = [sys.executable, str(ROOT / "scripts" / name), "--check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"scripts/{name} --check says:\n{done.stdout}{done.stderr}"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout whose matrix has a release twice."""
    place = tmp_path_factory.mktemp("checkout")
    for name in ("megatron_fixes", "patches", "scripts"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__"))
    text = (ROOT / "compat_matrix.yaml").read_text("utf-8")
    (place / "compat_matrix.yaml").write_text(text.replace('  "0.12.1": {line', '  "0.12.0": {line', 1), "utf-8")
    return place


@pytest.mark.parametrize(
    "program",
    [
        ["scripts/compile_matrix.py"],
        ["scripts/record_fingerprints.py"],
        ["scripts/render_tables.py"],
        ["scripts/render_reports.py"],
        ["-m", "megatron_fixes.patching.lint"],
    ],
    ids=lambda program: program[-1],
)
def test_a_mistake_in_the_matrix_is_an_error_with_its_line(checkout: Path, program: list[str]) -> None:
    compiled = checkout / "megatron_fixes/catalog/matrix.json"
    before = compiled.stat().st_mtime_ns
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    command = [sys.executable, *program]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 70
    assert done.stderr.startswith(f"error: {checkout / 'compat_matrix.yaml'}:")
    assert "got the key 0.12.0 twice" in done.stderr
    assert "Traceback" not in done.stderr
    assert compiled.stat().st_mtime_ns == before
