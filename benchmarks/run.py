#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the commands cost, beside the plain tool that does the like; and how many proofs a minute holds.

``python benchmarks/run.py [--release 0.16.1] [--rounds 21] [--without-proofs] [--json | --markdown]``

- ``megatron-fixes --help`` beside ``python -c pass``, from the wheel in an environment of its own.
- ``scan`` of a fresh git checkout beside ``git apply --check`` of the release's series, and ``apply`` beside
  ``git apply``, one git process a patch, as the README of the patches says. A patch that is made on others can't be
  checked on the checkout as it is; so each patch is checked where it applies, on a checkout that holds those before it.
- The planning and the writing of an apply alone, in process: all imported, the catalogue loaded, nothing read yet. The
  writing waits for the disk (fsync).
- ``prove --release`` on all variants: proofs, and the cases that they consist of, by the whole time.

Each round takes each measure once, in random order and from a checkout of its own; what is divided are the times of one
round. Shown are medians. Files are in the page cache, and bytecode is compiled. Needs git, and torch for the proofs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import environment_with_wheel, interleaved, laid_out, median_ms, place, quiet_environment, timed

from megatron_fixes import catalog
from megatron_fixes.catalog.data import with_this_package
from megatron_fixes.catalog.series import PatchFile
from megatron_fixes.patching import scan
from megatron_fixes.patching.plan import make_plan
from megatron_fixes.patching.target import find_target
from megatron_fixes.patching.transaction import commit
from megatron_fixes.proofs.releases import fetch

TARGET_MS = 50.0
Measure = Callable[[int], float]
# Name to that beside which it stands.
BESIDE = {
    "megatron-fixes --help": "python -c pass",
    "megatron-fixes scan CHECKOUT": "git apply --check, each patch",
    "megatron-fixes apply CHECKOUT": "git apply, each patch",
}
PLAN, WRITE, BOTH = "planning, in process", "writing, in process", "planning and writing, in process"


class Checkouts:
    """Fresh git checkouts of a release.

    Args:
        tree: The unpacked release.
        folder: Where they are made.
    """

    def __init__(self, tree: Path, folder: Path) -> None:
        self.folder = folder
        self.pristine = folder / "pristine"
        self.made = 0
        shutil.copytree(tree, self.pristine, ignore=shutil.ignore_patterns("__pycache__"))
        self.git(self.pristine, "init", "--quiet")
        self.git(self.pristine, "add", "--all")
        self.git(self.pristine, "-c", "user.name=b", "-c", "user.email=b@example.invalid", "commit", "-qm", "release")

    @staticmethod
    def git(where: Path, *words: str | Path) -> None:
        """Run git; what goes wrong is raised."""
        subprocess.run(["git", "-C", where, *words], check=True, capture_output=True)

    def fresh(self) -> Path:
        """Make one."""
        self.made += 1
        checkout = self.folder / f"checkout{self.made}"
        self.git(self.folder, "clone", "--quiet", "--local", self.pristine, checkout)
        return checkout

    def used(self, use: Callable[[Path], float]) -> float:
        """Give a fresh one to a function, and remove it."""
        checkout = self.fresh()
        try:
            return use(checkout)
        finally:
            shutil.rmtree(checkout)


def measures(python: Path, checkouts: Checkouts, patches: list[PatchFile], release: str) -> dict[str, Measure]:
    """The measures of commands, by name; each is given the number of the round and returns seconds."""
    environment = quiet_environment()
    command = python.parent / "megatron-fixes"

    def git_check(checkout: Path) -> float:
        took = 0.0
        for patch in patches:
            took += timed(["git", "-C", checkout, "apply", "--check", patch.path], environment)
            checkouts.git(checkout, "apply", patch.path)
        return took

    def git_apply(checkout: Path) -> float:
        return sum(timed(["git", "-C", checkout, "apply", patch.path], environment) for patch in patches)

    def ours(name: str) -> Callable[[Path], float]:
        return lambda checkout: timed([command, name, checkout], environment)

    return {
        "megatron-fixes --help": lambda _: timed([command, "--help"], environment),
        "python -c pass": lambda _: timed([python, "-c", "pass"], environment),
        "megatron-fixes scan CHECKOUT": lambda _: checkouts.used(ours("scan")),
        "git apply --check, each patch": lambda _: checkouts.used(git_check),
        "megatron-fixes apply CHECKOUT": lambda _: checkouts.used(ours("apply")),
        "git apply, each patch": lambda _: checkouts.used(git_apply),
    }


