# SPDX-License-Identifier: Apache-2.0
"""The git command that is shown: quoted for the shell, last patch first when taking out, stopped above the target."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fixes.cli.plain_git import git_apply
from megatron_fixes.patching.target import find_target

from .conftest import PATCHES as ALL

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


@pytest.mark.parametrize("above", [False, True])
def test_many_patches_are_taken_out_by_a_short_command_that_works(
    above: bool, cli: Callable[..., Any], git: Callable[..., str], tree: Path, contents: Any
) -> None:
    git(tree.parent if above else tree, "init", "-q")
    before = contents(tree)
    for way in ([], ["-R"]):
        subprocess.run(
            git_apply(find_target(tree), [patch.path for patch in ALL], reverse=bool(way)), shell=True, check=True
        )
        assert (contents(tree) == before) is bool(way)
    assert cli("apply", tree).code == 0
    kept = {path: content for path, content in contents(tree).items() if path in before}
    assert cli("revert", tree).code == 0
    for path, content in kept.items():
        (tree / path).write_bytes(content)
    done = cli("revert", tree)
    (hint,) = [line for line in done.err.splitlines() if line.startswith("  hint: Take them out with: ")]
    assert done.code == 1 and len(hint) < 300 + 10 * len(ALL) + 2 * len(str(tree))
    subprocess.run(hint.partition("with: ")[2], shell=True, check=True, timeout=60)
    assert contents(tree) == before
    # The first one that does not come out stops the others, and is not passed over.
    assert subprocess.run(hint.partition("with: ")[2], shell=True, capture_output=True).returncode == 1
