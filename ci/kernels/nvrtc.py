# SPDX-License-Identifier: Apache-2.0
"""Compiles a CUDA source to machine code with one libnvrtc, by ctypes: no GPU, no toolkit, standard library alone.

``python nvrtc.py FOLDER SOURCE sm_80,sm_90 bf16,fp8`` takes libnvrtc and the headers from the wheels unpacked in
FOLDER (a ``site-packages`` or a ``pip install --target``) and prints one JSON line an outcome. One process can hold one
version only: callers start one a CUDA version. NVRTC asked for ``sm_XX`` and not ``compute_XX`` assembles its PTX, too,
so that an instruction that the chip has not is refused here. Not seen: whether a driver would load the result.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class Outcome(NamedTuple):
    """Machine code, or what the compiler said first where it refused."""

    cubin: bytes
    said: str


class Nvrtc:
    """One libnvrtc.

    Args:
        folder: Where wheels are unpacked: ``nvidia/.../lib`` and ``nvidia/.../include`` are below it.
        toolkit: An installed toolkit, which is taken if no wheel is there.
        major: The major version to take where there are several.

    Raises:
        FileNotFoundError: There is none, or several.
    """

    def __init__(self, folder: Path, toolkit: str = "", major: str = "") -> None:
        found = _libraries(folder.glob(f"nvidia/*/lib/libnvrtc.so.{major}*"))
        headers = folder.glob("nvidia/*/include/cuda_bf16.h")
        if not found and toolkit:
            found = _libraries(Path(toolkit).glob(f"lib64/libnvrtc.so.{major}*"))
            headers = Path(toolkit).glob("include/cuda_bf16.h")
        if len(found) != 1:
            raise FileNotFoundError(f"got {len(found)} libnvrtc in wheels below {folder}, expected one")
        # That of CUDA 13 looks for its builtins by name alone, and not beside itself: they must be loaded already.
        for builtins in _libraries(found[0].parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(str(found[0]))
        self._includes = sorted({str(header.parent) for header in headers})
        numbers = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", *map(ctypes.byref, numbers))
        self.version = ".".join(str(number.value) for number in numbers)

    def compile(self, source: Path, architecture: str, *defines: str) -> Outcome:
        """Compile for one architecture, such as ``sm_90``."""
        program = ctypes.c_void_p()
        text, name = source.read_bytes(), source.name.encode()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text, name, 0, None, None)
        try:
            options = [f"--gpu-architecture={architecture}", "--std=c++17", *(f"-D{define}" for define in defines)]
            options += [f"--include-path={path}" for path in self._includes]
            arguments = (ctypes.c_char_p * len(options))(*map(str.encode, options))
            if self._library.nvrtcCompileProgram(program, len(options), arguments):
                return Outcome(b"", first_error(self._read(program, "nvrtcGetProgramLog").rstrip(b"\0").decode()))
            return Outcome(self._read(program, "nvrtcGetCUBIN"), "")
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{what}Size", program, ctypes.byref(size))
        content = ctypes.create_string_buffer(size.value)
        self._call(what, program, content)
        return content.raw

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._library, name)(*arguments):
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise RuntimeError(f"{name}: {self._library.nvrtcGetErrorString(code).decode()}")


def _libraries(paths: Iterable[Path]) -> list[Path]:
    """Different libraries among some paths: links to one count once, and the variant for other hosts not at all."""
    return sorted({path.resolve() for path in paths if ".alt." not in path.name})


def first_error(log: str) -> str:
    """The first line of a compiler's log that names an error, else the first line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), *lines[:1] or ["no message"])


def main(folder: str, source: str, architectures: str, precisions: str) -> None:
    """Print the outcome of every architecture and precision as it comes."""
    nvrtc = Nvrtc(Path(folder))
    for architecture in architectures.split(","):
        for precision in precisions.split(","):
            cubin, said = nvrtc.compile(Path(source), architecture, f"PRECISION_{precision.upper()}")
            outcome = {"architecture": architecture, "precision": precision, "cubin_bytes": len(cubin), "said": said}
            print(json.dumps({"nvrtc": nvrtc.version, **outcome}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
