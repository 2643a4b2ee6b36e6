# SPDX-License-Identifier: Apache-2.0
"""Asks the NVIDIA Management Library, which comes with the driver, without making a CUDA context.

By ctypes: ten functions whose C interface has not changed for years. ``nvidia-ml-py`` would be 8,000 lines and
14 ms more at each start, and its module's name, ``pynvml``, belongs to an unmaintained distribution as well.
Source: https://docs.nvidia.com/deploy/nvml-api/. Not handled: a library that never answers, crashes or prints, and its
shutdown: ``graphics`` asks in a process that is there for nothing else, and ends.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_uint, c_ulonglong, c_void_p

from megatron_fixes.machine.driver_files import LIBRARY
from megatron_fixes.machine.facts import Device


class NvmlError(Exception):
    """The library refused, or can't be loaded; the message is its own."""


class NvmlMissingError(NvmlError):
    """The library is not there."""


class _Memory(ctypes.Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class Nvml:
    """The library, loaded and started.

    Raises:
        NvmlError: It is not there, does not start, or refuses a question.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            # A library that it needs in turn may be what is missing.
            missing = LIBRARY in str(error) and "No such file" in str(error)
            raise (NvmlMissingError if missing else NvmlError)(str(error)) from error
        self._call("nvmlInit_v2")

    def _call(self, name: str, *arguments: object) -> None:
        code = self._code(name, *arguments)
        if code:
            text = self._library.nvmlErrorString
            text.restype = c_char_p
            raise NvmlError(f"{name}: {(text(code) or b'').decode(errors='replace') or code}")

    def _code(self, name: str, *arguments: object) -> int:
        try:
            return int(getattr(self._library, name)(*arguments))
        except AttributeError as error:
            raise NvmlError(f"{LIBRARY} has no {name}") from error

    def driver(self) -> str:
        """Version of the driver."""
        text = ctypes.create_string_buffer(96)
        self._call("nvmlSystemGetDriverVersion", text, c_uint(len(text)))
        if not text.value:
            raise NvmlError("got no version of the driver")
        return text.value.decode(errors="replace")

    def cuda(self) -> str:
        """The newest CUDA version that the ``libcuda`` that would be loaded offers, such as ``13.0``."""
        number = c_int()
        self._call("nvmlSystemGetCudaDriverVersion_v2", byref(number))
        if number.value < 1000:
            raise NvmlError(f"got {number.value} as the driver's CUDA version")
        return f"{number.value // 1000}.{number.value % 1000 // 10}"

    def devices(self) -> tuple[tuple[Device, ...], str]:
        """All GPUs that this process may see and that answer, and how many don't and why; empty if all do."""
        count = c_uint()
        self._call("nvmlDeviceGetCount_v2", byref(count))
        found, refusals = [], []
        for index in range(count.value):
            try:
                found.append(self._device(index))
            except NvmlError as error:
                refusals.append(str(error))
        lost = f"{len(refusals)} of {count.value} GPUs did not answer: {'; '.join(dict.fromkeys(refusals))}"
        return tuple(found), lost if refusals else ""

    def _device(self, index: int) -> Device:
        handle, name = c_void_p(), ctypes.create_string_buffer(96)
        self._call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(handle))
        self._call("nvmlDeviceGetName", handle, name, c_uint(len(name)))
        major, minor, memory = c_int(), c_int(), _Memory()
        self._call("nvmlDeviceGetCudaComputeCapability", handle, byref(major), byref(minor))
        # Not told of a GPU that is cut into MIG instances to whoever may use an instance only.
        known = self._code("nvmlDeviceGetMemoryInfo", handle, byref(memory)) == 0
        return Device(
            name.value.decode(errors="replace"),
            f"{major.value}.{minor.value}",
            memory.total if known else 0,
            self._mig(handle),
        )

    def _mig(self, handle: c_void_p) -> bool | None:
        current, pending = c_uint(), c_uint()
        code = self._code("nvmlDeviceGetMigMode", handle, byref(current), byref(pending))
        return None if code else bool(current.value)
