# SPDX-License-Identifier: Apache-2.0
"""``revert`` where a file was edited since: no edit is lost, and what is printed is a way out that works."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fixes.proofs.releases import fetch

from .conftest import BUFFER, CATALOG, IDS, IN_BUFFER, RELEASE, copy_files

Cli = Callable[..., Any]
# Two fixes or more, and no other file than the one that is edited.
BUFFER_ONLY = ("--only", ",".join(IN_BUFFER))
FIRST, LAST = (CATALOG.patch(fix_id, RELEASE) for fix_id in (IN_BUFFER[0], IN_BUFFER[-1]))
assert FIRST is not None and LAST is not None and FIRST != LAST
EDIT = b"\n\ndef mine():\n    return 1\n"


@pytest.fixture(params=["unpacked", "checkout", "inside another repository"])
def place(request: pytest.FixtureRequest, tree: Path, git: Cli) -> Path:
    if request.param != "unpacked":
        git(tree if request.param == "checkout" else tree.parent, "init", "-q")
    return tree


def git_part(text: str) -> str:
    """The git command of a hint or a note."""
    return next(part for part in text.split(" && ") if " apply -R " in part).split(": ")[-1].strip()


def test_the_command_keeps_the_edits_and_then_revert_settles(cli: Cli, place: Path, contents: Any) -> None:
    buffer = place / BUFFER
    pristine, untouched = buffer.read_bytes(), contents(place)
    assert cli("apply", place).code == 0
    buffer.write_bytes(buffer.read_bytes() + EDIT)
    before = contents(place)
    done = cli("revert", place)
    assert (done.code, done.out) == (1, "")
    assert contents(place) == before
    hint = next(line for line in done.err.splitlines() if line.startswith("  hint: "))
    assert hint.endswith(f" && megatron-fixes revert {place}")
    subprocess.run(git_part(hint), shell=True, check=True, timeout=60)
    assert buffer.read_bytes() == pristine + EDIT
    done = cli("revert", place)
    assert (done.code, done.err) == (0, "")
    assert f"{', '.join(IDS)} out already, so only the journal was removed; no file was changed" in done.out
    assert contents(place) == {**untouched, BUFFER: pristine + EDIT}
    assert "nothing to revert" in cli("revert", place).out
    assert cli("apply", place).code == 0


def test_json_of_settling_names_what_was_forgotten(cli: Cli, tree: Path, buffer: Path) -> None:
    pristine = buffer.read_bytes()
    assert cli("apply", tree, *BUFFER_ONLY).code == 0
    buffer.write_bytes(pristine + EDIT)
    done = cli("revert", tree, "--json")
    assert (done.code, done.json["reverted"], done.json["forgotten"]) == (0, [], IN_BUFFER)
    assert buffer.read_bytes() == pristine + EDIT


def test_revert_does_not_settle_while_one_of_the_fixes_is_left(cli: Cli, git: Cli, tree: Path, buffer: Path) -> None:
    git(tree, "init", "-q")
    assert cli("apply", tree, *BUFFER_ONLY).code == 0
    buffer.write_bytes(buffer.read_bytes() + EDIT)
    git(tree, "apply", "-R", str(LAST.path))
    before = buffer.read_bytes()
    done = cli("revert", tree)
    assert done.code == 1 and FIRST.path.name in done.err and LAST.path.name not in done.err
    assert buffer.read_bytes() == before
    assert (tree / ".git/megatron-fixes/journal.json").is_file()


def test_edits_in_the_fixes_own_lines_are_not_taken_for_their_absence(
    cli: Cli, tree: Path, buffer: Path, contents: Any
) -> None:
    pristine = contents(tree)
    assert cli("apply", tree, "--only", "MF0001").code == 0
    patch = CATALOG.patch("MF0001", RELEASE)
    assert patch is not None
    added = next(line for line in patch.text.splitlines() if line.startswith("+ ") and "wait_stream" in line)
    assert added[1:].encode() in buffer.read_bytes()
    buffer.write_bytes(buffer.read_bytes().replace(added[1:].encode(), added[1:].encode().replace(b"self.", b"mine.")))
    before = contents(tree)
    done = cli("revert", tree)
    assert done.code == 1 and "rm -r" in done.err
    assert contents(tree) == before
    give_up = done.err.split("To give the edits up: ")[1].split(" && megatron-fixes")[0]
    subprocess.run(give_up, shell=True, check=True, timeout=60)
    assert cli("revert", tree).code == 0
    assert contents(tree) == pristine


def test_a_text_that_nobody_knows_is_forgotten_by_the_command_that_is_printed(
    cli: Cli, tree: Path, buffer: Path
) -> None:
    assert cli("apply", tree, *BUFFER_ONLY).code == 0
    buffer.write_bytes(b"# of a fork that has another text\n")
    done = cli("revert", tree)
    forget = done.err[done.err.index("rm -r ") :].splitlines()[0]
    assert done.code == 1 and (tree / ".megatron-fixes/journal.json").is_file()
    subprocess.run(shlex.split(forget), check=True, timeout=60)
    assert cli("revert", tree).code == 0


def test_a_tree_moved_to_another_release_settles(cli: Cli, tree: Path, contents: Any) -> None:
    assert cli("apply", tree).code == 0
    copy_files(fetch("0.17.1", CATALOG.matrix), tree)
    before = {path: content for path, content in contents(tree).items() if not path.startswith(".megatron-fixes/")}
    done = cli("revert", tree)
    assert done.code == 0 and "out already, so only the journal was removed" in done.out
    assert contents(tree) == before


def test_what_was_applied_before_an_edit_is_said_to_be_so(cli: Cli, tree: Path, buffer: Path) -> None:
    pristine = buffer.read_bytes()
    assert cli("apply", tree, "--only", IN_BUFFER[0]).code == 0
    buffer.write_bytes(buffer.read_bytes() + EDIT)
    edited = buffer.read_bytes()
    assert cli("apply", tree, "--only", IN_BUFFER[1]).code == 0
    done = cli("revert", tree)
    assert done.code == 0 and buffer.read_bytes() == edited
    assert (
        f"{IN_BUFFER[0]} stayed: applied before a file was edited, and revert brought back the bytes of the edit"
        in done.out
    )
    assert "no apply put" not in done.out
    subprocess.run(git_part(done.out.split("take out with")[1].splitlines()[0]), shell=True, check=True, timeout=60)
    assert buffer.read_bytes() == pristine + EDIT


def test_bytes_without_their_journal_survive_every_command(cli: Cli, tree: Path, contents: Any) -> None:
    assert cli("apply", tree).code == 0
    (tree / ".megatron-fixes/journal.json").unlink()
    before = contents(tree)
    for arguments in (["revert"], ["apply"], ["scan"], ["apply", "--dry-run"]):
        done = cli(arguments[0], tree, *arguments[1:])
        assert done.code == (1 if arguments in (["revert"], ["apply"]) else 0)
        assert str(tree / ".megatron-fixes/blobs") in done.out + done.err
        assert contents(tree) == before


def test_a_tree_that_became_a_checkout_is_reverted(cli: Cli, git: Cli, tree: Path, contents: Any) -> None:
    before = contents(tree)
    assert cli("apply", tree).code == 0
    git(tree, "init", "-q")
    assert cli("revert", tree).code == 0
    assert contents(tree) == before
