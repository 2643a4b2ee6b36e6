# SPDX-License-Identifier: Apache-2.0
"""Several processes on one tree at the same time: one wins or they come one after the other, and no byte is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .. import synthetic
from ..synthetic import FIRST, IDS, edited, patched

Cli = Callable[..., Any]
OLD, NEW = patched(), patched(*IDS)
# Imports what a command needs, then waits for the others.
WAITING = (
    "import sys\nfrom megatron_fixes.cli import apply, revert\nfrom megatron_fixes.cli.main import main\n"
    "from megatron_fixes.patching import plan, target, transaction\n"
    "print('ready', flush=True)\nsys.stdin.read()\nsys.exit(main(sys.argv[1:]))\n"
)


pytestmark = pytest.mark.usefixtures("synthetic_fixes")


def at_once(distribution: Path, tree: Path, *commands: str) -> list[tuple[int, str, str]]:
    """Start commands, let them go together, and return how each ended."""
    environment = {**os.environ, "PYTHONPATH": str(distribution)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WAITING, command, tree], env=environment, cwd=distribution, text=True, **pipes
        )
        for command in commands
    ]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None  # communicate would flush it
    ended = [process.communicate(timeout=60) for process in processes]
    return [(process.returncode, *texts) for process, texts in zip(processes, ended, strict=True)]


def says_what_to_do(error: str) -> bool:
    return "  hint: Repeat " in error or "  hint: wait until it has ended, then repeat" in error


def test_of_two_applies_one_wins_and_the_other_is_told_what_to_do(
    distribution: Path, cli: Cli, tmp_path: Path, contents: Any
) -> None:
    for number in range(20):
        tree = synthetic.write_tree(tmp_path / str(number))
        before = contents(tree)
        ended = at_once(distribution, tree, "apply", "apply")
        assert 0 in [code for code, _, _ in ended], ended
        for code, out, err in ended:
            if code:
                assert (code, out) == (1, "") and says_what_to_do(err), err
        assert edited(tree) == NEW
        assert cli("revert", tree, "--json").json["reverted"] == list(IDS)
        assert contents(tree) == before


def test_an_apply_and_a_revert_leave_one_of_both_states(
    distribution: Path, cli: Cli, tmp_path: Path, contents: Any
) -> None:
    for number in range(10):
        tree = synthetic.write_tree(tmp_path / str(number))
        before = contents(tree)
        assert cli("apply", tree, "--only", "MF9001").code == 0
        for code, _, err in at_once(distribution, tree, "apply", "revert"):
            assert code == 0 or says_what_to_do(err), err
        assert edited(tree) in (OLD, NEW)
        assert cli("revert", tree).code == 0
        assert contents(tree) == before


def test_files_that_change_while_they_are_judged_are_not_called_drifted(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another apply renames its two files one after the other; who reads in between sees half of a fix."""
    from megatron_fixes.patching import plan

    tree = synthetic.write_tree(tmp_path / "tree")
    real = plan.read_files

    def read_and_rename(*arguments: Any) -> dict[str, bytes]:
        found = {**real(*arguments), FIRST: NEW[FIRST]}
        for path, content in NEW.items():
            (tree / path).write_bytes(content)
        monkeypatch.setattr(plan, "read_files", real)
        return found

    monkeypatch.setattr(plan, "read_files", read_and_rename)
    done = cli("apply", tree)
    assert done.code == 1 and "files that changed while they were read" in done.err and says_what_to_do(done.err)
    assert cli("apply", tree).code == 0
