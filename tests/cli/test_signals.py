# SPDX-License-Identifier: Apache-2.0
"""A command that a signal ends half-way: the tree is as it was, and the exit code says which signal.

Ctrl-C while modules are imported is sent at the import of a given number, so that it hits the same place whatever the
machine is at; and it is sent by the program itself, so only once a line of ours has run.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .. import synthetic
from ..synthetic import IDS, edited, patched

Cli = Callable[..., Any]
# Signals itself when one of the two files is replaced and, where asked, with all three while that is undone.
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
        for more in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), more)
    back(*arguments)
transaction.put_in_place, transaction._put_back = once, undo
sys.exit(main(sys.argv[3:]))
"""

ENDINGS = [
    (signal.SIGINT, "once"),
    (signal.SIGTERM, "once"),
    (signal.SIGHUP, "once"),
    (signal.SIGINT, "again"),
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


# As the installed command, but for a SIGINT at the import of a given number, counted from the entry on.
IMPORTING = """
import os, signal, sys
from megatron_fixes.__main__ import main
left = int(sys.argv.pop(1))
def count(event, arguments):
    global left
    left -= event == "import"
    if event == "import" and left == 0:
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(count)
code = main()
print(left, file=sys.stderr)
sys.exit(code)
"""


def test_ctrl_c_while_modules_are_imported_shows_no_traceback(process: Cli) -> None:
    def at(number: int) -> Any:
        return process(number, "list", program=["-c", IMPORTING])

    whole = at(1_000_000)
    count = 1_000_000 - int(whole.err)
    assert whole.code == 0 and count > 100
    before_the_work = 0
    for number in [1, 2, 3, *range(4, count, count // 10)]:
        done = at(number)
        # Python makes it a death by the signal where the exception went through generated code.
        assert done.code in (130, -signal.SIGINT) and done.out == "", (number, done)
        assert "Traceback" not in done.err and "File" not in done.err, (number, done.err)
        before_the_work += done.err == "ended by SIGINT\n"
    assert before_the_work > 3


def test_ctrl_c_at_the_exit_shows_no_traceback(process: Cli) -> None:
    late = f"import atexit, os\natexit.register(lambda: os.kill(os.getpid(), {int(signal.SIGINT)}))\n{IMPORTING}"
    done = process(0, "--version", program=["-c", late])
    assert done.code == 130 and "Traceback" not in done.err
    assert done.out.startswith("megatron-fixes, version ")


def test_what_runs_in_the_background_goes_on_ignoring_ctrl_c(process: Cli) -> None:
    ignoring = f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{IMPORTING}"
    assert process(20, "--version", program=["-c", ignoring]).code == 0
