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
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import environment_with_wheel, interleaved, median_ms, place, quiet_environment, timed

from megatron_fixes.catalog.data import matrix_path
from megatron_fixes.catalog.matrix import load_matrix
from megatron_fixes.proofs.releases import fetch

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


def timed_import(python: Path, tree: Path, cache: Path, *, on: bool) -> float:
    """Seconds that the import of megatron.core.distributed takes in a fresh process."""
    environment = {**quiet_environment(), "PYTHONPATH": str(tree), "MEGATRON_FIXES_CACHE": str(cache)}
    environment["MEGATRON_FIXES"] = "all" if on else ""
    done = subprocess.run([python, "-c", IMPORT], env=environment, capture_output=True, text=True, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    if bool(report["in_force"]) != on:
        sys.exit(f"got fixes in force: {report['in_force']}, expected {'some' if on else 'none'}")
    return float(report["seconds"])


def row(name: str, times: list[float], against: list[float]) -> str:
    """One line of the table, in milliseconds: median, and the median of the differences round by round."""
    extra = statistics.median(a - b for a, b in zip(times, against, strict=True)) * 1e3
    return f"| {name} | {median_ms(times):.1f} | {extra:+.2f} |"


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
        imports = interleaved(
            {
                "plain": lambda _: timed_import(python, tree, warm, on=False),
                "overlay, warm": lambda _: timed_import(python, tree, warm, on=True),
                "overlay, cold": lambda number: timed_import(python, tree, folder / f"cold{number}", on=True),
            },
            options.rounds,
        )
        aside = pth.with_suffix(".aside")

        def without_pth(_: int) -> float:
            pth.rename(aside)
            try:
                return timed([python, "-c", "pass"], quiet_environment())
            finally:
                aside.rename(pth)

        starts = interleaved(
            {
                "without the .pth": without_pth,
                "with the .pth, off": lambda _: timed([python, "-c", "pass"], quiet_environment()),
            },
            options.rounds * 10,
            said=False,
        )
    here = place()
    print(f"\nmegatron-core {options.release}; {', '.join(here.values())}; {options.rounds} rounds\n")
    print("| import of megatron.core.distributed | ms, median | more than plain |\n|---|---|---|")
    for name, times in imports.items():
        print(row(name, times, imports["plain"]))
    print("\n| start of an interpreter | ms, median | more |\n|---|---|---|")
    for name, times in starts.items():
        print(row(name, times, starts["without the .pth"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
