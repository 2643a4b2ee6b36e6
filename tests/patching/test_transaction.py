# SPDX-License-Identifier: Apache-2.0
"""Applying to a tree and taking it back: bytes, modes, links, read-only places, edits in between, the journal.

Kills in the middle are in ``test_transaction_killed``.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_fixes.errors import RefusedError
from megatron_fixes.patching.journal import AppliedFix
from megatron_fixes.patching.outcome import Committed, EditedError
from megatron_fixes.patching.target import find_target, journal_dir
from megatron_fixes.patching.transaction import commit, read_state, recover, revert, settle

from .conftest import FILES, snapshot, write_tree

BUFFER = "megatron/core/distributed/buffer.py"
FINALIZE = "megatron/core/distributed/finalize.py"
OPTIMIZER = "megatron/core/optimizer.py"


def fix(name: str, *files: str) -> AppliedFix:
    return AppliedFix(name, hashlib.sha256(name.encode()).hexdigest(), files)


def apply(tree: Path, name: str, *paths: str, release: str | None = "0.16.1") -> Committed:
    """Append a line that names the fix to each path."""
    before = {path: (tree / path).read_bytes() for path in paths}
    changes = {path: (content, content + f"# {name}\n".encode()) for path, content in before.items()}
    return commit(find_target(tree), changes, [fix(name, *paths)], release=release)


def statuses(tree: Path) -> dict[str, str]:
    state = read_state(find_target(tree))
    return {} if state is None else {file.path: file.status for file in state.files}


@pytest.fixture(params=["unpacked", "checkout", "worktree", "submodule", "inside another work tree"])
def any_tree(request: pytest.FixtureRequest, tmp_path: Path, git: Callable[..., str]) -> Path:
    root = write_tree(tmp_path / "Megatron-LM")
    if request.param == "unpacked":
        return root
    if request.param == "inside another work tree":
        git(tmp_path, "init", "-q")
        return root
    git(root, "init", "-q", "-b", "main")
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "release")
    if request.param == "worktree":
        git(root, "worktree", "add", "-q", "-b", "other", str(tmp_path / "work"))
        return tmp_path / "work"
    if request.param == "submodule":
        (tmp_path / "outer").mkdir()
        git(tmp_path / "outer", "init", "-q")
        git(tmp_path / "outer", "submodule", "add", "-q", str(root), "sub")
        return tmp_path / "outer/sub"
    return root


def test_apply_then_revert_leaves_no_trace_anywhere(any_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    before = snapshot(any_tree)
    done = apply(any_tree, "MF0001", BUFFER, OPTIMIZER)
    assert done == Committed((BUFFER, OPTIMIZER), ("MF0001",))
    assert (any_tree / BUFFER).read_bytes() == FILES[BUFFER] + b"# MF0001\n"
    assert statuses(any_tree) == {BUFFER: "patched", OPTIMIZER: "patched"}
    undone = revert(find_target(any_tree))
    assert (undone.files, undone.fixes) == ((BUFFER, OPTIMIZER), ("MF0001",))
    assert snapshot(any_tree) == before
    assert not journal_dir(find_target(any_tree)).exists()


def test_journal_beside_the_tree_is_invisible_to_git(tmp_path: Path, git: Callable[..., str]) -> None:
    tree = write_tree(tmp_path / "vendor")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    apply(tree, "MF0001", BUFFER)
    assert (tree / ".megatron-fixes/journal.json").is_file()
    assert git(tmp_path, "status", "--porcelain", "--untracked-files=all").count("megatron-fixes") == 0


def test_nothing_to_revert_is_told_and_makes_no_directory(tree: Path) -> None:
    before = snapshot(tree)
    assert revert(find_target(tree)).nothing
    assert recover(find_target(tree)) is None
    assert read_state(find_target(tree)) is None
    assert snapshot(tree) == before


def test_changes_that_change_nothing_make_no_journal(tree: Path) -> None:
    before = snapshot(tree)
    same = FILES[BUFFER]
    assert commit(find_target(tree), {BUFFER: (same, same)}, [fix("MF0001")], release=None) == Committed((), ())
    assert snapshot(tree) == before


@pytest.mark.parametrize("mode", [0o644, 0o755, 0o600, 0o664])
def test_mode_and_owner_are_kept(tree: Path, mode: int) -> None:
    (tree / BUFFER).chmod(mode)
    if os.geteuid() == 0:
        os.chown(tree / BUFFER, 1234, 2345)
    owner = ((tree / BUFFER).stat().st_uid, (tree / BUFFER).stat().st_gid)
    for step in (lambda: apply(tree, "MF0001", BUFFER), lambda: revert(find_target(tree))):
        step()
        found = (tree / BUFFER).stat()
        assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (mode, *owner)


def test_modification_time_differs_in_whole_seconds_so_that_no_stale_bytecode_is_used(tree: Path) -> None:
    seen = [int((tree / BUFFER).stat().st_mtime)]
    apply(tree, "MF0001", BUFFER)
    seen.append(int((tree / BUFFER).stat().st_mtime))
    revert(find_target(tree))
    seen.append(int((tree / BUFFER).stat().st_mtime))
    assert seen[0] != seen[1] != seen[2]


def test_symbolic_link_stays_and_its_file_is_replaced(tree: Path, tmp_path: Path) -> None:
    real = tmp_path / "elsewhere.py"
    (tree / BUFFER).rename(real)
    (tree / BUFFER).symlink_to(real)
    before = snapshot(tmp_path)
    apply(tree, "MF0001", BUFFER)
    assert (tree / BUFFER).is_symlink()
    assert real.read_bytes() == FILES[BUFFER] + b"# MF0001\n"
    revert(find_target(tree))
    assert snapshot(tmp_path) == before


def test_other_names_of_a_hard_link_keep_their_bytes(tree: Path, tmp_path: Path) -> None:
    os.link(tree / BUFFER, tmp_path / "cache.py")
    apply(tree, "MF0001", BUFFER)
    assert (tmp_path / "cache.py").read_bytes() == FILES[BUFFER]


def test_two_paths_of_one_file_are_refused(tree: Path) -> None:
    (tree / FINALIZE).unlink()
    (tree / FINALIZE).symlink_to(tree / BUFFER)
    with pytest.raises(RefusedError, match="two paths of one file"):
        apply(tree, "MF0001", BUFFER, FINALIZE)


@pytest.mark.parametrize("path", ["../outside.py", "/etc/hostname", "megatron/../megatron/core/optimizer.py"])
def test_path_that_leaves_the_tree_is_refused(tree: Path, path: str) -> None:
    with pytest.raises(RefusedError, match="can't be used"):
        commit(find_target(tree), {path: (b"a", b"b")}, [], release=None)


@pytest.mark.parametrize("place", [OPTIMIZER, "megatron/core", "."])
@pytest.mark.parametrize("action", ["apply", "revert"])
def test_read_only_place_is_named_and_nothing_changes(tree: Path, place: str, action: str) -> None:
    if action == "revert":
        apply(tree, "MF0001", BUFFER, OPTIMIZER)
        place = place.replace(".", ".megatron-fixes") if place == "." else place
    mode = (tree / place).stat().st_mode
    (tree / place).chmod(mode & ~0o222)
    before = snapshot(tree)
    with pytest.raises(RefusedError, match="read-only") as caught:
        apply(tree, "MF0001", BUFFER, OPTIMIZER) if action == "apply" else revert(find_target(tree))
    assert caught.value.context == str((tree / place).resolve())
    assert caught.value.hint.startswith("make it writable first: chmod u+w")
    assert snapshot(tree) == before
    (tree / place).chmod(mode)


def test_file_changed_meanwhile_is_refused_and_nothing_changes(tree: Path) -> None:
    before = snapshot(tree)
    changes = {OPTIMIZER: (FILES[OPTIMIZER], b"new\n"), BUFFER: (b"what was read\n", b"new\n")}
    with pytest.raises(RefusedError, match="other bytes than a moment ago") as caught:
        commit(find_target(tree), changes, [fix("MF0001")], release=None)
    assert caught.value.context == BUFFER
    assert snapshot(tree) == before


def test_failing_write_gives_every_file_its_bytes_back(tree: Path) -> None:
    """The second file's temporary name is taken by a directory, which can't be removed as a leftover."""
    (tree / "megatron/core/.optimizer.py.megatron-fixes-new").mkdir()
    before = snapshot(tree)
    with pytest.raises(RefusedError, match="every file is as it was") as caught:
        apply(tree, "MF0001", BUFFER, OPTIMIZER)
    assert caught.value.context == OPTIMIZER
    assert snapshot(tree) == before


def test_failing_revert_leaves_everything_applied(tree: Path) -> None:
    apply(tree, "MF0001", BUFFER, OPTIMIZER)
    (tree / "megatron/core/.optimizer.py.megatron-fixes-new").mkdir()
    before = {name: found for name, found in snapshot(tree).items() if "blobs" not in name}
    with pytest.raises(RefusedError, match="every file is as it was"):
        revert(find_target(tree))
    assert {name: found for name, found in snapshot(tree).items() if "blobs" not in name} == before


# Several applies


def test_stacked_applies_revert_to_the_first_original(tree: Path) -> None:
    before = snapshot(tree)
    apply(tree, "MF0001", BUFFER, OPTIMIZER)
    done = apply(tree, "MF0003", BUFFER, FINALIZE)
    assert (done.fixes, done.notes) == (("MF0001", "MF0003"), ())
    assert revert(find_target(tree)).fixes == ("MF0001", "MF0003")
    assert snapshot(tree) == before


def test_stored_bytes_that_no_longer_matter_are_dropped(tree: Path) -> None:
    for number in range(5):
        apply(tree, f"MF000{number}", BUFFER)
    assert len(list((tree / ".megatron-fixes/blobs").iterdir())) == 2


def test_edit_between_applies_is_noted_and_is_what_revert_brings_back(tree: Path) -> None:
    apply(tree, "MF0001", BUFFER)
    apply(tree, "MF0002", OPTIMIZER)
    edited = (tree / BUFFER).read_bytes() + b"# mine\n"
    (tree / BUFFER).write_bytes(edited)
    done = apply(tree, "MF0003", BUFFER)
    assert done.notes == (f"{BUFFER} was edited after an earlier apply; revert will bring back its bytes of now",)
    assert done.fixes == ("MF0002", "MF0003")
    undone = revert(find_target(tree))
    assert (undone.fixes, undone.edited) == (("MF0002", "MF0003"), ("MF0001",))
    assert (tree / BUFFER).read_bytes() == edited
    assert (tree / OPTIMIZER).read_bytes() == FILES[OPTIMIZER]


def test_file_that_the_user_took_back_is_fine(tree: Path) -> None:
    before = snapshot(tree)
    apply(tree, "MF0001", BUFFER)
    apply(tree, "MF0002", OPTIMIZER)
    (tree / BUFFER).write_bytes(FILES[BUFFER])
    assert statuses(tree) == {BUFFER: "original", OPTIMIZER: "patched"}
    done = apply(tree, "MF0003", FINALIZE)
    assert (done.fixes, done.notes) == (("MF0002", "MF0003"), ())
    revert(find_target(tree))
    assert snapshot(tree) == before


def test_new_release_forgets_what_is_no_longer_there(tree: Path) -> None:
    apply(tree, "MF0001", BUFFER, OPTIMIZER)
    (tree / BUFFER).write_bytes(b"of 0.17.0\n")
    (tree / OPTIMIZER).write_bytes(b"of 0.17.0\n")
    done = apply(tree, "MF0003", FINALIZE, release="0.17.0")
    assert done.fixes == ("MF0003",)
    assert done.notes == ("the tree was 0.16.1 at an earlier apply and is 0.17.0; revert knows the new bytes only",)
    assert revert(find_target(tree)).files == (FINALIZE,)
    assert (tree / BUFFER).read_bytes() == b"of 0.17.0\n"


def test_a_fix_that_is_applied_again_after_an_edit_took_it_out_is_no_part_of_the_edit(tree: Path) -> None:
    apply(tree, "MF0001", BUFFER)
    (tree / BUFFER).write_bytes(b"mine\n")
    apply(tree, "MF0001", BUFFER)
    assert revert(find_target(tree)).edited == ()


# The fixes were taken out by other means


def test_settling_removes_the_journal_and_touches_no_file(tree: Path) -> None:
    apply(tree, "MF0001", BUFFER)
    (tree / BUFFER).write_bytes(b"mine\n")
    before = {path: found for path, found in snapshot(tree).items() if not path.startswith(".megatron-fixes")}
    undone = settle(find_target(tree))
    assert (undone.fixes, undone.files, undone.forgotten, undone.nothing) == ((), (), ("MF0001",), False)
    assert snapshot(tree) == before
    assert settle(find_target(tree)).nothing


def test_settling_is_refused_while_a_file_is_as_the_apply_left_it(tree: Path) -> None:
    apply(tree, "MF0001", BUFFER, OPTIMIZER)
    (tree / BUFFER).write_bytes(b"mine\n")
    before = snapshot(tree)
    with pytest.raises(RefusedError, match="still in the tree") as caught:
        settle(find_target(tree))
    assert caught.value.context == OPTIMIZER
    assert snapshot(tree) == before


# Revert is refused


def test_revert_names_every_edited_file_and_its_hint_is_the_way_out(tree: Path) -> None:
    apply(tree, "MF0001", BUFFER, FINALIZE, OPTIMIZER)
    (tree / BUFFER).write_bytes(b"mine\n")
    (tree / OPTIMIZER).unlink()
    before = snapshot(tree)
    with pytest.raises(EditedError) as caught:
        revert(find_target(tree))
    assert f"{BUFFER}, {OPTIMIZER}" in caught.value.message
    assert FINALIZE not in str(caught.value)
    assert snapshot(tree) == before
    assert statuses(tree) == {BUFFER: "edited", FINALIZE: "patched", OPTIMIZER: "missing"}
    subprocess.run(caught.value.give_up, shell=True, check=True, timeout=60)
    revert(find_target(tree))
    assert {path: (tree / path).read_bytes() for path in FILES} == FILES
    assert not (tree / ".megatron-fixes").exists()


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_stored_bytes_that_are_gone_or_damaged_are_never_used(tree: Path, damage: str) -> None:
    apply(tree, "MF0001", BUFFER, OPTIMIZER)
    blob = tree / ".megatron-fixes/blobs" / hashlib.sha256(FILES[OPTIMIZER]).hexdigest()
    blob.unlink() if damage == "missing" else blob.write_bytes(b"rubbish")
    before = snapshot(tree)
    with pytest.raises(RefusedError, match="stored bytes"):
        revert(find_target(tree))
    assert snapshot(tree) == before


JOURNALS = {
    "newer schema": (lambda text: text.replace('"schema": 1', '"schema": 2'), "a newer version .*\n.*Upgrade"),
    "older schema": (lambda text: text.replace('"schema": 1', '"schema": 0'), "an older version .*\n.*: Revert with"),
    "cut": (lambda text: text[:-20], "something else than a journal"),
    "empty": (lambda text: "", "something else than a journal"),
    "another thing": (lambda text: "[]", "something else than a journal"),
    "unknown field": (lambda text: text.replace('"schema"', '"more": 1, "schema"'), "breaks its form"),
    "no digest": (lambda text: text.replace('"original": "', '"original": "../'), "breaks its form"),
    "path outside": (lambda text: text.replace(f'"path": "{BUFFER}"', '"path": "../x"'), "breaks its rules"),
}


@pytest.mark.parametrize("name", JOURNALS)
def test_journal_that_is_not_ours_to_read_is_refused_by_every_command(tree: Path, name: str) -> None:
    apply(tree, "MF0001", BUFFER)
    spoil, message = JOURNALS[name]
    journal = tree / ".megatron-fixes/journal.json"
    assert json.loads(journal.read_text())["schema"] == 1
    journal.write_text(spoil(journal.read_text()))
    before = snapshot(tree)
    target = find_target(tree)
    for command in (lambda: revert(target), lambda: recover(target), lambda: read_state(target),
                    lambda: apply(tree, "MF0002", OPTIMIZER)):  # fmt: skip
        with pytest.raises(RefusedError, match=message):
            command()
    assert snapshot(tree) == before


# Two at once


@pytest.fixture
def holder(tree: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of a tree with one fix applied, until its input ends."""
    apply(tree, "MF0001", BUFFER)
    code = (
        "import sys\nfrom pathlib import Path\nfrom megatron_fixes.patching.store import Store\n"
        "with Store(Path(sys.argv[1])).locked():\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(tree / ".megatron-fixes")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate(timeout=30)


def test_second_command_is_refused_while_one_runs_and_not_after(tree: Path, holder: subprocess.Popen[str]) -> None:
    before = snapshot(tree)
    for command in (lambda: apply(tree, "MF0002", OPTIMIZER), lambda: revert(find_target(tree))):
        with pytest.raises(RefusedError, match="another megatron-fixes holds"):
            command()
    assert snapshot(tree) == before
    holder.communicate(timeout=30)
    assert apply(tree, "MF0002", OPTIMIZER).fixes == ("MF0001", "MF0002")
