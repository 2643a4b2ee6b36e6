# SPDX-License-Identifier: Apache-2.0
"""The driver and its GPUs, by the first of three ways that answers: NVML, ``nvidia-smi``, the driver's files in /proc.

The files tell the driver's version and the GPUs' names, no compute capability. They are all there is in a container
whose NVIDIA_DRIVER_CAPABILITIES lacks ``utility``: both NVML and ``nvidia-smi`` stay outside then, and CUDA works all
the same. Where a driver hangs or crashes, so does whoever asks it: all asking is done in processes of their own, and
nothing here waits for one longer than ``PATIENCE_S``.
"""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import msgspec

from megatron_fixes.machine import child, driver_files
from megatron_fixes.machine.facts import Device, Reading

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

PATIENCE_S = 10.0
FILES = "the driver's files in /proc"
_SMI = "nvidia-smi"
_OLD_FIELDS: tuple[str, ...] = ("driver_version", "name", "memory.total", "mig.mode.current")
_FIELDS = (*_OLD_FIELDS, "compute_cap")  # which old drivers can't be asked for
_MOST_WORDS = 200
_UNKNOWN_FIELD = "is not a valid field to query"
_VERSION = re.compile(r"\d{1,4}(\.\d{1,4}){1,3}")  # of a driver: 550.54.15
_CAPABILITY = re.compile(r"[1-4]?\d\.\d")
_MEBIBYTES = re.compile(r"[1-9]\d{0,7}")  # up to 95 TiB
_UNTOLD = re.compile(r"\[.+\]|N/A|Not Supported")  # what it says for a value that it can't tell: [N/A]
_CUDA = re.compile(r"CUDA (?:\w+ )?Version\s*:\s*(\d+\.\d+)")


class Graphics(msgspec.Struct, frozen=True):
    """The driver, the CUDA version of its library, and its GPUs; ``gpus`` is their number, or why there are none.

    ``refusal`` is what did not answer though it is there, as in ``facts.Machine``.
    """

    driver: Reading
    cuda: Reading
    gpus: Reading
    devices: tuple[Device, ...] = ()
    refusal: str = ""


class UnansweredError(Exception):
    """One of the ways gave no answer; the message says why."""


class AbsentError(UnansweredError):
    """There is nothing to ask."""


def read(proc: Path = driver_files.PROC) -> Graphics:
    """Ask NVML, then ``nvidia-smi``, then the files below ``proc``."""
    reasons, refusals = [], []
    for ask in (_nvml, _smi):
        try:
            return ask(proc)
        except UnansweredError as error:
            reasons.append(str(error))
            if not isinstance(error, AbsentError):
                refusals.append(str(error))
    return from_files(proc, reasons, refusals)


def from_files(proc: Path = driver_files.PROC, reasons: Sequence[str] = (), refusals: Sequence[str] = ()) -> Graphics:
    """What the driver's files tell.

    Args:
        proc: Where they are.
        reasons: Why the better ways gave no answer.
        refusals: Those of them that are there.
    """
    version = driver_files.version(proc)
    if not version and not refusals:
        refusals = [f"{path} is there, and no driver answers" for path in driver_files.traces(proc)][:1]
    devices = tuple(Device(name) for name in (driver_files.models(proc) if version else ()))
    why = "; ".join(reasons)
    driver = Reading(version, FILES, missing=why) if version else Reading(missing=why or "no driver is loaded")
    gpus = Reading(str(len(devices)), FILES, missing=why) if devices else Reading(missing=why or "no driver is loaded")
    cuda = Reading(missing=why or f"not told by {FILES}")
    return Graphics(driver, cuda, gpus, devices, "; ".join(refusals))


