# SPDX-License-Identifier: Apache-2.0
"""The driver and its GPUs, by the first of three ways that answers: NVML, ``nvidia-smi``, the driver's files in /proc.

The files tell the driver's version and the GPUs' names, no compute capability. They are all there is in a container
whose NVIDIA_DRIVER_CAPABILITIES lacks ``utility``: both NVML and ``nvidia-smi`` stay outside then, and CUDA works all
the same. Nothing here waits longer than ``PATIENCE_S``: where a driver hangs, so does whoever asks it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from typing import TYPE_CHECKING, NamedTuple

from megatron_fixes.machine import driver_files
from megatron_fixes.machine.facts import Device, Reading

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PATIENCE_S = 10.0
FILES = "the driver's files in /proc"
_SMI = "nvidia-smi"
_FIELDS = ("driver_version", "name", "memory.total", "mig.mode.current", "compute_cap")
_UNKNOWN_FIELD = "is not a valid field to query"
_CUDA = re.compile(r"CUDA (?:\w+ )?Version\s*:\s*(\d+\.\d+)")


class Graphics(NamedTuple):
    """The driver, the CUDA version of its library, and its GPUs; ``gpus`` is their number, or why there are none."""

    driver: Reading
    cuda: Reading
    gpus: Reading
    devices: tuple[Device, ...] = ()


class UnansweredError(Exception):
    """One of the ways gave no answer; the message says why."""


def read(proc: Path = driver_files.PROC) -> Graphics:
    """Ask NVML, then ``nvidia-smi``, then the files below ``proc``."""
    refusals = []
    for ask in (_nvml, _smi):
        try:
            return ask()
        except UnansweredError as error:
            refusals.append(str(error))
    return from_files(proc, tuple(refusals))


def from_files(proc: Path = driver_files.PROC, refusals: Sequence[str] = ()) -> Graphics:
    """What the driver's files tell.

    Args:
        proc: Where they are.
        refusals: What the better ways said.
    """
    version = driver_files.version(proc)
    devices = tuple(Device(name) for name in (driver_files.models(proc) if version else ()))
    why = "; ".join(refusals)
    driver = Reading(version, FILES, missing=why) if version else Reading(missing=why or "no driver is loaded")
    gpus = Reading(str(len(devices)), FILES, missing=why) if devices else Reading(missing=why or "no driver is loaded")
    return Graphics(driver, Reading(missing=why or f"not told by {FILES}"), gpus, devices)


def _nvml() -> Graphics:
    answers: list[Graphics] = []
    refusals: list[str] = []
    # A thread, as a driver that hangs can't be interrupted; it ends with the process.
    asking = threading.Thread(target=_ask_nvml, args=(answers, refusals), daemon=True)
    asking.start()
    asking.join(PATIENCE_S)
    if answers:
        return answers[0]
    raise UnansweredError(refusals[0] if refusals else f"NVML gave no answer within {PATIENCE_S:g} s")


def _ask_nvml(answers: list[Graphics], refusals: list[str]) -> None:
    from megatron_fixes.machine.nvml import Nvml, NvmlError

    try:
        with Nvml() as library:
            devices = library.devices()
            driver, cuda = Reading(library.driver(), "NVML"), Reading(library.cuda(), "NVML")
            answers.append(Graphics(driver, cuda, _number(devices, "NVML"), devices))
    except NvmlError as error:
        refusals.append(str(error))


def _number(devices: Sequence[Device], source: str) -> Reading:
    return Reading(str(len(devices)), source) if devices else Reading(missing=f"{source} names none")


def _smi() -> Graphics:
    path = shutil.which(_SMI)
    if path is None:
        raise UnansweredError(f"{_SMI} is not on PATH")
    fields: Sequence[str] = _FIELDS
    text = _output(path, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    if _UNKNOWN_FIELD in text:
        # Old drivers can't be asked for it.
        fields = _FIELDS[:-1]
        text = _output(path, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
    if not rows or any(len(row) != len(fields) for row in rows):
        raise UnansweredError(f"{_SMI}: {' '.join(text.split())[:200] or 'no answer'}")
    cuda = _CUDA.search(_output(path))
    devices = tuple(_device(*row[1:]) for row in rows)
    return Graphics(
        Reading(rows[0][0], _SMI),
        Reading(cuda.group(1), _SMI) if cuda else Reading(missing=f"not told by {_SMI}"),
        _number(devices, _SMI),
        devices,
    )


def _device(name: str, mebibytes: str, mig: str, capability: str = "") -> Device:
    return Device(
        name,
        capability if re.fullmatch(r"\d+\.\d+", capability) else "",
        int(mebibytes) << 20 if mebibytes.isdigit() else 0,
        {"Enabled": True, "Disabled": False}.get(mig),
    )


def started(*command: str, patience_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, whatever it ends with.

    Raises:
        OSError, subprocess.TimeoutExpired: It can't be started, or takes longer than ``patience_s``.
    """
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=patience_s,
        check=False,
    )


def _output(*command: str) -> str:
    """What ``nvidia-smi`` prints; it tells its failures on stdout."""
    try:
        done = started(*command)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnansweredError(f"{_SMI}: {error}") from error
    return done.stdout or done.stderr
