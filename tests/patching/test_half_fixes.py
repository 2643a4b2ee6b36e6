# SPDX-License-Identifier: Apache-2.0
"""A fix in several files, one of which was edited before another apply: no revert takes out half of it."""

from __future__ import annotations

from pathlib import Path

from megatron_fixes.patching.target import find_target
from megatron_fixes.patching.transaction import revert

from .conftest import FILES, snapshot
from .test_transaction import BUFFER, FINALIZE, OPTIMIZER, apply


def edit(tree: Path, path: str) -> bytes:
    content = (tree / path).read_bytes() + b"# mine\n"
    (tree / path).write_bytes(content)
    return content


def content(tree: Path, path: str) -> bytes:
    return (tree / path).read_bytes()


def test_a_fix_of_an_edited_file_stays_whole_and_is_named(tree: Path) -> None:
    apply(tree, "MF0001", BUFFER, OPTIMIZER)
    edited = edit(tree, BUFFER)
    done = apply(tree, "MF0002", BUFFER)
    assert done.fixes == ("MF0002",)
    assert done.notes == (
        f"{BUFFER} was edited after an earlier apply; revert will bring back its bytes of now",
        f"{OPTIMIZER} shares a fix with an edited file; revert will bring back its bytes of now",
    )
    undone = revert(find_target(tree))
    assert (undone.fixes, undone.edited, undone.files) == (("MF0002",), ("MF0001",), (BUFFER,))
    assert content(tree, BUFFER) == edited
    assert content(tree, OPTIMIZER) == FILES[OPTIMIZER] + b"# MF0001\n"
    assert not (tree / ".megatron-fixes").exists()


def test_its_other_file_goes_back_to_what_it_was_before_the_later_apply(tree: Path) -> None:
    apply(tree, "MF0001", BUFFER, OPTIMIZER)
    edit(tree, BUFFER)
    before = {name: found for name, found in snapshot(tree).items() if not name.startswith(".megatron-fixes")}
    apply(tree, "MF0002", BUFFER, OPTIMIZER)
    undone = revert(find_target(tree))
    assert (undone.fixes, undone.edited) == (("MF0002",), ("MF0001",))
    assert snapshot(tree) == before


def test_fixes_that_are_bound_to_it_through_others_stay_whole_too(tree: Path) -> None:
    apply(tree, "MF0003", OPTIMIZER, FINALIZE)
    apply(tree, "MF0001", BUFFER, OPTIMIZER)
    edit(tree, BUFFER)
    before = {name: found for name, found in snapshot(tree).items() if not name.startswith(".megatron-fixes")}
    assert apply(tree, "MF0004", BUFFER).fixes == ("MF0004",)
    undone = revert(find_target(tree))
    assert (undone.fixes, undone.edited) == (("MF0004",), ("MF0001", "MF0003"))
    assert snapshot(tree) == before


def test_a_fix_of_other_files_is_still_taken_out(tree: Path) -> None:
    apply(tree, "MF0001", BUFFER, OPTIMIZER)
    apply(tree, "MF0003", FINALIZE)
    edit(tree, BUFFER)
    assert apply(tree, "MF0004", BUFFER).fixes == ("MF0003", "MF0004")
    assert revert(find_target(tree)).fixes == ("MF0003", "MF0004")
    assert content(tree, FINALIZE) == FILES[FINALIZE]


def test_what_an_edit_has_bound_once_is_forgotten_by_later_applies(tree: Path) -> None:
    apply(tree, "MF0001", BUFFER, OPTIMIZER)
    edit(tree, BUFFER)
    apply(tree, "MF0002", BUFFER)
    edit(tree, BUFFER)
    done = apply(tree, "MF0003", BUFFER, OPTIMIZER)
    assert len(done.notes) == 1
    undone = revert(find_target(tree))
    assert (undone.fixes, undone.edited) == (("MF0003",), ("MF0001", "MF0002"))
    assert content(tree, OPTIMIZER) == FILES[OPTIMIZER] + b"# MF0001\n"
