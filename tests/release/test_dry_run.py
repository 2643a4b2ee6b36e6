# SPDX-License-Identifier: Apache-2.0
"""From a release commit to a signed dist/ in a clone, with evidence that is made up: the rehearsal's dry form.

Nothing is built before the commit, the tag, the changelog and the evidence are right; then the files are those of that
commit. Not handled: evidence that was really gathered, and use of the files (``ci/release_rehearsal``).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import megatron_fixes
from megatron_fixes.release import layout
from tests.loading import load_program
from tests.release.conftest import held, make_key

RULES = load_program("scripts/release_rules.py")
VERSION = f"{int(megatron_fixes.__version__.split('.')[0]) + 1}.0.0rc1"


class Clone:
    """A clone to release from."""

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        who = {
            f"GIT_{one}_{what}": "t@example.invalid" for one in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
        }
        dropped = ("RELEASE_KEY", "SOURCE_DATE_EPOCH")
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        self.environment = {**kept, **who, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(self, *command: str) -> tuple[int, str]:
        done = subprocess.run(command, cwd=self.tree, env=self.environment, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def script(self, name: str, *arguments: str) -> tuple[int, str]:
        return self.run(sys.executable, f"scripts/{name}.py", *arguments)

    def git(self, *arguments: str) -> str:
        code, said = self.run("git", *arguments)
        assert code == 0, said
        return said.strip()

    def make_up_evidence(self, **of_tests: object) -> None:
        commit, tree = self.git("log", "-1", "--format=%H %T").split()
        folder = self.tree / "build" / "evidence"
        folder.mkdir(parents=True, exist_ok=True)
        for name in RULES.CHECKS:
            facts = {"name": name, "outcome": "green", "tree": tree, "commit": commit, "date": "2026-12-01"}
            facts |= {"seconds": 1.0, "machine": "m", "command": "c"}
            facts |= ({"passed": {"fixes": 1}} | of_tests) if name == "tests" else {}
            (folder / f"{name}.json").write_bytes(msgspec.json.encode(facts))


@pytest.fixture
def clone(repository: Path, tmp_path: Path) -> Clone:
    pytest.importorskip("tomllib", reason="releases are built on Python 3.11 or later")
    subprocess.run(["git", "clone", "-q", str(repository), str(tmp_path / "clone")], check=True)
    return Clone(tmp_path / "clone")


def test_a_release_is_built_once_all_agrees_and_never_before(clone: Clone, tmp_path: Path) -> None:
    dist = clone.tree / "dist"
    code, said = clone.script("release_dist", f"v{VERSION}")
    assert code == 1 and f"has no section {VERSION}" in said and "lint: there is no evidence" in said
    assert clone.script("prepare_release", f"v{VERSION}")[0] == 0
    clone.make_up_evidence(skipped={"0.13.0 is not in the cache": 1})
    code, said = clone.script("release_dist", f"v{VERSION}")
    assert code == 1 and said.count("refused: ") == 1 and "is not in the cache" in said
    clone.make_up_evidence()
    clone.git("tag", f"v{VERSION}", "HEAD~1")
    code, said = clone.script("release_dist", f"v{VERSION}")
    assert code == 1 and said.count("refused: ") == 1 and f"tag: v{VERSION} stands at" in said
    assert not dist.exists()
    clone.git("tag", "--force", f"v{VERSION}", "HEAD")
    code, said = clone.script("release_dist")
    assert code == 0, said
    assert sorted(path.name for path in dist.iterdir()) == sorted(layout.Layout(VERSION).files)
    unsigned = held(dist)
    key = make_key(tmp_path)
    code, said = clone.script("sign_release", "--out", "dist", "--key", str(key))
    assert code == 1 and "Commit the public half of the key first" in said
    shutil.copy(make_key(tmp_path, "another").with_suffix(".pub"), clone.tree / "docs" / "release_key.pub")
    code, said = clone.script("sign_release", "--out", "dist", "--key", str(key))
    assert code == 1 and "no good signature of the key in" in said
    assert held(dist) == unsigned
    shutil.copy(key.with_suffix(".pub"), clone.tree / "docs" / "release_key.pub")
    assert clone.script("sign_release", "--out", "dist", "--key", str(key))[0] == 0
    (clone.tree / ".dist-SHA256SUMS.sig").touch()  # what is left if the process is killed
    assert clone.git("status", "--porcelain") == "?? docs/release_key.pub"
    signed = held(dist)
    assert {name for name in signed if signed[name] != unsigned[name]} == {layout.SIGNATURE}


def test_a_release_that_does_not_verify_is_not_signed(clone: Clone, tmp_path: Path) -> None:
    assert clone.script("prepare_release", f"v{VERSION}")[0] == 0
    assert clone.script("build_release", f"v{VERSION}")[0] == 0
    (clone.tree / "dist" / layout.Layout(VERSION).wheel).write_bytes(b"another")
    code, said = clone.script("sign_release", "--out", "dist", "--key", str(make_key(tmp_path)))
    assert code != 0 and layout.Layout(VERSION).wheel in said
    assert (clone.tree / "dist" / layout.SIGNATURE).read_bytes().startswith(b"UNSIGNED")


def test_checks_on_a_work_tree_with_changes_are_no_evidence(clone: Clone) -> None:
    (clone.tree / "README.md").write_text("Another.\n", encoding="utf-8")
    for script, arguments in (("release_evidence", ["lint"]), ("release_dist", [f"v{VERSION}"])):
        code, said = clone.script(script, *arguments)
        assert code != 0 and "work tree with changes (M README.md)" in said
    code, said = clone.script("prepare_release", f"v{VERSION}")
    assert code != 0 and "work tree with changes (M README.md)" in said
    assert not (clone.tree / "build" / "evidence" / "lint.json").exists()


@pytest.mark.parametrize("hiding", ["status.showUntrackedFiles", "--skip-worktree", "--assume-unchanged"])
def test_what_git_was_told_to_overlook_is_no_evidence(hiding: str, clone: Clone) -> None:
    if hiding.startswith("--"):
        clone.git("update-index", hiding, "README.md")
        said = "README.md, which git was told not to look at"
    else:
        clone.git("config", hiding, "no")
        (clone.tree / "tests" / "test_another.py").touch()
        said = "work tree with changes (?? tests/test_another.py)"
    for script, argument in (("release_evidence", "lint"), ("build_release", "v0.1.0"), ("prepare_release", "v0.1.0")):
        code, answer = clone.script(script, argument)
        assert code == 1 and said in answer and "Traceback" not in answer


@pytest.mark.parametrize("missing", ["git", ".git"])
def test_without_git_or_outside_a_checkout_that_is_said(missing: str, clone: Clone, tmp_path: Path) -> None:
    if missing == "git":
        clone.environment["PATH"] = str(tmp_path)
    else:
        (clone.tree / ".git").rename(tmp_path / "git")
        clone.environment["GIT_CEILING_DIRECTORIES"] = str(tmp_path)
    for script in ("release_dist", "release_evidence", "prepare_release", "build_release", "reproduce_release"):
        code, said = clone.script(script, *(["lint"] if "evidence" in script else ["v0.1.0"]))
        assert code in (1, 2) and "error: " in said and "git" in said and "Traceback" not in said, said


def test_a_commit_that_main_does_not_have_is_not_agreed_on(clone: Clone) -> None:
    clone.git("update-ref", "refs/remotes/origin/main", "HEAD")
    assert clone.script("prepare_release", f"v{VERSION}")[0] == 0
    code, said = clone.script("release_dist", "--only-agree", f"v{VERSION}")
    assert code == 1 and said.count("refused: ") == 1 and "is not part of origin/main" in said
    clone.git("commit", "--quiet", "--allow-empty", "--message", "Merged, and more")
    clone.git("update-ref", "refs/remotes/origin/main", "HEAD")
    clone.git("checkout", "--quiet", "HEAD~1")
    code, said = clone.script("release_dist", "--only-agree", f"v{VERSION}")
    assert code == 0 and "tag, main, version" in said
    clone.git("update-ref", "-d", "refs/remotes/origin/main")
    assert "there is no origin/main here" in clone.script("release_dist", "--only-agree", f"v{VERSION}")[1]
