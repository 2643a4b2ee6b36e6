# SPDX-License-Identifier: Apache-2.0
"""Without VERSION a release's script takes the version tag on what is checked out, as ci/release.mk says.

``make`` hands an empty text over then. The scripts run on a repository of one commit, and stop before their work.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.loading import load_program
from tests.release.conftest import commit_all

# Script, the function that gets the version, its place among that one's arguments, and other arguments.
SCRIPTS: dict[str, tuple[str, int, list[str]]] = {
    "reproduce_release": ("reproduce", 1, []),
    "release_notes": ("notes", 1, []),
    "publish_github": ("fetch", 0, ["fetch"]),
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "CHANGELOG.md").touch()
    commit_all(tmp_path)
    return tmp_path


def tag(tree: Path, name: str) -> None:
    subprocess.run(["git", "-C", str(tree), "tag", name], check=True)


@pytest.mark.parametrize("given", [[""], []], ids=["empty", "none"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_version_is_that_of_the_tag_that_is_checked_out(
    script: str, given: list[str], tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, place, before = SCRIPTS[script]
    module = load_program(f"scripts/{script}.py")
    versions: list[str] = []

    def stop(*arguments: str, **_: bool) -> None:
        versions.append(arguments[place])
        raise KeyboardInterrupt

    monkeypatch.setattr(module, name, stop)
    monkeypatch.setattr(module, "ROOT", tree)
    tag(tree, "nightly")
    assert module.main([*before, *given]) == 2
    assert "got no VERSION and 0 version tags here" in capsys.readouterr().err
    tag(tree, "v0.1.0")
    with pytest.raises(KeyboardInterrupt):
        module.main([*before, *given])
    assert versions == ["0.1.0"]
    tag(tree, "v0.2.0")
    assert module.main([*before, *given]) == 2
    assert "got no VERSION and 2 version tags here" in capsys.readouterr().err
