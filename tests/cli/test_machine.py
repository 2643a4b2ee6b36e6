# SPDX-License-Identifier: Apache-2.0
"""doctor shows the machine and what the matrix says of it; apply refuses what can't work, before it writes anything.

The machine is made of files and programs, as in tests/machine; the commands are real processes on it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_fixes.machine.facts import Machine

from ..machine.conftest import Parts, nvml, parts
from .conftest import CATALOG, IDS, RELEASE

__all__ = ["nvml", "parts"]

WHEEL = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"
OLD, NEW = "535.183.01", "580.95.05"
MINIMUM = CATALOG.matrix.cuda["13.0"].minimum_driver
TOO_OLD = f"driver: got {OLD}, expected at least {MINIMUM}, as torch 2.11.0+cu130 is built for CUDA 13.0"


def smi(parts: Parts, *gpus: str, driver: str = NEW, cuda: str = "13.0") -> None:
    """An ``nvidia-smi`` that knows these GPUs, each as ``name, compute capability``."""
    rows = [", ".join([driver, gpu.split(", ")[0], "81559, Disabled", gpu.split(", ")[1]]) for gpu in gpus]
    query = "printf '%s\\n' " + " ".join(f"'{row}'" for row in rows)
    parts.program("nvidia-smi", f"case \"$*\" in *query-gpu*) {query};; *) echo 'CUDA Version: {cuda} ';; esac")


def run(parts: Parts, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_fixes", *map(str, arguments)]
    environment = parts.environment()
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=parts.place, timeout=60)


def report(parts: Parts, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(parts, "doctor", "--json", *arguments).stdout)
    return found


def lines_of(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What was printed, whatever the width of the labels."""
    return [re.sub("  +", "  ", line) for line in done.stdout.splitlines()]


@pytest.fixture
def too_old(parts: Parts) -> Parts:
    """A node whose driver can't run torch's CUDA."""
    smi(parts, "NVIDIA H100 80GB HBM3, 9.0", driver=OLD, cuda="12.2")
    parts.torch("2.11.0+cu130", "13.0", WHEEL)
    return parts


def test_doctor_shows_the_machine_and_what_fits(parts: Parts) -> None:
    smi(parts, "NVIDIA L4, 8.9", "NVIDIA L4, 8.9")
    parts.torch("2.11.0+cu130", "13.0", WHEEL)
    parts.distribution("nvidia-nccl-cu13", "2.28.9")
    lines = lines_of(run(parts, "doctor"))
    assert f"driver  {NEW}, CUDA 13.0  (nvidia-smi)" in lines
    assert "GPU  2 x NVIDIA L4, compute capability 8.9, 79.6 GiB  (nvidia-smi)" in lines
    assert f"GPU code of torch  {WHEEL}  (torch/lib/libtorch_python.so)" in lines
    assert "NCCL  2.28.9  (metadata of nvidia-nccl-cu13)" in lines
    assert "fits  NVIDIA L4: sm_89 runs torch's code for sm_86" in lines


def test_doctor_says_what_does_not_fit_and_what_to_do(too_old: Parts) -> None:
    done = run(too_old, "doctor", "--check")
    assert done.returncode == 1
    assert any(line.startswith(f"unfit  {TOO_OLD}  (https://docs.nvidia.com/") for line in lines_of(done))
    todo = "update the driver, install cuda-compat, or take a build of torch for CUDA 12"
    assert f"to do  {TOO_OLD}: {todo}" in lines_of(done)


def test_doctors_json_holds_a_record_of_the_machine(too_old: Parts) -> None:
    machine = report(too_old)["machine"]
    facts = msgspec.convert(machine["facts"], Machine)
    assert (facts.driver.value, facts.torch_code.value, facts.devices[0].capability) == (OLD, WHEEL, "9.0")
    assert machine["verdict"] == "unfit"
    assert [finding["subject"] for finding in machine["findings"] if finding["stops"]] == ["driver"]


def test_doctor_asks_torch_itself_where_that_is_wanted(parts: Parts) -> None:
    smi(parts, "NVIDIA H100 80GB HBM3, 9.0")
    parts.torch("2.11.0a0+own", "13.0", importable="class _C:\n    _cuda_getArchFlags = lambda: 'sm_90'\n")
    assert "missing" in report(parts)["machine"]["facts"]["torch_code"]
    asked = report(parts, "--import-torch")["machine"]["facts"]["torch_code"]
    assert asked == {"value": "sm_90", "source": "torch itself"}


def test_a_node_without_a_gpu_has_nothing_to_do_for_it(parts: Parts) -> None:
    parts.torch("2.11.0+cu130", "13.0", WHEEL)
    found = report(parts)
    assert found["machine"]["verdict"] == "note"
    assert not any("GPU" in sentence or "driver" in sentence for sentence in found["todo"])


