# SPDX-License-Identifier: Apache-2.0
"""The git command that is shown: quoted for the shell, last patch first when taking out, stopped above the target."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from megatron_fixes.cli.plain_git import git_apply
from megatron_fixes.patching.target import find_target

PATCHES = [Path("first one.patch"), Path("second.patch")]


@pytest.mark.parametrize("reverse", [False, True])
def test_patches_are_taken_out_in_the_opposite_order(tree: Path, reverse: bool) -> None:
    words = shlex.split(git_apply(find_target(tree), PATCHES, reverse=reverse))
    names = ["first one.patch", "second.patch"]
    assert words[-2:] == (names[::-1] if reverse else names)
    assert ("-R" in words) is reverse


def test_the_search_for_a_repository_is_stopped_only_where_there_is_one_above(tree: Path) -> None:
    assert git_apply(find_target(tree), PATCHES).startswith("git -C ")
    (tree.parent / ".git").mkdir()
    assert git_apply(find_target(tree), PATCHES).startswith(f"GIT_CEILING_DIRECTORIES={tree.parent} git -C ")
