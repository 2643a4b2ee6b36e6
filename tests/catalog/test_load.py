# SPDX-License-Identifier: Apache-2.0
"""A distribution of which a part is missing, added or changed is refused: a lost patch never reads as "none yet"."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATCH = "patches/core_v0.16/MF0003-pp-double-grad-reduce-multi-distopt.patch"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    skip = shutil.ignore_patterns("__pycache__", "_data")
    shutil.copytree(ROOT / "megatron_fixes", tmp_path / "megatron_fixes", ignore=skip)
    shutil.copytree(ROOT / "patches", tmp_path / "patches")
    shutil.copy(ROOT / "compat_matrix.yaml", tmp_path)
    return tmp_path


def load(root: Path) -> subprocess.CompletedProcess[str]:
    code = (
        "from megatron_fixes import catalog, errors\n"
        "try:\n    catalog.load()\nexcept errors.MegatronFixesError as error:\n    print(error)\n"
        "else:\n    print('loaded')"
    )
    environment = {**os.environ, "PYTHONPATH": str(root)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=root)


def test_a_whole_copy_loads(copy: Path) -> None:
    assert load(copy).stdout == "loaded\n"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda root: shutil.rmtree(root / "patches" / "core_v0.16"), "a patch of this version is missing"),
        (lambda root: (root / "patches/core_v0.16/series").write_text(""), "a patch of this version is missing"),
        (lambda root: (root / "patches/core_v0.16/series").unlink(), "no series file"),
        (lambda root: (root / PATCH).unlink(), "can't read the patch"),
        (lambda root: (root / PATCH).write_bytes((root / PATCH).read_bytes() + b"\n"), "got sha256"),
        (
            lambda root: (root / "compat_matrix.yaml").write_text(
                (root / "compat_matrix.yaml").read_text().replace("  MF0003:", "  MF9999:")
            ),
            "don't know the same fixes: MF0003, MF9999",
        ),
    ],
)
def test_a_damaged_copy_is_refused(copy: Path, spoil: Callable[[Path], object], message: str) -> None:
    spoil(copy)
    done = load(copy)
    assert message in done.stdout, done.stdout + done.stderr
    assert "hint:" in done.stdout
