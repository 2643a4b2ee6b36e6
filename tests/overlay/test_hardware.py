# SPDX-License-Identifier: Apache-2.0
"""Importing Megatron with the overlay on says what can't work on this machine, and in strict mode stops the process.

The real megatron-core and the real matrix; the driver's files and torch are those of tests/machine. Nothing of torch is
imported by the overlay: Megatron's own import of it is what fails here, later.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fixes.catalog.data import matrix_path
from megatron_fixes.catalog.matrix import load_matrix

from ..machine.conftest import Parts, nvml, parts

__all__ = ["nvml", "parts"]

WHEEL = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"
IMPORT = (
    "import sys; from megatron_fixes.overlay import hardware; hardware.PROC = sys.argv[1]\n"
    "import megatron_fixes.auto\n"
    "try:\n    import megatron.core\nexcept SystemExit as error:\n    print('torch', error)\n"
)
MINIMUM = load_matrix(matrix_path()).cuda["13.0"].minimum_driver
TOO_OLD = (
    f"megatron-fixes: training can't work on this machine: driver: got 535.183.01, expected at least {MINIMUM}, as "
    "torch 2.11.0+cu130 is built for CUDA 13.0; update the driver, install cuda-compat, or take a build of torch for "
    "an older CUDA"
)
NO_CODE = "megatron-fixes: training can't work on this machine: NVIDIA H200: got sm_90, expected something"


def start(parts: Parts, tree: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**parts.environment(), "MEGATRON_FIXES": "all", **variables}
    environment["PYTHONPATH"] = os.pathsep.join([str(tree), environment["PYTHONPATH"]])
    environment["MEGATRON_FIXES_CACHE"] = str(parts.place / "cache")
    command = [sys.executable, "-c", IMPORT, str(parts.proc)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


@pytest.mark.parametrize(
    ("driver", "gpu", "code", "line"),
    [
        ("535.183.01", "NVIDIA H200", WHEEL, TOO_OLD),
        ("580.95.05", "NVIDIA H200", "sm_75 sm_80", NO_CODE),
        ("580.95.05", "NVIDIA H200", WHEEL, ""),
        ("580.95.05", "NVIDIA L4", WHEEL, ""),
        ("580.95.05", "Some GPU that the matrix does not name", "sm_75", ""),
    ],
)
def test_what_can_not_work_is_one_line(
    parts: Parts, release_tree: Path, driver: str, gpu: str, code: str, line: str
) -> None:
    parts.driver(driver, gpu)
    parts.torch("2.11.0+cu130", "13.0", code)
    done = start(parts, release_tree)
    assert (done.returncode, done.stdout) == (0, "torch imported\n"), done.stderr
    assert len(done.stderr.splitlines()) == bool(line), done.stderr
    assert done.stderr.startswith(line)


@pytest.mark.parametrize(("driver", "stopped"), [("535.183.01", True), ("580.95.05", False)])
def test_strict_mode_stops_the_process(parts: Parts, release_tree: Path, driver: str, stopped: bool) -> None:
    parts.driver(driver, "NVIDIA H200")
    parts.torch("2.11.0+cu130", "13.0", WHEEL)
    done = start(parts, release_tree, MEGATRON_FIXES_STRICT="1", LOCAL_RANK="3")
    assert done.returncode == int(stopped), done.stderr
    assert ("stopped local rank 3 before training" in done.stderr) == stopped


def test_one_process_of_a_node_says_it(parts: Parts, release_tree: Path) -> None:
    parts.driver("535.183.01", "NVIDIA H200")
    parts.torch("2.11.0+cu130", "13.0", WHEEL)
    assert start(parts, release_tree, LOCAL_RANK="0").stderr.startswith(TOO_OLD)
    assert start(parts, release_tree, LOCAL_RANK="1").stderr == ""


def test_without_a_driver_nothing_is_read(parts: Parts, release_tree: Path) -> None:
    parts.torch("2.11.0+cu130", "13.0", WHEEL)
    code = "import sys; from megatron_fixes.overlay import hardware; print(hardware.refusals())\n"
    code += "print([name for name in sys.modules if name.startswith(('megatron_fixes.machine', 'torch', 'msgspec'))])"
    environment = {**parts.environment(), "MEGATRON_FIXES": "all"}
    command = [sys.executable, "-c", code.replace("print(hard", f"hardware.PROC = {str(parts.proc)!r}; print(hard")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.stdout == "[]\n[]\n", done.stderr
