# SPDX-License-Identifier: Apache-2.0
"""Where a target is found, what its release is and who says so, without running or importing any of it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_fixes.errors import UsageError
from megatron_fixes.patching.target import find_target, journal_dir

from .conftest import write_tree

Git = Callable[..., str]


def committed(tree: Path, git: Git, *tag: str) -> Path:
    git(tree, "init", "-q", "-b", "main")
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "-m", "release")
    if tag:
        git(tree, "tag", *tag)
    return tree


def without_package_info(tree: Path) -> Path:
    (tree / "megatron/core/package_info.py").unlink()
    return tree


# A given path


@pytest.mark.parametrize("inside", ["", "megatron", "megatron/core", "megatron/core/"])
def test_root_megatron_and_core_all_name_the_tree(tree: Path, inside: str) -> None:
    target = find_target(f"{tree}/{inside}")
    assert (target.root, target.megatron_core) == (tree, tree / "megatron/core")
    assert (target.release, target.release_source) == ("0.16.1", "megatron/core/package_info.py")
    assert not target.installed
    assert target.git_dir is None
    assert journal_dir(target) == tree / ".megatron-fixes"


def test_relative_path_counts_from_the_working_directory(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree / "megatron")
    assert find_target(".").root == find_target("core").root == tree


def test_checkout_that_is_itself_called_megatron_is_its_own_root(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "megatron")
    assert find_target(root).root == find_target(root / "megatron").root == root


def test_symbolic_links_are_resolved(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tree / "megatron")
    assert find_target(tmp_path / "link").root == tree


@pytest.mark.parametrize(
    ("made", "given"),
    [
        ("project/src", "project"),
        ("project", "project/megatron/core/distributed"),
        ("project", "."),
        ("project", "project/megatron/core/optimizer.py"),
        ("project/third_party/Megatron-LM", "project"),
        ("Megatron-LM", "Megatron-LMM"),
    ],
)
def test_wrong_path_gets_a_hint_that_names_the_tree_nearby(tmp_path: Path, made: str, given: str) -> None:
    root = write_tree(tmp_path / made)
    with pytest.raises(UsageError) as caught:
        find_target(tmp_path / given)
    assert caught.value.hint == f"name {root}, which holds megatron/core"
    assert caught.value.context == str(tmp_path / given)


def test_missing_path_gets_no_hint_of_an_unrelated_tree_beside_it(tmp_path: Path) -> None:
    write_tree(tmp_path / "a-tree")
    with pytest.raises(UsageError) as caught:
        find_target(tmp_path / "nope")
    assert "a-tree" not in caught.value.hint
    write_tree(tmp_path / "deep/Megatron-LM")
    with pytest.raises(UsageError, match="does not exist") as caught:
        find_target(tmp_path / "dep/Megatron-LM")
    assert caught.value.hint == f"name {tmp_path / 'deep/Megatron-LM'}, which holds megatron/core"


@pytest.mark.parametrize("path", ["", " ", "\t\n"])
def test_an_empty_path_is_not_the_working_directory(tree: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.chdir(tree)
    with pytest.raises(UsageError, match="empty path"):
        find_target(path)


def test_nothing_importable_in_a_tree_names_the_tree(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree)
    with pytest.raises(UsageError) as caught:
        find_target(None, sys_path=[])
    assert "megatron-fixes scan ." in caught.value.hint
    monkeypatch.chdir(tree.parent)
    with pytest.raises(UsageError) as caught:
        find_target(None, sys_path=[])
    assert "scan ." not in caught.value.hint


def test_missing_path_file_and_empty_directory_are_told_apart(tmp_path: Path) -> None:
    base = tmp_path / "a" / "b"
    base.mkdir(parents=True)
    (base / "file").touch()
    for given, message in (("gone", "does not exist"), ("file", "got a file"), (".", "directory without megatron")):
        with pytest.raises(UsageError, match=message) as caught:
            find_target(base / given)
        assert caught.value.hint


def test_empty_core_directory_is_no_target(tmp_path: Path) -> None:
    (tmp_path / "megatron/core/__pycache__").mkdir(parents=True)
    with pytest.raises(UsageError):
        find_target(tmp_path)


# What would be imported


def imported_core(entries: list[Path]) -> str:
    code = "import sys; sys.path[:0] = sys.argv[1:]; import megatron.core; print(megatron.core.__path__[0])"
    command = [sys.executable, "-S", "-c", code, *map(str, entries)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def importable(root: Path, *, regular: bool = False, core: bool = True) -> Path:
    (root / "megatron").mkdir(parents=True)
    if regular:
        (root / "megatron/__init__.py").touch()
    if core:
        (root / "megatron/core").mkdir()
        (root / "megatron/core/__init__.py").touch()
    return root


def test_first_portion_with_core_is_what_import_chooses(tmp_path: Path) -> None:
    entries = [importable(tmp_path / "a", core=False), importable(tmp_path / "b"), importable(tmp_path / "c")]
    found = find_target(None, [str(entry) for entry in entries])
    assert found.root == entries[1]
    assert str(found.megatron_core) == imported_core(entries)


def test_regular_package_wins_over_earlier_portions_as_in_import(tmp_path: Path) -> None:
    entries = [importable(tmp_path / "a"), importable(tmp_path / "b", regular=True)]
    found = find_target(None, [str(entry) for entry in entries])
    assert found.root == entries[1]
    assert str(found.megatron_core) == imported_core(entries)


def test_regular_package_without_core_hides_the_rest_and_is_named(tmp_path: Path) -> None:
    entries = [importable(tmp_path / "a"), importable(tmp_path / "b", regular=True, core=False)]
    with pytest.raises(UsageError, match="hides") as caught:
        find_target(None, [str(entry) for entry in entries])
    assert caught.value.context == str(entries[1] / "megatron/__init__.py")


def test_nothing_importable_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no importable"):
        find_target(None, [str(tmp_path)])


def test_own_import_path_and_finders_are_asked_and_nothing_is_imported(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class EditableFinder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> object:
            places = {"megatron": tree / "megatron", "megatron.core": tree / "megatron/core"}
            if name not in places:
                return None
            init = places[name] / "__init__.py"
            return importlib.util.spec_from_file_location(name, init, submodule_search_locations=[str(places[name])])

    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(UsageError):
        find_target(None)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, EditableFinder])
    assert find_target(None).root == tree
    assert not any(name.split(".")[0] == "megatron" for name in sys.modules)


# Installed or not


def test_site_packages_directory_is_installed(tmp_path: Path) -> None:
    assert find_target(write_tree(tmp_path / "lib/python3.11/site-packages")).installed


def test_tree_with_an_installers_mark_is_installed_and_an_unpacked_one_is_not(tree: Path) -> None:
    info = tree / "megatron_core-0.16.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: megatron-core\nVersion: 0.16.1\n")
    assert not find_target(tree).installed
    (info / "INSTALLER").write_text("pip\n")
    assert find_target(tree).installed


# Release


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ('MAJOR = 0\nMINOR = 14\nPATCH = 0\nPRE_RELEASE = "rc3"\n', "0.14.0rc3"),
        ("VERSION = (0, 15, 2, '')\n", "0.15.2"),
        ("MAJOR: int = 0\nMINOR: int = 17\nPATCH: int = 1\n", "0.17.1"),
    ],
)
def test_release_is_read_from_constants(tree: Path, text: str, release: str) -> None:
    (tree / "megatron/core/package_info.py").write_text(text)
    assert find_target(tree).release == release


@pytest.mark.parametrize("text", ["MAJOR = int('0')\nMINOR = 1\nPATCH = 2\n", "MAJOR = (\n", "", "VERSION = (0, 1)\n"])
def test_release_that_is_not_constant_is_unknown(tree: Path, text: str) -> None:
    (tree / "megatron/core/package_info.py").write_text(text)
    target = find_target(tree)
    assert (target.release, target.release_source) == (None, "")


def test_dist_info_is_the_second_source_unless_there_are_two(tree: Path) -> None:
    without_package_info(tree)
    info = tree / "megatron_core-0.15.3.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: megatron-core\nVersion: 0.15.3\n\nVersion: 9\n")
    target = find_target(tree)
    assert (target.release, target.release_source) == ("0.15.3", "megatron_core-0.15.3.dist-info")
    shutil.copytree(info, tree / "megatron_core-0.15.2.dist-info")
    assert find_target(tree).release is None


@pytest.mark.parametrize("annotated", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("detached", [False, True])
def test_tag_of_the_commit_is_the_third_source(
    tree: Path, git: Git, annotated: bool, packed: bool, detached: bool
) -> None:
    flags = ("-a", "-m", "release") if annotated else ()
    committed(without_package_info(tree), git, *flags, "core_v0.16.1")
    git(tree, "tag", "core_v0.16.1rc2")
    git(tree, "tag", "core_r0.99.0")
    if packed:
        git(tree, "pack-refs", "--all")
    if detached:
        git(tree, "checkout", "-q", "--detach")
    target = find_target(tree)
    assert (target.release, target.release_source) == ("0.16.1", "git tag core_v0.16.1")
    git(tree, "commit", "-q", "--allow-empty", "-m", "later")
    assert find_target(tree).release is None


# Git directory


def test_git_directory_of_a_checkout_holds_the_journal(tree: Path, git: Git) -> None:
    target = find_target(committed(tree, git))
    assert target.git_dir == tree / ".git"
    assert journal_dir(target) == tree / ".git/megatron-fixes"


def test_tree_inside_another_repository_is_not_that_repositorys(tmp_path: Path, git: Git) -> None:
    git(tmp_path, "init", "-q")
    assert find_target(write_tree(tmp_path / "vendor")).git_dir is None


def test_worktree_has_its_own_git_directory_and_the_common_tags(tree: Path, tmp_path: Path, git: Git) -> None:
    committed(without_package_info(tree), git, "core_v0.16.1")
    git(tree, "worktree", "add", "-q", "-b", "other", str(tmp_path / "work"))
    target = find_target(tmp_path / "work")
    assert target.git_dir == tree / ".git/worktrees/work"
    assert target.release_source == "git tag core_v0.16.1"


def test_submodule_has_its_git_directory_in_the_outer_repository(tree: Path, tmp_path: Path, git: Git) -> None:
    committed(without_package_info(tree), git, "core_v0.16.1")
    outer = tmp_path / "outer"
    outer.mkdir()
    git(outer, "init", "-q")
    git(outer, "submodule", "add", "-q", str(tree), "third_party/Megatron-LM")
    target = find_target(outer / "third_party/Megatron-LM")
    assert target.git_dir == outer / ".git/modules/third_party/Megatron-LM"
    assert target.release_source == "git tag core_v0.16.1"


def test_dangling_git_file_is_no_work_tree(tree: Path) -> None:
    (tree / ".git").write_text("gitdir: /nowhere/at/all\n")
    assert find_target(tree).git_dir is None


def test_target_is_found_with_an_empty_search_path(tree: Path, git: Git, monkeypatch: pytest.MonkeyPatch) -> None:
    committed(without_package_info(tree), git, "core_v0.16.1")
    monkeypatch.setenv("PATH", os.devnull)
    assert find_target(tree).release == "0.16.1"