def _nvml(proc: Path) -> Graphics:
    if not driver_files.traces(proc) and not driver_files.has_library():
        raise AbsentError(f"{driver_files.LIBRARY} is not here")
    # A fork, as the library may crash, end the process, print, or hang where no signal reaches it.
    try:
        found = msgspec.json.decode(child.forked(_ask_nvml, PATIENCE_S), type=Graphics)
    except child.GivenUpError as error:
        raise UnansweredError(f"NVML {error}") from error
    except msgspec.MsgspecError as error:
        raise UnansweredError(f"NVML gave an answer that can't be read: {error}") from error
    if not found.driver:
        raise (UnansweredError if found.refusal else AbsentError)(found.driver.missing)
    return found


def _ask_nvml() -> bytes:
    from megatron_fixes.machine.nvml import Nvml, NvmlError, NvmlMissingError

    try:
        library = Nvml()
        devices, lost = library.devices()
        driver = Reading(library.driver(), "NVML")
        try:
            cuda = Reading(library.cuda(), "NVML")
        except NvmlError as error:
            cuda = Reading(missing=str(error))
        found = Graphics(driver, cuda, _number(devices, "NVML"), devices, lost)
    except NvmlError as error:
        none = Reading(missing=str(error))
        found = Graphics(none, none, none, (), "" if isinstance(error, NvmlMissingError) else str(error))
    return msgspec.json.encode(found)


def _number(devices: Sequence[Device], source: str) -> Reading:
    return Reading(str(len(devices)), source) if devices else Reading(missing=f"{source} names none")


def _smi(_: Path) -> Graphics:
    path = shutil.which(_SMI)
    if path is None:
        raise AbsentError(f"{_SMI} is not on PATH")
    fields = _FIELDS
    text = _table(path, fields)
    if _UNKNOWN_FIELD in text:
        fields = _OLD_FIELDS
        text = _table(path, fields)
    lines = [line for line in text.splitlines() if line.strip()]
    split = [[cell.strip() for cell in line.split(",")] for line in lines]
    rows = [row for row in split if len(row) == len(fields) and _describes_a_gpu(*row)]
    odd = [" ".join(line.split()) for line, row in zip(lines, split, strict=True) if row not in rows]
    if not rows:
        raise UnansweredError(f"{_SMI}: {' '.join(odd)[:_MOST_WORDS] or 'no answer'}")
    devices = tuple(_device(*row[1:]) for row in rows)
    said = f"{_SMI}: {len(odd)} of {len(lines)} lines describe no GPU: {'; '.join(odd)[:_MOST_WORDS]}"
    return Graphics(Reading(rows[0][0], _SMI), _smi_cuda(path), _number(devices, _SMI), devices, said if odd else "")


def _table(path: str, fields: Sequence[str]) -> str:
    return _output(path, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")


def _smi_cuda(path: str) -> Reading:
    try:
        cuda = _CUDA.search(_output(path))
    except UnansweredError as error:
        return Reading(missing=str(error))
    return Reading(cuda.group(1), _SMI) if cuda else Reading(missing=f"not told by {_SMI}")


def _describes_a_gpu(driver: str, name: str, mebibytes: str, mig: str, capability: str = "[N/A]") -> bool:
    """Whether a line is a driver's answer and no text that happens to have as many commas."""
    told = ((_MEBIBYTES, mebibytes), (_CAPABILITY, capability))
    plausible = all(form.fullmatch(cell) or _UNTOLD.fullmatch(cell) for form, cell in told)
    known_mig = mig in ("Enabled", "Disabled") or _UNTOLD.fullmatch(mig) is not None
    return _VERSION.fullmatch(driver) is not None and bool(name) and plausible and known_mig


def _device(name: str, mebibytes: str, mig: str, capability: str = "") -> Device:
    return Device(
        name,
        capability if _CAPABILITY.fullmatch(capability) else "",
        int(mebibytes) << 20 if _MEBIBYTES.fullmatch(mebibytes) else 0,
        {"Enabled": True, "Disabled": False}.get(mig),
    )


def _output(*command: str) -> str:
    """What ``nvidia-smi`` prints; it tells its failures on stdout."""
    try:
        done = child.started(*command, patience_s=PATIENCE_S)
    except child.GivenUpError as error:
        raise UnansweredError(f"{_SMI} {error}") from error
    return done.stdout or done.stderr
