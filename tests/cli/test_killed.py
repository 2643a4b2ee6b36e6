# SPDX-License-Identifier: Apache-2.0
"""Commands killed at every system call that changed a file, over fixes that edit two files; then the next command.

Whichever command is next, the tree is finished or undone by it, and no byte is lost. The real fixes and real processes
take the same way: that is compared, state by state.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fixes.cli.main import main

from .. import synthetic
from ..synthetic import FIRST, IDS, SECOND, edited, patched
from ..system_calls import looks, survives, sweep, trace

Cli = Callable[..., Any]
OLD, NEW = patched(), patched(*IDS)


pytestmark = pytest.mark.usefixtures("synthetic_fixes")


def half(command: str) -> Callable[[Path], None]:
    """Kill a command when one file is done and the other is not."""

    def stop(tree: Path) -> None:
        if command == "revert":
            assert main(["apply", str(tree)]) == 0
        for deadly in range(1000):
            assert not survives(lambda: main([command, str(tree)]), tree, deadly)
            if edited(tree) not in (OLD, NEW):
                return
            assert main(["apply" if command == "revert" else "revert", str(tree)]) == 0

    return stop


# Name to what comes before, the command that is killed, and what the two files may hold then.
RUNS: dict[str, tuple[Callable[[Path], object], str, tuple[dict[str, bytes], ...]]] = {
    "apply": (lambda tree: None, "apply", (OLD, NEW)),
    "stacked apply": (lambda tree: main(["apply", str(tree), "--only", "MF9002"]), "apply", (patched("MF9002"), NEW)),
    "revert": (lambda tree: main(["apply", str(tree)]), "revert", (NEW, OLD)),
    "apply that mends an apply": (half("apply"), "apply", (OLD, NEW)),
    "revert that mends an apply": (half("apply"), "revert", (OLD, NEW)),
    "apply that mends a revert": (half("revert"), "apply", (OLD, NEW)),
}


@pytest.mark.parametrize("run", RUNS)
def test_the_next_command_finishes_or_undoes(run: str, cli: Cli, tmp_path: Path, contents: Any) -> None:
    prepare, command, may_hold = RUNS[run]
    pristine = synthetic.write_tree(tmp_path / "pristine")
    before = contents(pristine)
    prepare(pristine)
    mixed = count = 0
    for count, tree in enumerate(sweep(pristine, lambda tree: main([command, str(tree)]), tmp_path), 1):  # noqa: B007
        found = contents(tree)
        for path in (FIRST, SECOND):
            assert found[path] in [bytes_[path] for bytes_ in may_hold]
        mixed += edited(tree) not in may_hold
        done = cli("scan", tree)
        assert done.code == 0
        assert edited(tree) in may_hold or "was cut short" in done.out
        assert contents(tree) == found
        other = tree.with_name("other")
        shutil.copytree(tree, other)
        assert cli("apply", other).code == 0
        assert edited(other) == NEW
        assert {fix["verdict"] for fix in cli("scan", other, "--json").json["fixes"]} == {"applied"}
        for one in (other, tree):
            assert cli("revert", one).code == 0
            assert contents(one) == before
    assert count > 15
    assert mixed > 0


def test_a_process_of_its_own_goes_through_the_same_states(distribution: Path, tmp_path: Path, contents: Any) -> None:
    def states(action: Callable[[Path], object], tree: Path) -> list[dict[str, bytes]]:
        seen, found = looks(tree), [contents(tree)]

        def go_on() -> bool:
            nonlocal seen
            if (now := looks(tree)) != seen:
                seen = now
                found.append(contents(tree))
            return True

        assert trace(lambda: action(tree), go_on)
        return found

    def start(tree: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(distribution), "PYTHONDONTWRITEBYTECODE": "1"}
        os.chdir(distribution)
        os.execve(sys.executable, [sys.executable, "-m", "megatron_fixes", "apply", str(tree)], environment)

    forked = states(lambda tree: main(["apply", str(tree)]), synthetic.write_tree(tmp_path / "a" / "tree"))
    assert len(forked) > 20
    assert states(start, synthetic.write_tree(tmp_path / "b" / "tree")) == forked


def test_check_fails_while_an_end_is_open_though_all_fixes_are_in(
    cli: Cli, process: Cli, distribution: Path, tmp_path: Path
) -> None:
    tree = synthetic.write_tree(tmp_path / "tree")
    killed = (
        "import os, sys\nfrom megatron_fixes.cli.main import main\nfrom megatron_fixes.patching.store import Store\n"
        "Store.publish = lambda self: os._exit(9)\nmain(sys.argv[1:])\n"
    )
    assert process("apply", tree, root=distribution, program=["-c", killed]).code == 9
    assert edited(tree) == NEW
    assert cli("scan", tree).code == 0
    assert cli("scan", tree, "--check").code == 1
    assert cli("apply", tree).code == 0
    assert cli("scan", tree, "--check").code == 0


def test_a_journal_that_is_no_journal_is_said_once(cli: Cli, tmp_path: Path) -> None:
    tree = synthetic.write_tree(tmp_path / "tree")
    assert cli("apply", tree).code == 0
    (tree / ".megatron-fixes" / "journal.json").write_text("{")
    done = cli("scan", tree, "--check")
    assert done.code == 1
    (line,) = [line for line in done.out.splitlines() if "the journal can't be read" in line]
    assert (
        line.startswith("the journal can't be read: got something else than a journal (")
        and line.count("can't be read") == 1
    )
