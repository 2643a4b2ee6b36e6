#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What holding the machine against the matrix costs: in ``apply``, and in the overlay where it finds no driver or one.

``python benchmarks/machine_cost.py [--rounds 21] [--library FILE] [--markdown]``. Each measure is taken in a fresh
process, in random order in each round; shown are medians and quartiles of the CPU time of that process alone: where a
driver is loaded, ``apply`` starts others that ask it, which are not in these numbers. "Again" is the same call a second
time, when its imports are done.

For the overlay the files of a driver for two H200 are laid out, with a torch 2.11.0+cu130 that nobody could import. Its
library is a stand-in of the size of the real one (33 MB, 1 MB of constants with the list of GPU code among them);
``--library`` takes a real ``libtorch_python.so``. Files are in the page cache.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from measuring import ROOT, interleaved, laid_out, place, quiet_environment

from megatron_fixes.machine import driver_files

LIST = b"sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"
LIBRARY_BYTES, CONSTANTS_BYTES = 33_000_000, 1_000_000
TIMED = """
import sys, time
def once():
    began = time.process_time()
    call()
    return time.process_time() - began
first = once()
print(once() if sys.argv[1] == "again" else first)
"""
# As ``apply`` and the overlay are when they get there: the catalogue is loaded, and the overlay imported.
IN_APPLY = """
from megatron_fixes import catalog
from megatron_fixes.cli import apply, machine
from megatron_fixes.patching import target
matrix = catalog.load(compiled=True).matrix
def call():
    machine.before_apply("0.16.1", matrix, "", force=False, dry_run=True)
"""
IN_OVERLAY = """
import sys
from megatron_fixes.overlay import hardware, process
hardware.PROC = sys.argv[2]
def call():
    assert hardware.refusals() == []
"""


def library() -> bytes:
    """A 64-bit ELF file as large as torch's, with the list in the middle of its constants."""
    constants = (
        b"\0" + LIST.join([b"a constant\0" * (CONSTANTS_BYTES // 22), b"\0"]) + b"text\0" * (CONSTANTS_BYTES // 10)
    )
    names = b"\0.shstrtab\0.rodata\0"
    names_at = 64 + len(constants)
    table_at = LIBRARY_BYTES
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, table_at, 0, 64, 0, 0, 64, 3, 1)
    sections = [(0, 0, 0, 0), (1, 3, names_at, len(names)), (11, 1, 64, len(constants))]
    rows = b"".join(struct.pack("<IIQQQQIIQQ", n, k, 0, 0, at, size, 0, 0, 1, 0) for n, k, at, size in sections)
    return (head + constants + names).ljust(LIBRARY_BYTES, b"\0") + rows


def lay_out(folder: Path, real: Path | None) -> None:
    """The driver's files in ``proc``, torch in ``site``."""
    proc, torch = folder / "proc", folder / "site" / "torch"
    for number in range(2):
        gpu = proc / "gpus" / f"0000:{number:02x}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text("Model: \t\t NVIDIA H200\n")
    (proc / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue Jul  8 2025\n")
    (torch / "lib").mkdir(parents=True)
    (torch / "__init__.py").write_text("raise SystemExit('imported')\n")
    (torch / "version.py").write_text("__version__ = '2.11.0+cu130'\ncuda = '13.0'\nhip = None\n")
    if real is None:
        (torch / "lib" / "libtorch_python.so").write_bytes(library())
    else:
        shutil.copyfile(real, torch / "lib" / "libtorch_python.so")


def seconds(code: str, folder: Path, when: str, proc: str, _: int) -> float:
    """CPU seconds of a call in a fresh process."""
    path = [str(folder / "site"), str(ROOT)] if code is IN_OVERLAY else [str(ROOT)]
    environment = {**quiet_environment(), "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-c", code + TIMED, when, proc]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"got exit code {done.returncode}: {done.stderr}")
    return float(done.stdout)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="what holding the machine against the matrix costs")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--library", type=Path, help="a real libtorch_python.so")
    parser.add_argument("--markdown", action="store_true", help="a table for the docs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megatron-fixes-") as scratch:
        folder = Path(scratch)
        lay_out(folder, options.library)
        none, there = str(folder / "none"), str(folder / "proc")
        taken = interleaved(
            {
                "apply, imports included": partial(seconds, IN_APPLY, folder, "first", none),
                "apply, again": partial(seconds, IN_APPLY, folder, "again", none),
                "overlay, no driver": partial(seconds, IN_OVERLAY, folder, "first", none),
                "overlay, no driver, again": partial(seconds, IN_OVERLAY, folder, "again", none),
                "overlay, a driver's files, imports included": partial(seconds, IN_OVERLAY, folder, "first", there),
                "overlay, a driver's files, again": partial(seconds, IN_OVERLAY, folder, "again", there),
            },
            options.rounds,
            said=False,
        )
    rows: list[tuple[str, ...]] = [("holding the machine against the matrix", "CPU time, ms", "quartiles")]
    for name, times in taken.items():
        low, middle, high = (quarter * 1e3 for quarter in statistics.quantiles(times, n=4))
        rows.append((name, f"{middle:.2f}", f"{low:.2f} to {high:.2f}"))
    driver = driver_files.version() or "none"
    print(f"{', '.join(place().values())}; driver: {driver}; {options.rounds} rounds\n")
    print(laid_out(rows, options.markdown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