def test_apply_refuses_before_it_writes(too_old: Parts, tree: Path, contents: Callable[[Path], Any]) -> None:
    before = contents(tree)
    done = run(too_old, "apply", tree)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        f"error: {TOO_OLD}",
        "  where: this machine (`megatron-fixes doctor` shows all of it)",
        "  hint: Update the driver, install cuda-compat, or take a build of torch for CUDA 12; or, if the job runs "
        f"elsewhere, repeat with: megatron-fixes apply {tree} --force",
    ]
    assert contents(tree) == before


def test_force_says_what_it_overrides(too_old: Parts, tree: Path) -> None:
    done = json.loads(run(too_old, "apply", tree, "--force", "--json").stdout)
    assert done["applied"] == IDS
    assert done["notes"] == [f"--force overrides: {TOO_OLD}"]


def test_force_says_it_to_a_person_too(too_old: Parts, tree: Path) -> None:
    done = run(too_old, "apply", tree, "--force")
    assert done.returncode == 0
    assert f"note      --force overrides: {TOO_OLD}" in done.stdout.splitlines()


def test_a_dry_run_is_not_refused_and_says_that_apply_would_be(too_old: Parts, tree: Path) -> None:
    done = json.loads(run(too_old, "apply", tree, "--dry-run", "--json").stdout)
    assert done["notes"] == [f"this machine stops apply, unless --force overrides it: {TOO_OLD}"]


@pytest.mark.parametrize(
    ("gpus", "torch", "stops", "note"),
    [
        (("Tesla V100-SXM2-32GB, 7.0",), ("2.11.0+cu130", "13.0"), True, ""),
        (("NVIDIA A100 80GB PCIe, 8.0", "Quadro P620, 6.1"), ("2.11.0+cu130", "13.0"), False, "Quadro P620: got sm_61"),
        (("NVIDIA L4, 8.9",), ("2.11.0+cu130", "13.0"), False, ""),
        (("NVIDIA L4, 8.9",), ("2.13.0+cpu", None), False, "torch: got torch 2.13.0+cpu, a build without CUDA"),
        (("NVIDIA L4, 8.9",), ("2.5.1+cu130", "13.0"), False, f"got torch 2.5.1+cu130, and {RELEASE} asks for"),
        ((), ("2.11.0+cu130", "13.0"), False, ""),
    ],
)
def test_apply_is_stopped_by_what_can_not_work_and_by_nothing_else(
    parts: Parts, tree: Path, gpus: tuple[str, ...], torch: tuple[str, str | None], stops: bool, note: str
) -> None:
    if gpus:
        smi(parts, *gpus)
    parts.torch(*torch, WHEEL)
    done = run(parts, "apply", tree, "--json")
    assert done.returncode == (1 if stops else 0), done.stderr
    notes = json.loads(done.stdout).get("notes", [])
    assert len(notes) == bool(note)
    assert not note or note in notes[0]


@pytest.mark.parametrize("files", [False, True])
def test_a_driver_that_refuses_needs_doing(parts: Parts, files: bool) -> None:
    parts.torch("2.11.0+cu130", "13.0", WHEEL)
    parts.program("nvidia-smi", "echo 'Unable to determine the device handle for GPU3: Unknown Error'; exit 15")
    if files:
        parts.driver(NEW, "NVIDIA H200")
        text = "from pathlib import Path\nfrom megatron_fixes.machine import reading\n_read = reading.read\n"
        text += f"reading.read = lambda core: _read(core, proc=Path({str(parts.proc)!r}))\n"
        parts.site.joinpath("sitecustomize.py").write_text(text)
    done = run(parts, "doctor", "--check")
    refused = "the driver refuses: nvidia-smi: Unable to determine the device handle for GPU3: Unknown Error"
    assert [line for line in done.stdout.splitlines() if line.startswith("to do") and f"GPU: {refused}: " in line]
    assert ("580.95.05" in done.stdout) == files
    assert "no GPU here" not in done.stdout
    assert done.returncode == 1


def test_a_name_with_control_characters_is_shown_as_escapes(parts: Parts) -> None:
    parts.torch("2.11.0+cu130", "13.0", WHEEL)
    smi(parts, "NVIDIA \033[31mL4\007, 8.9")
    done = run(parts, "doctor")
    assert "1 x NVIDIA \\x1b[31mL4\\x07, compute capability 8.9" in done.stdout
    assert not {"\x1b", "\x07"} & set(done.stdout)


def test_doctor_shows_the_version_of_torch_that_it_judges(parts: Parts) -> None:
    parts.torch("2.11.0+cu130", "13.0", WHEEL)
    parts.distribution("torch", "2.9.0")
    line = f"torch  2.11.0+cu130  {parts.site / 'torch'}  (its metadata says 2.9.0)"
    assert line in lines_of(run(parts, "doctor"))
    assert next(p["version"] for p in report(parts)["packages"] if p["name"] == "torch") == "2.11.0+cu130"
