# SPDX-License-Identifier: Apache-2.0
"""Where the journal is looked for, and what is refused where it was lost or something else has its name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_fixes.errors import RefusedError
from megatron_fixes.patching.target import find_target, journal_dir
from megatron_fixes.patching.transaction import read_state, recover, revert, settle

from .conftest import FILES, snapshot
from .test_transaction import BUFFER, OPTIMIZER, apply, statuses


def test_journal_is_found_after_the_tree_became_a_checkout(tree: Path, git: Callable[..., str]) -> None:
    before = snapshot(tree)
    apply(tree, "MF0001", BUFFER)
    git(tree, "init", "-q")
    assert statuses(tree) == {BUFFER: "patched"}
    apply(tree, "MF0002", OPTIMIZER)
    assert not (tree / ".git/megatron-fixes").exists()
    assert revert(find_target(tree)).fixes == ("MF0001", "MF0002")
    assert snapshot(tree) == before
    apply(tree, "MF0001", BUFFER)
    assert (tree / ".git/megatron-fixes/journal.json").is_file()


def test_leftover_beside_the_tree_does_not_hide_gits_own_place(tree: Path, git: Callable[..., str]) -> None:
    git(tree, "init", "-q")
    (tree / ".megatron-fixes").mkdir()
    assert journal_dir(find_target(tree)) == tree / ".git/megatron-fixes"


@pytest.mark.parametrize("blobs", ["all", "one"])
def test_bytes_whose_journal_was_lost_are_kept_and_named(tree: Path, blobs: str) -> None:
    apply(tree, "MF0001", BUFFER)
    (tree / ".megatron-fixes/journal.json").unlink()
    if blobs == "one":
        (tree / ".megatron-fixes/blobs" / hashlib.sha256(FILES[BUFFER] + b"# MF0001\n").hexdigest()).unlink()
    before = snapshot(tree)
    target = find_target(tree)
    for command in (lambda: revert(target), lambda: recover(target), lambda: read_state(target), lambda: settle(target),
                    lambda: apply(tree, "MF0002", OPTIMIZER)):  # fmt: skip
        with pytest.raises(RefusedError, match="only copies") as caught:
            command()
        assert caught.value.context == str(tree / ".megatron-fixes/blobs")
        assert snapshot(tree) == before


@pytest.mark.parametrize("kind", ["dangling link", "file"])
@pytest.mark.parametrize("checkout", [False, True])
def test_something_else_in_the_journals_place_is_named(
    tree: Path, git: Callable[..., str], kind: str, checkout: bool
) -> None:
    if checkout:
        git(tree, "init", "-q")
    place = tree / ".megatron-fixes"
    place.symlink_to("gone") if kind == "dangling link" else place.touch()
    target = find_target(tree)
    for command in (lambda: revert(target), lambda: recover(target), lambda: read_state(target),
                    lambda: apply(tree, "MF0001", BUFFER)):  # fmt: skip
        with pytest.raises(RefusedError, match="no directory") as caught:
            command()
        assert caught.value.context == str(place) and caught.value.hint
