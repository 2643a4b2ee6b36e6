#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the checks that a release needs, on a clean work tree, and writes what they showed: ``build/evidence/``.

A file a check: ``lint.json`` (with the workflows), ``tests.json`` (with the proofs), ``matrix.json``. Each names the
tree that it is about; ``scripts/release_dist.py`` asks them. The checks are the Makefile's, all of them and as a whole.
A tree that changes while a check runs gives red.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import program
from release_rules import CHECKS, Check, CheckName
from repository import git, require_clean

from megatron_fixes.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "evidence"
TARGETS: dict[str, tuple[str, ...]] = {
    "lint": ("lint", "workflows"),
    "tests": ("fetch", "pytest"),
    "matrix": ("matrix",),
}


def clean_tree(root: Path) -> tuple[str, str]:
    """The commit and the hash of its tree.

    Raises:
        RefusedError: The work tree is not clean, so a check would be about something else.
    """
    require_clean(root, "Commit them, or run the checks in a clone of its own.")
    commit, tree = git(root, "log", "-1", "--format=%H %T").split()
    return commit, tree


def counted(report: Path) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """Read pytest's report: passed by folder below ``tests``, skipped by reason, and the names of what failed."""
    passed: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    failed = []
    # Written by our own pytest a moment ago.
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        where = case.get("classname", "").split(".")
        kinds = {outcome.tag: outcome.get("message", "") for outcome in case}
        if "failure" in kinds or "error" in kinds:
            failed.append(f"{'.'.join(where)}::{case.get('name')}")
        elif "skipped" in kinds:
            skipped[kinds["skipped"]] += 1
        else:
            passed[where[1] if len(where) > 1 else where[0]] += 1
    return dict(sorted(passed.items())), dict(sorted(skipped.items())), failed


def run(name: CheckName, variables: Sequence[str]) -> Check:
    """Run one check and say what it showed."""
    commit, tree = clean_tree(ROOT)
    report = FOLDER / "pytest.xml"
    report.unlink(missing_ok=True)
    command = ["make", *TARGETS[name]]
    for_pytest = f"--junitxml={report} -o junit_family=xunit2" if name == "tests" else ""
    began = time.monotonic()
    code = subprocess.run([*command, *variables, f"ARGS={for_pytest}"], cwd=ROOT, env=settled(), check=False).returncode
    seconds = round(time.monotonic() - began, 1)
    said = "" if code == 0 else f"{' '.join(command)} ended with {code}"
    passed, skipped, failed = counted(report) if report.is_file() else ({}, {}, [])
    if failed:
        said += f": {', '.join(failed[:3])}" + (f" and {len(failed) - 3} more" if failed[3:] else "")
    try:
        if clean_tree(ROOT) != (commit, tree):
            said = said or "another commit was checked out meanwhile"
    except RefusedError as error:
        said = said or f"the check changed the work tree: {error.message}"
    return Check(
        name=name,
        outcome="red" if said else "green",
        tree=tree,
        commit=commit,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        seconds=seconds,
        machine=f"{os.cpu_count()} {platform.machine()} cores, {platform.system()}, Python {platform.python_version()}",
        command=" ".join(command),
        passed=passed,
        skipped=skipped,
        said=said,
    )


def settled() -> dict[str, str]:
    """The environment for the checks: without what would narrow or steer them, or belong to a make outside."""
    steering = {"PYTEST_ADDOPTS", "ARGS", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "CHECKS", "VERSION"}
    steering |= {"DIST", "KEY", "PUBLIC_KEY", "UNSIGNED", "AGAINST"}
    return {name: value for name, value in os.environ.items() if name not in steering}


@program.tells_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Read the arguments, run the checks, and write a file for each."""
    parser = program.parser(__doc__)
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"{', '.join(CHECKS)} (default: all)")
    parser.add_argument("--bin", help="folder of a ready environment, handed on to make as BIN")
    parser.add_argument("--workers", help="handed on to make as WORKERS")
    given = parser.parse_args(arguments)
    if odd := sorted(set(given.checks) - set(CHECKS)):
        parser.error(f"got the check {odd[0]!r}, expected some of {', '.join(CHECKS)}")
    variables = [f"BIN={given.bin}"] if given.bin else []
    variables += [f"WORKERS={given.workers}"] if given.workers else []
    FOLDER.mkdir(parents=True, exist_ok=True)
    checks = []
    for name in (name for name in CHECKS if name in (given.checks or CHECKS)):
        place = FOLDER / f"{name}.json"
        place.unlink(missing_ok=True)
        check = run(name, variables)
        place.write_bytes(msgspec.json.format(msgspec.json.encode(check), indent=1) + b"\n")
        checks.append(check)
    for check in checks:
        tests = f", {sum(check.passed.values())} tests passed" if check.passed else ""
        print(f"evidence: {check.name} {check.outcome} in {check.seconds:.0f} s{tests} {check.said}".rstrip())
    return 0 if all(check.outcome == "green" for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
