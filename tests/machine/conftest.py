# SPDX-License-Identifier: Apache-2.0
"""Parts of a machine, laid out as files: programs on PATH, the driver's files, a torch that nobody can import.

The programs are real processes that print what the real ones print. ``read`` runs the reader in a process of its own,
so that PATH and the loader's path are those of a machine and not ours.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
READ = (
    "import sys, msgspec; from pathlib import Path; from megatron_fixes.machine import reading\n"
    "from megatron_fixes.machine.facts import Reading\n"
    "kind, proc = sys.argv[1], Path(sys.argv[2])\n"
    "core = Reading('0.16.1', 'given')\n"
    "machine = reading.read(core, proc=proc) if kind == 'read' else reading.from_files(proc=proc)\n"
    "machine = reading.ask_torch(machine) if 'ask' in sys.argv else machine\n"
    "sys.stdout.buffer.write(msgspec.json.encode(machine))\n"
)
VERSION_PY = (
    "from typing import Optional\n__version__ = '{0}'\ncuda: Optional[str] = {1!r}\nhip: Optional[str] = {2!r}\n"
)


def library(*texts: str) -> bytes:
    """The least 64-bit ELF file with these texts among its constants, as a linker lays it out."""
    constants = b"".join(b"before\0" + text.encode() + b"\0after\0" for text in texts) or b"nothing\0"
    names = b"\0.shstrtab\0.rodata\0"
    names_at = 64 + len(constants)
    table_at = names_at + len(names)
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, table_at, 0, 64, 0, 0, 64, 3, 1)
    sections = [(0, 0, 0, 0), (1, 3, names_at, len(names)), (11, 1, 64, len(constants))]
    rows = b"".join(struct.pack("<IIQQQQIIQQ", n, k, 0, 0, at, size, 0, 0, 1, 0) for n, k, at, size in sections)
    return head + constants + names + rows


class Parts:
    """Folders of one machine; see the module's docstring."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.bin, self.proc, self.site = place / "bin", place / "proc", place / "site"
        self.variables: dict[str, str] = {}
        self.bin.mkdir()
        self.site.mkdir()

    def program(self, name: str, script: str) -> Path:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    def driver(self, version: str, *models: str) -> None:
        self.proc.mkdir()
        line = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Tue Jul  8 18:12:11 UTC 2025"
        (self.proc / "version").write_text(f"{line}\nGCC version:  gcc version 12.2.0 (Debian)\n")
        for number, model in enumerate(models):
            folder = self.proc / "gpus" / f"0000:{number:02x}:00.0"
            folder.mkdir(parents=True)
            (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 42\nGPU UUID: \t GPU-0\n")

    def torch(self, version: str, cuda: str | None, *code: str, hip: str | None = None, importable: str = "") -> None:
        folder = self.site / "torch"
        (folder / "lib").mkdir(parents=True)
        (folder / "__init__.py").write_text(importable or "raise SystemExit('imported')\n")
        (folder / "version.py").write_text(VERSION_PY.format(version, cuda, hip))
        (folder / "lib" / "libtorch_python.so").write_bytes(library(*code))

    def distribution(self, name: str, version: str) -> None:
        folder = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")

    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
        path = os.pathsep.join([str(self.site), str(ROOT)])
        return {**kept, "PATH": str(self.bin), "PYTHONPATH": path, **self.variables}

    def read(self, kind: str = "read", *more: str) -> Any:
        command = [sys.executable, "-c", READ, kind, str(self.proc), *more]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment(), timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def parts(tmp_path: Path, request: pytest.FixtureRequest) -> Parts:
    if "nvml" not in request.fixturenames:
        with contextlib.suppress(OSError):
            ctypes.CDLL("libnvidia-ml.so.1")
            pytest.skip("NVML is here, and can't be taken away")
    return Parts(tmp_path)


@pytest.fixture
def nvml(parts: Parts) -> Callable[[str], None]:
    """Build a ``libnvidia-ml.so.1`` out of C and put it on the loader's path."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")

    def build(source: str) -> None:
        folder = parts.place / "driver"
        folder.mkdir()
        (folder / "nvml.c").write_text(source)
        command = [compiler, "-shared", "-fPIC", "-o", str(folder / "libnvidia-ml.so.1"), str(folder / "nvml.c")]
        subprocess.run(command, check=True, timeout=60)
        parts.variables["LD_LIBRARY_PATH"] = str(folder)

    return build
