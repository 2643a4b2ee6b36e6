# SPDX-License-Identifier: Apache-2.0
"""A command that a signal ends half-way: the tree is as it was, and the exit code says which signal."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .. import synthetic
from ..synthetic import IDS, edited, patched

Cli = Callable[..., Any]
# Signals itself when one of the two files is replaced and, where asked, once more while that is undone.
PROGRAM = """
import os, signal, sys
from megatron_fixes.cli.main import main
from megatron_fixes.patching import transaction
place, back, number, again = transaction.put_in_place, transaction._put_back, int(sys.argv[1]), sys.argv[2] == "again"
def once(*arguments):
    place(*arguments)
    transaction.put_in_place = place
    os.kill(os.getpid(), number)
def undo(*arguments):
    if again:
        os.kill(os.getpid(), signal.SIGTERM)
    back(*arguments)
transaction.put_in_place, transaction._put_back = once, undo
sys.exit(main(sys.argv[3:]))
"""

ENDINGS = [
    (signal.SIGINT, "once"),
    (signal.SIGTERM, "once"),
    (signal.SIGHUP, "once"),
    (signal.SIGTERM, "again"),
    (signal.SIGHUP, "again"),
]


@pytest.mark.parametrize("command", ["apply", "revert"])
@pytest.mark.parametrize(("number", "again"), ENDINGS)
def test_a_command_that_is_ended_half_way_undoes_it(
    command: str, number: signal.Signals, again: str, process: Cli, distribution: Path, tmp_path: Path, contents: Any
) -> None:
    tree = synthetic.write_tree(tmp_path / "tree")
    if command == "revert":
        assert process("apply", tree, root=distribution).code == 0
    before = contents(tree)
    done = process(int(number), again, command, tree, root=distribution, program=["-c", PROGRAM])
    assert done.code == 128 + number
    assert contents(tree) == before
    said = f"ended by {number.name}; what the tree holds now, `megatron-fixes scan` says"
    assert (done.out, done.err.strip()) == ("", said)


def test_a_hangup_that_nohup_ignores_stays_ignored(process: Cli, distribution: Path, tmp_path: Path) -> None:
    tree = synthetic.write_tree(tmp_path / "tree")
    ignoring = f"import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n{PROGRAM}"
    done = process(int(signal.SIGHUP), "once", "apply", tree, root=distribution, program=["-c", ignoring])
    assert done.code == 0
    assert edited(tree) == patched(*IDS)
