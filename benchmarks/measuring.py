# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: the wheel in an environment of its own, rounds in random order, place and date, tables."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


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


def quiet_environment() -> dict[str, str]:
    """This process's environment without what would change what is measured."""
    changing = ("MEGATRON_FIXES", "PYTHON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(changing)}
    cache = os.environ.get("MEGATRON_FIXES_CACHE")
    return {**kept, **({"MEGATRON_FIXES_CACHE": cache} if cache else {})}


def interleaved(
    measures: Mapping[str, Callable[[int], float]], rounds: int, *, said: bool = True
) -> dict[str, list[float]]:
    """Take each measure once a round, in random order; the first round is thrown away.

    Args:
        measures: Name to a function that is given the number of the round and returns seconds.
        rounds: How many rounds count.
        said: Tell each round on stderr.
    """
    times: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(rounds + 1):
        for name in random.sample(list(measures), len(measures)):
            seconds = measures[name](number)
            if number:
                times[name].append(seconds)
        if said:
            print(f"round {number} of {rounds}", file=sys.stderr)
    return times


def timed(command: Sequence[str | Path], environment: Mapping[str, str]) -> float:
    """Seconds that a command takes, its output thrown away; ends the benchmark if it fails."""
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    took = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"got exit code {done.returncode} of {' '.join(map(str, command))}: {done.stderr.decode()}")
    return took


def median_ms(times: Sequence[float]) -> float:
    """The median of seconds, in milliseconds."""
    return statistics.median(times) * 1e3


def place() -> dict[str, str]:
    """Where and when this is measured: machine, versions, date."""
    torch = next((d.version for d in importlib.metadata.distributions(name="torch")), "none")
    asked = ["git", "--version"]
    git = (
        subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split() if shutil.which("git") else []
    )
    return {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, {platform.system()}",
        "python": platform.python_version(),
        "torch": torch,
        "git": git[2] if len(git) > 2 else "none",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
    }


def laid_out(rows: list[tuple[str, ...]], markdown: bool) -> str:
    """Rows, the first with the headers, as a table of Markdown or plain."""
    if markdown:
        lines = [f"| {' | '.join(row)} |" for row in rows]
        return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
