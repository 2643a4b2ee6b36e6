# SPDX-License-Identifier: Apache-2.0
"""Reads this machine: the edge between ``facts`` and the system. Never raises for what the machine is.

Two depths. ``read`` asks the driver and every program that knows; it is for ``doctor`` and ``apply``. ``from_files``
starts nothing and asks nobody, for the start of a job. Where there is no driver, torch's list of GPU code is
not looked for, as there is nothing to hold it against.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import msgspec

from megatron_fixes.machine import child, driver_files, graphics, torch_files
from megatron_fixes.machine.facts import Machine, Reading
from megatron_fixes.machine.packages import TRANSFORMER_ENGINE, is_nvidia_apex, version
from megatron_fixes.machine.places import place

IMPORT_PATIENCE_S = 120.0
COMPATIBILITY = "cuda-compat"
_COMPATIBILITY_FOLDERS = ("cuda/compat", "cuda-*/compat", "cuda/compat/lib*")
_TOOLKITS = Path("/usr/local")
_LIBRARIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")
_NOT_ASKED = "not asked"
# Around the answer, as what is imported may print too.
_MARK = "<megatron-fixes>"
_ASK_TORCH = (
    "import torch; flags = getattr(torch._C, '_cuda_getArchFlags', lambda: None)(); "
    "nccl = torch.cuda.nccl.version() if hasattr(torch._C, '_nccl_version') else (); "
    f"print('', flags or '', '.'.join(map(str, nccl)), '', sep={_MARK!r}, flush=True)"
)


def read(megatron_core: Reading, *, proc: Path = driver_files.PROC, complete: bool = True) -> Machine:
    """Ask the driver, and read torch's files.

    Args:
        megatron_core: The tree that is looked at: who asks knows which.
        proc: Where the driver's files are.
        complete: Whether to read too what can't stop anything: NCCL, TransformerEngine, Apex and nvcc.
    """
    machine = _machine(graphics.read(proc), megatron_core)
    return _completed(machine) if complete else machine


def from_files(*, proc: Path = driver_files.PROC) -> Machine:
    """Read files only: the driver, the GPUs' names, and torch."""
    return _machine(graphics.from_files(proc), Reading(missing=_NOT_ASKED))


def ask_torch(machine: Machine) -> Machine:
    """Replace what torch's files tell by what a child process says that imports it; seconds."""
    try:
        done = child.started(sys.executable, "-c", _ASK_TORCH, patience_s=IMPORT_PATIENCE_S)
    except child.GivenUpError as error:
        return msgspec.structs.replace(machine, torch_code=Reading(missing=f"torch, when asked, {error}"))
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return msgspec.structs.replace(machine, torch_code=Reading(missing=f"torch can't be imported: {last}"))
    parts = done.stdout.split(_MARK)
    if len(parts) != 4:
        return msgspec.structs.replace(machine, torch_code=Reading(missing="torch, when asked, gave no answer"))
    _, code, nccl, _ = parts
    return msgspec.structs.replace(
        machine,
        torch_code=Reading(code, "torch itself") if code else Reading(missing="torch itself names no GPU code"),
        nccl=Reading(nccl, "torch itself") if nccl else machine.nccl,
    )


def _machine(found: graphics.Graphics, megatron_core: Reading) -> Machine:
    folder = place("torch")
    torch, cuda = _torch(folder)
    code = Reading(missing=cuda.missing or "not looked for, as there is no GPU here")
    there = bool(found.driver or found.refusal)
    if folder is not None and cuda and there:
        code = torch_files.code(folder)
    return Machine(
        driver=found.driver,
        refusal=found.refusal,
        driver_cuda=found.cuda,
        forward_compatibility=_forward_compatibility() if there else Reading(missing="no driver is loaded"),
        gpus=found.gpus,
        devices=found.devices,
        torch=torch,
        torch_cuda=cuda,
        torch_code=code,
        megatron_core=megatron_core,
    )


def _completed(machine: Machine) -> Machine:
    engine = version(*TRANSFORMER_ENGINE)
    return msgspec.structs.replace(
        machine,
        nvcc=_nvcc(),
        nccl=_nccl(place("torch"), machine.torch_cuda),
        transformer_engine=Reading(engine, "metadata") if engine else Reading(missing="not installed"),
        apex=_apex(),
    )


def _torch(folder: Path | None) -> tuple[Reading, Reading]:
    if folder is None:
        return Reading(missing="not installed"), Reading(missing="torch is not installed")
    told: dict[str, str | None] = {}
    try:
        told = torch_files.versions(folder)
    except (OSError, SyntaxError, ValueError) as error:
        why = f"{torch_files.VERSION} can't be read: {error}"
    else:
        named = "a build without CUDA" if "cuda" in told else f"{torch_files.VERSION} does not tell its CUDA version"
        why = f"a build for ROCm {told['hip']}" if told.get("hip") else named
    name = told.get("__version__") or version("torch")
    source = torch_files.VERSION if told.get("__version__") else "metadata"
    torch = Reading(name, source) if name else Reading(missing=why)
    cuda = told.get("cuda")
    return torch, Reading(cuda, torch_files.VERSION) if cuda else Reading(missing=why)


def _nccl(folder: Path | None, cuda: Reading) -> Reading:
    """NCCL by the metadata of its wheel for torch's CUDA, else by the name of the library's file."""
    if folder is None or not cuda:
        return Reading(missing=cuda.missing)
    name = f"nvidia-nccl-cu{cuda.value.partition('.')[0]}"
    if known := version(name):
        return Reading(known, f"metadata of {name}")
    for libraries in (folder / "lib", *map(Path, _LIBRARIES)):
        for path in sorted(libraries.glob("libnccl.so.*.*.*")):
            return Reading(path.name.removeprefix("libnccl.so."), "the name of the library's file")
    return Reading(missing=f"neither {name} nor a file libnccl.so.X.Y.Z is here; torch may hold it inside")


def _apex() -> Reading:
    folder = place("apex")
    if folder is None:
        return Reading(missing="not installed")
    kind = "NVIDIA Apex" if is_nvidia_apex(folder) else "an unrelated project of that name"
    return Reading(version("apex") or "unknown", kind)


def _nvcc() -> Reading:
    path = shutil.which("nvcc")
    if path is None:
        return Reading(missing="not on PATH")
    try:
        done = child.started(path, "--version", patience_s=graphics.PATIENCE_S)
    except child.GivenUpError as error:
        return Reading(missing=f"{path} {error}")
    found = re.search(r"release (\d+\.\d+)", done.stdout)
    return Reading(found.group(1), path) if found else Reading(missing=f"{path} does not tell its version")


def _forward_compatibility() -> Reading:
    """A ``libcuda`` of ``cuda-compat``, on the library path or where NVIDIA's images have it."""
    listed = [Path(name) for name in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if "compat" in name]
    usual = [folder for pattern in _COMPATIBILITY_FOLDERS for folder in sorted(_TOOLKITS.glob(pattern))]
    for folder in (*listed, *usual):
        try:
            if (folder / "libcuda.so.1").exists():
                return Reading(str(folder), COMPATIBILITY)
        except OSError:
            continue
    return Reading(missing="none found")
