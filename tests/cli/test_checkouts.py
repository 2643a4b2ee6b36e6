# SPDX-License-Identifier: Apache-2.0
"""``apply`` and ``revert`` where a tree is reached by links, or is a clone, a worktree or a submodule of some kind.

All on real files, with git itself. After a revert git sees nothing.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .. import synthetic
from .conftest import BUFFER, IDS, expected, files_of, findings, nothing

Cli = Callable[..., Any]
MODIFIED = "".join(f" M {path}\n" for path in files_of())


@pytest.fixture
def upstream(tree: Path, git: Cli) -> Path:
    """A repository with the tree in it, in two commits."""
    (tree / "docs").mkdir()
    (tree / "docs/README").write_text("first\n")
    git(tree, "init", "-q", "-b", "main")
    git(tree, "config", "protocol.file.allow", "always")
    for text in ("second\n", "third\n"):
        git(tree, "add", "-A")
        git(tree, "commit", "-q", "-m", text)
        (tree / "docs/README").write_text(text)
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "-m", "last")
    return tree


def holds_all(cli: Cli, tree: Path) -> bool:
    return findings(cli("scan", tree, "--json")) == expected(applied=IDS)


# Links


@pytest.fixture(params=["target", "megatron", "core", "file", "folder above"])
def linked(request: pytest.FixtureRequest, tree: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A name that leads to the tree over a symbolic link, and another that leads to the same files."""
    name = tmp_path / "name"
    if request.param == "target":
        name.symlink_to(tree)
        return name, tree
    if request.param == "folder above":
        name.symlink_to(tree.parent)
        return name / tree.name, tree / "megatron"
    if request.param == "megatron":
        name.mkdir()
        (name / "megatron").symlink_to(tree / "megatron")
        return name, tree
    real = tmp_path / "elsewhere"
    path = tree / ("megatron/core" if request.param == "core" else BUFFER)
    path.rename(real)
    path.symlink_to(real)
    return tree, tree / "megatron"


def test_one_tree_has_one_journal_by_whatever_name_it_is_given(
    cli: Cli, linked: tuple[Path, Path], tmp_path: Path, contents: Any
) -> None:
    name, other = linked
    before = contents(tmp_path)
    links = [path for path in tmp_path.rglob("*") if path.is_symlink()]
    assert cli("apply", name).code == 0
    assert holds_all(cli, name) and holds_all(cli, other)
    assert cli("apply", other).out.splitlines()[-1] == nothing()
    done = cli("revert", other)
    assert (done.code, done.err) == (0, "")
    assert contents(tmp_path) == before
    assert links == [path for path in tmp_path.rglob("*") if path.is_symlink()]


# Clones


