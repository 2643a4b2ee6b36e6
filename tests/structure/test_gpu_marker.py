# SPDX-License-Identifier: Apache-2.0
"""A test that needs GPUs says so when it is left out, and a marker that nobody declared is an error."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAKE_TORCH = """
class cuda:
    is_available = staticmethod(lambda: {0} > 0)
    device_count = staticmethod(lambda: {0})
"""


def run_pytest(where: Path, test: str, devices: int) -> str:
    shutil.copy(ROOT / "tests" / "conftest.py", where)
    shutil.copy(ROOT / "pyproject.toml", where)
    (where / "torch.py").write_text(FAKE_TORCH.format(devices))
    (where / "test_marked.py").write_text("import pytest\n\n" + test)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_marked.py"],
        cwd=where,
        env={"PATH": "", "PYTHONPATH": str(where), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("mark", "devices", "expected"),
    [
        ("gpu", 0, "needs 1 CUDA device, found 0"),
        ("gpu(count=2)", 1, "needs 2 CUDA devices, found 1"),
        ("gpu", 1, "1 passed"),
        ("gpu(count=2)", 2, "1 passed"),
    ],
)
def test_a_gpu_test_runs_where_its_devices_are(mark: str, devices: int, expected: str, tmp_path: Path) -> None:
    assert expected in run_pytest(tmp_path, f"@pytest.mark.{mark}\ndef test_one():\n    pass\n", devices)


def test_an_undeclared_marker_is_an_error(tmp_path: Path) -> None:
    assert "'gpus' not found in `markers`" in run_pytest(
        tmp_path, "@pytest.mark.gpus\ndef test_one():\n    pass\n", devices=0
    )


def test_an_expected_failure_that_passes_is_a_failure(tmp_path: Path) -> None:
    assert "1 failed" in run_pytest(tmp_path, "@pytest.mark.xfail\ndef test_one():\n    pass\n", devices=0)
