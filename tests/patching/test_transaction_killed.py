# SPDX-License-Identifier: Apache-2.0
"""A process killed at every system call of an apply, a revert or a recovery that changed a file, and what follows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_fixes.errors import RefusedError
from megatron_fixes.patching.journal import AppliedFix
from megatron_fixes.patching.target import find_target
from megatron_fixes.patching.transaction import commit, read_state, recover, revert

from ..system_calls import survives
from ..system_calls import sweep as sweep_of
from .conftest import FILES, snapshot, write_tree

PATHS = ("megatron/core/distributed/buffer.py", "megatron/core/distributed/finalize.py", "megatron/core/optimizer.py")
OLD = {path: FILES[path] for path in PATHS}
NEW = {path: content + b"# mended\n" for path, content in OLD.items()}
FIX = AppliedFix("MF0001", hashlib.sha256(b"MF0001").hexdigest(), PATHS)
LATER = AppliedFix("MF0002", hashlib.sha256(b"MF0002").hexdigest(), PATHS[:1])


def apply(tree: Path) -> None:
    commit(find_target(tree), {path: (OLD[path], NEW[path]) for path in PATHS}, [FIX], release="0.16.1")


def apply_more(tree: Path) -> None:
    before = (tree / PATHS[0]).read_bytes()
    commit(find_target(tree), {PATHS[0]: (before, before + b"# more\n")}, [LATER], release="0.16.1")


def contents(tree: Path) -> dict[str, bytes]:
    return {path: (tree / path).read_bytes() for path in PATHS}


def sweep(prepare: Callable[[Path], None], action: Callable[[Path], object], tmp_path: Path) -> list[Path]:
    """Return one tree for each state in which the action can be killed."""
    pristine = write_tree(tmp_path / "pristine")
    prepare(pristine)
    return list(sweep_of(pristine, action, tmp_path))


def test_apply_killed_anywhere_leaves_old_or_new_bytes_and_is_undone(tmp_path: Path) -> None:
    pristine = snapshot(write_tree(tmp_path / "reference"))
    killed = sweep(lambda tree: None, apply, tmp_path)
    assert len(killed) > 40
    mixed = pending = 0
    for tree in killed:
        found = contents(tree)
        assert all(found[path] in (OLD[path], NEW[path]) for path in PATHS)
        mixed += found not in (OLD, NEW)
        state = read_state(find_target(tree))
        interrupted = state is not None and state.interrupted
        finished = state is not None and not state.interrupted
        pending += bool(interrupted)
        recovery = recover(find_target(tree))
        assert (recovery is not None) == bool(interrupted)
        if finished:
            assert contents(tree) == NEW
        else:
            assert snapshot(tree) == pristine
            apply(tree)
        assert contents(tree) == NEW
        assert revert(find_target(tree)).fixes == ("MF0001",)
        assert snapshot(tree) == pristine
    assert mixed >= len(PATHS) - 1
    assert pending > mixed


def test_apply_after_a_killed_apply_needs_no_other_command(tmp_path: Path) -> None:
    for tree in sweep(lambda tree: None, apply, tmp_path):
        state = read_state(find_target(tree))
        if contents(tree) == OLD:
            apply(tree)
            assert contents(tree) == NEW
        elif state is not None and state.interrupted:
            with pytest.raises(RefusedError, match="other bytes than a moment ago"):
                commit(find_target(tree), {path: (c, c + b"#\n") for path, c in contents(tree).items()}, [FIX],
                       release="0.16.1")  # fmt: skip
            assert contents(tree) == OLD


def test_stacked_apply_killed_anywhere_goes_back_to_the_apply_before(tmp_path: Path) -> None:
    pristine = snapshot(write_tree(tmp_path / "reference"))
    for tree in sweep(apply, apply_more, tmp_path):
        recover(find_target(tree))
        state = read_state(find_target(tree))
        assert state is not None
        assert {file.status for file in state.files} == {"patched"}
        if [fix.id for fix in state.fixes] == ["MF0001"]:
            assert contents(tree) == NEW
        assert len(list(tree.rglob("*.megatron-fixes-new"))) == 0
        revert(find_target(tree))
        assert snapshot(tree) == pristine


def test_revert_killed_anywhere_is_completed(tmp_path: Path) -> None:
    pristine = snapshot(write_tree(tmp_path / "reference"))
    killed = sweep(apply, lambda tree: revert(find_target(tree)), tmp_path)
    assert len(killed) > 25
    for tree in killed:
        found = contents(tree)
        assert all(found[path] in (OLD[path], NEW[path]) for path in PATHS)
        recovery = recover(find_target(tree))
        if recovery is None and read_state(find_target(tree)) is not None:
            assert contents(tree) == NEW
            assert not revert(find_target(tree)).nothing
        assert snapshot(tree) == pristine
        apply(tree)
        assert contents(tree) == NEW


def test_revert_repeated_after_a_kill_is_enough(tmp_path: Path) -> None:
    pristine = snapshot(write_tree(tmp_path / "reference"))
    for tree in sweep(apply, lambda tree: revert(find_target(tree)), tmp_path):
        revert(find_target(tree))
        assert snapshot(tree) == pristine


def half_applied(tree: Path) -> None:
    """Kill an apply when its first file is new and its last is old."""
    for deadly in range(1, 1000):
        assert not survives(lambda: apply(tree), tree, deadly)
        if (tree / PATHS[0]).read_bytes() == NEW[PATHS[0]]:
            return
        recover(find_target(tree))


def test_recovery_killed_anywhere_is_repeated(tmp_path: Path) -> None:
    pristine = snapshot(write_tree(tmp_path / "reference"))
    killed = sweep(half_applied, lambda tree: recover(find_target(tree)), tmp_path)
    assert len(killed) > 10
    for tree in killed:
        recover(find_target(tree))
        assert snapshot(tree) == pristine


def test_recovery_refuses_a_file_that_is_neither_old_nor_new_and_touches_nothing(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree")
    half_applied(tree)
    (tree / PATHS[2]).write_bytes(b"mine\n")
    before = snapshot(tree)
    for command in (recover, revert):
        with pytest.raises(RefusedError, match="other bytes") as caught:
            command(find_target(tree))
        assert PATHS[2] in caught.value.message
        assert PATHS[0] not in caught.value.message
        assert snapshot(tree) == before
    (tree / PATHS[2]).write_bytes(OLD[PATHS[2]])
    recovery = recover(find_target(tree))
    assert recovery is not None
    assert (recovery.action, recovery.files, recovery.fixes) == ("apply", PATHS, ("MF0001",))
    assert contents(tree) == OLD
