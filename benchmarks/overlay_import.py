#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the overlay costs: at interpreter start while it is off, and at the import of megatron.core.distributed when on.

``python benchmarks/overlay_import.py [--release 0.16.1] [--rounds 15]`` builds the wheel, installs it into a virtual
environment of its own, and runs the variants in random order in each round, each in a fresh process; printed are
medians and their differences to the plain import of the same rounds. Needs torch in the environment that runs it.
What is timed is the import of Megatron alone, after torch; files are in the page cache and bytecode is compiled (a
round that is thrown away sees to that), as on the second start of a job.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from datetime import datetime, timezone
from pathlib import Path

from megatron_fixes.catalog.data import matrix_path
from megatron_fixes.catalog.matrix import load_matrix
from megatron_fixes.proofs.releases import fetch

ROOT = Path(__file__).resolve().parent.parent
IMPORT = """
import json, time, warnings
warnings.simplefilter("ignore")
from megatron_fixes.proofs import shim
shim.install()
began = time.perf_counter()
import megatron.core.distributed
took = time.perf_counter() - began
import megatron_fixes.overlay
status = megatron_fixes.overlay.status()
print(json.dumps({"seconds": took, "in_force": status.in_force, "cache": status.cache.state}))
"""


def environment_with_wheel(folder: Path) -> tuple[Path, Path]:
    """A virtual environment with the wheel, and this environment's packages within reach; its python and its .pth."""
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "*.egg-info"))
    (folder / "wheel").mkdir()
    subprocess.run([sys.executable, "-c", build, folder / "wheel"], cwd=tree, check=True, capture_output=True)
    (wheel,) = (folder / "wheel").iterdir()
    venv.create(folder / "venv", symlinks=True)
    python = folder / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(pip, check=True, capture_output=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "base.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python, site / "megatron-fixes.pth"


def timed_import(python: Path, tree: Path, cache: Path, *, on: bool) -> float:
    """Seconds that the import of megatron.core.distributed takes in a fresh process."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "MEGATRON_FIXES_CACHE": str(cache)}
    environment["MEGATRON_FIXES"] = "all" if on else ""
    done = subprocess.run([python, "-c", IMPORT], env=environment, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    if bool(report["in_force"]) != on:
        sys.exit(f"got fixes in force: {report['in_force']}, expected {'some' if on else 'none'}")
    return float(report["seconds"])


def timed_start(python: Path) -> float:
    """Seconds that an interpreter takes which does nothing, with the overlay off."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MEGATRON_FIXES")}
    began = time.perf_counter()
    subprocess.run([python, "-c", "pass"], env=environment, check=True)
    return time.perf_counter() - began


def row(name: str, times: list[float], against: list[float]) -> str:
    """One line of the table, in milliseconds: median, and the median of the differences round by round."""
    median = statistics.median(times) * 1e3
    extra = statistics.median(a - b for a, b in zip(times, against, strict=True)) * 1e3
    return f"| {name} | {median:.1f} | {extra:+.2f} |"


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description="what the overlay costs at import")
    parser.add_argument("--release", default="0.16.1")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    tree = fetch(options.release, load_matrix(matrix_path()))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        python, pth = environment_with_wheel(folder)
        warm = folder / "warm"
        imports: dict[str, list[float]] = {"plain": [], "overlay, warm": [], "overlay, cold": []}
        starts: dict[str, list[float]] = {"without the .pth": [], "with the .pth, off": []}
        for number in range(options.rounds + 1):
            caches = {"plain": warm, "overlay, warm": warm, "overlay, cold": folder / f"cold{number}"}
            for name in random.sample(list(caches), len(caches)):
                seconds = timed_import(python, tree, caches[name], on=name != "plain")
                if number:
                    imports[name].append(seconds)
            print(f"round {number} of {options.rounds}", file=sys.stderr)
        aside = pth.with_suffix(".aside")
        for _ in range(options.rounds * 10):
            pth.rename(aside)
            starts["without the .pth"].append(timed_start(python))
            aside.rename(pth)
            starts["with the .pth, off"].append(timed_start(python))
    today = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    print(f"\nmegatron-core {options.release}; {machine}; {today}; {options.rounds} rounds\n")
    print("| import of megatron.core.distributed | ms, median | more than plain |\n|---|---|---|")
    for name, times in imports.items():
        print(row(name, times, imports["plain"]))
    print("\n| start of an interpreter | ms, median | more |\n|---|---|---|")
    for name, times in starts.items():
        print(row(name, times, starts["without the .pth"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