def in_process(checkouts: Checkouts, known: catalog.Catalog, fix_ids: tuple[str, ...]) -> tuple[float, float]:
    """Seconds of planning and of writing an apply of these fixes to a fresh checkout."""
    taken: list[float] = []

    def use(checkout: Path) -> float:
        target = find_target(checkout)
        scan._prints.cache_clear()
        began = time.perf_counter()
        plan = make_plan(target, known, fix_ids)
        planned = time.perf_counter()
        done = commit(target, plan.changes, plan.fixes, release=target.release)
        taken.extend([planned - began, time.perf_counter() - planned])
        if set(done.fixes) != set(fix_ids):
            sys.exit(f"got {', '.join(done.fixes)} applied, expected {', '.join(fix_ids)}")
        return 0.0

    checkouts.used(use)
    return taken[0], taken[1]


def proofs(release: str) -> dict[str, Any]:
    """Prove a release on all variants, as a process; how many proofs and cases a minute holds."""
    command = [sys.executable, "-m", "megatron_fixes", "prove", "--release", release, "--json"]
    began = time.perf_counter()
    done = subprocess.run(
        command, env=with_this_package(quiet_environment()), stdout=subprocess.PIPE, text=True, check=False
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"got exit code {done.returncode} of {' '.join(command)}")
    results = json.loads(done.stdout)["results"]
    cases = sum("ranks" in report for result in results for report in result["evidence"].values())
    minutes = seconds / 60
    return {
        "proofs": len(results),
        "cases": cases,
        "seconds": round(seconds, 1),
        "proofs_per_minute": round(len(results) / minutes, 1),
        "cases_per_minute": round(cases / minutes, 1),
    }


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Take all measures; plain values."""
    known = catalog.load()
    series = known.series[known.matrix.releases[options.release].line].patches
    patches = [patch for patch in series if options.release in patch.header.applies_to]
    # What apply leaves out without names is left out of git's part too.
    patches = [patch for patch in patches if patch.header.numerics != "gated"]
    fix_ids = tuple(patch.fix_id for patch in patches)
    planning: list[float] = []
    writing: list[float] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "checkouts").mkdir()
        python, _ = environment_with_wheel(folder)
        checkouts = Checkouts(fetch(options.release, known.matrix), folder / "checkouts")

        def both(number: int) -> float:
            plan_s, write_s = in_process(checkouts, known, fix_ids)
            if number:
                planning.append(plan_s)
                writing.append(write_s)
            return plan_s + write_s

        times = interleaved({**measures(python, checkouts, patches, options.release), BOTH: both}, options.rounds)
    ratios = {
        ours: statistics.median(a / b for a, b in zip(times[ours], times[theirs], strict=True))
        for ours, theirs in BESIDE.items()
    }
    return {
        **place(),
        "release": options.release,
        "fixes": list(fix_ids),
        "rounds": options.rounds,
        "commands": [
            {
                "command": ours,
                "ms": round(median_ms(times[ours]), 1),
                "beside": theirs,
                "beside_ms": round(median_ms(times[theirs]), 1),
                "ratio": round(ratios[ours], 2),
            }
            for ours, theirs in BESIDE.items()
        ],
        "in_process_ms": {
            name: round(median_ms(taken), 1)
            for name, taken in ((PLAN, planning), (WRITE, writing), (BOTH, times[BOTH]))
        },
        "target_ms": TARGET_MS,
        "proofs": None if options.without_proofs else proofs(options.release),
    }


def table(found: dict[str, Any], *, markdown: bool) -> str:
    """The values as tables, of Markdown or plain."""
    rows = [("command", "ms", "beside it", "ms", "times")]
    rows += [
        (row["command"], f"{row['ms']:.1f}", row["beside"], f"{row['beside_ms']:.1f}", f"{row['ratio']:.2f}")
        for row in found["commands"]
    ]
    goal = [("apply of the series", "ms", "target")]
    goal += [
        (name, f"{ms:.1f}", f"at most {found['target_ms']:.0f}" if name == BOTH else "")
        for name, ms in found["in_process_ms"].items()
    ]
    parts = [laid_out(rows, markdown), laid_out(goal, markdown)]
    if held := found["proofs"]:
        names = ("proofs", "cases", "seconds", "proofs a minute", "cases a minute")
        parts.append(laid_out([names, tuple(map(str, held.values()))], markdown))
    where = f"megatron-core {found['release']}, {', '.join(found['fixes'])}; {found['machine']}, "
    where += f"Python {found['python']}, torch {found['torch']}, git {found['git']}; {found['date']}; "
    where += f"medians of {found['rounds']} rounds"
    return "\n\n".join([where, *parts])


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="what the commands cost")
    parser.add_argument("--release", default="0.16.1")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--without-proofs", action="store_true", help="leave out what takes minutes and needs torch")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true")
    form.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    found = measured(options)
    print(json.dumps(found, indent=2) if options.json else table(found, markdown=options.markdown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