def test_a_shallow_clone_is_like_any_other(cli: Cli, git: Cli, upstream: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{upstream}", "clone")
    clone = tmp_path / "clone"
    assert git(clone, "rev-list", "--count", "HEAD") == "1\n"
    assert cli("apply", clone).code == 0
    assert git(clone, "status", "--porcelain") == MODIFIED
    assert cli("revert", clone).code == 0
    assert git(clone, "status", "--porcelain") == ""


def test_a_sparse_clone_is_told_how_to_get_the_missing_files(
    cli: Cli, git: Cli, upstream: Path, tmp_path: Path
) -> None:
    git(tmp_path, "clone", "-q", "--sparse", f"file://{upstream}", "clone")
    clone = tmp_path / "clone"
    done = cli("scan", clone)
    assert done.code == 2 and f"git -C {clone} sparse-checkout add megatron/core" in done.err
    git(clone, "sparse-checkout", "set", "--no-cone", "/megatron/core/__init__.py", "/megatron/core/package_info.py")
    assert not any((clone / path).exists() for path in files_of())
    done = cli("scan", clone, "--json")
    assert {fix["verdict"] for fix in done.json["fixes"]} == {"drifted"}
    for fix in done.json["fixes"]:
        assert all(f"{path} not found" in fix["reason"] for path in files_of([fix["id"]]))
    before = git(clone, "status", "--porcelain")
    done = cli("apply", clone)
    assert done.code == 1 and all(f"{path} not found" in done.err for path in files_of())
    assert git(clone, "status", "--porcelain") == before == ""
    hint = done.err.split("hint: Get the missing files, the checkout is sparse: ")[1].strip()
    subprocess.run(shlex.split(hint), check=True, timeout=60)
    assert cli("apply", clone).code == 0
    assert cli("revert", clone).code == 0
    assert git(clone, "status", "--porcelain") == ""


def test_a_sparse_clone_in_which_something_fits_is_told_both_ways(
    cli: Cli, git: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synthetic.use(synthetic.build(tmp_path / "distribution"), monkeypatch)
    tree = synthetic.write_tree(tmp_path / "tree")
    git(tree, "init", "-q")
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "-m", "all")
    there = [f"/{path}" for path in synthetic.FILES if path != synthetic.SECOND]
    git(tree, "sparse-checkout", "set", "--no-cone", *there)
    assert not (tree / synthetic.SECOND).exists()
    done = cli("apply", tree)
    assert done.code == 1 and "hint: Apply only what fits: --only MF9002; or get the missing files" in done.err
    hint = done.err.split("the checkout is sparse: ")[1].strip()
    subprocess.run(shlex.split(hint), check=True, timeout=60)
    assert cli("apply", tree, "--json").json["applied"] == list(synthetic.IDS)


def test_a_partial_tree_takes_what_its_files_are_there_for(
    cli: Cli, tmp_path: Path, contents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    synthetic.use(synthetic.build(tmp_path / "distribution"), monkeypatch)
    tree = synthetic.write_tree(tmp_path / "tree")
    (tree / synthetic.SECOND).unlink()
    before = contents(tree)
    found = {fix["id"]: fix for fix in cli("scan", tree, "--json").json["fixes"]}
    assert {fix_id: fix["verdict"] for fix_id, fix in found.items()} == {
        "MF9001": "drifted",
        "MF9002": "needed",
        "MF9003": "drifted",
    }
    done = cli("apply", tree)
    assert done.code == 1 and f"{synthetic.SECOND} not found" in done.err and "sparse" not in done.err
    assert contents(tree) == before
    assert "--only MF9002" in done.err
    assert cli("apply", tree, "--only", "MF9002").code == 0
    assert cli("revert", tree).code == 0
    assert contents(tree) == before


# Worktrees and submodules


@pytest.fixture(params=["worktree", "submodule", "submodule of a worktree"])
def placed(request: pytest.FixtureRequest, upstream: Path, git: Cli, tmp_path: Path) -> tuple[Path, Path]:
    """A tree and the git directory in which its journal belongs."""
    if request.param == "worktree":
        git(upstream, "worktree", "add", "-q", "-b", "other", str(tmp_path / "work"))
        return tmp_path / "work", upstream / ".git/worktrees/work"
    outer = tmp_path / "outer"
    outer.mkdir()
    git(outer, "init", "-q", "-b", "main")
    git(outer, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(upstream), "third_party/sub")
    git(outer, "commit", "-q", "-m", "a submodule")
    if request.param == "submodule":
        return outer / "third_party/sub", outer / ".git/modules/third_party/sub"
    git(outer, "worktree", "add", "-q", "-b", "other", str(tmp_path / "work"))
    git(tmp_path / "work", "-c", "protocol.file.allow=always", "submodule", "update", "-q", "--init")
    return tmp_path / "work/third_party/sub", outer / ".git/worktrees/work/modules/third_party/sub"


def test_the_journal_lies_in_the_trees_own_git_directory(
    cli: Cli, git: Cli, placed: tuple[Path, Path], upstream: Path, contents: Any
) -> None:
    tree, git_dir = placed
    before, others = contents(tree), contents(upstream)
    assert cli("apply", tree).code == 0
    assert (git_dir / "megatron-fixes/journal.json").is_file()
    assert git(tree, "status", "--porcelain") == MODIFIED
    assert contents(upstream) == others
    assert findings(cli("scan", upstream, "--json")) == expected()
    assert cli("revert", upstream).out.splitlines()[-1] == "nothing to revert"
    assert cli("revert", tree).code == 0
    assert git(tree, "status", "--porcelain") == ""
    assert contents(tree) == before
    assert not (git_dir / "megatron-fixes").exists()


def test_a_tree_and_its_worktree_keep_their_journals_apart(
    cli: Cli, git: Cli, upstream: Path, tmp_path: Path, contents: Any
) -> None:
    work = tmp_path / "work"
    git(upstream, "worktree", "add", "-q", "-b", "other", str(work))
    before = contents(upstream), contents(work)
    assert cli("apply", upstream, "--only", IDS[0]).code == 0
    assert cli("apply", work).code == 0
    assert cli("revert", work, "--json").json["reverted"] == IDS
    assert (findings(cli("scan", upstream, "--json")), contents(work)) == (expected(applied=IDS[:1]), before[1])
    assert cli("revert", upstream, "--json").json["reverted"] == IDS[:1]
    assert (contents(upstream), contents(work)) == before
