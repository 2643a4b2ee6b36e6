# SPDX-License-Identifier: Apache-2.0
"""Runs ``drills.py`` over a tree in a process of its own, once for all tests that look at the same run."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron_fixes.catalog.data import matrix_path
from megatron_fixes.catalog.matrix import load_matrix
from megatron_fixes.proofs.releases import fetch

ROOT = Path(__file__).resolve().parents[2]
# One of each line.
RELEASES = ("0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")


def tree_of(release: str) -> Path:
    """The unpacked files of a release, to be read only."""
    return fetch(release, load_matrix(matrix_path()))


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A Python with this package and none of our variables but those given."""
    environment = {name: value for name, value in os.environ.items() if name != "MEGATRON_FIXES_SAID"}
    for name in ("MEGATRON_FIXES", "MEGATRON_FIXES_STRICT", "MEGATRON_GUARDS", "MEGATRON_GUARDS_DEADLINE_S"):
        environment.pop(name, None)
    # What was in reach stays so: some machines have their packages there.
    path = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    environment.update({"PYTHONPATH": path, **variables})
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=280
    )


@functools.cache
def drilled(tree: Path, drills: tuple[str, ...], fixes: str = "", backend: str = "gloo") -> dict[str, Any]:
    """What the drills found over a tree, with the overlay's fixes on."""
    done = python("tests/guards/drills.py", str(tree), backend, *drills, MEGATRON_FIXES=fixes)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def named(rank: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The events of a rank that have a name, each with its message."""
    return [{**fields, "message": message} for event, message, fields in rank["events"] if event == name]
