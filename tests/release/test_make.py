# SPDX-License-Identifier: Apache-2.0
"""What comes from outside into ``make``, such as the name of a tag, is read as text: no part of it runs.

Each target of ci/release.mk that takes it is run as it is, with a Python that only writes down its arguments.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loading import ROOT

OUTSIDE = ("VERSION", "CHECKS", "DIST", "KEY", "PUBLIC_KEY", "UNSIGNED", "AGAINST")
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "ci" / "release.mk").read_text(encoding="utf-8"), re.MULTILINE)
LISTING = "#!/usr/bin/env bash\nprintf '<%s>\\n' \"$@\"\n"
ATTACKS = (
    "v9.9.9&touch${IFS}PWNED&true${IFS}.0.0",
    "v9.9.9$(touch${IFS}PWNED)",
    "v9.9.9`touch${IFS}PWNED`",
    "v9.9.9;touch PWNED;",
    '"; touch PWNED; "',
    "$(shell touch PWNED)",
    "${shell touch PWNED}",
    "a b/c d",
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Makefiles in a folder with a space in its name, and a Python that lists its arguments."""
    place = tmp_path / "a folder"
    (place / "ci").mkdir(parents=True)
    (place / "bin").mkdir()
    for name in ("Makefile", "ci/release.mk"):
        (place / name).write_bytes((ROOT / name).read_bytes())
    (place / "bin" / "python").write_text(LISTING, encoding="utf-8")
    (place / "bin" / "python").chmod(0o755)
    return place


def make(tree: Path, target: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    dropped = {*OUTSIDE, "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "ARGS", "BIN", "RELEASE_KEY"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    command = ["make", f"BIN={tree / 'bin'}", f"VENV={tree / 'venv'}", target, *words]
    return subprocess.run(command, cwd=tree, env={**kept, **variables}, capture_output=True, text=True)


@pytest.mark.parametrize("target", [one for one in TARGETS if one != "sign-keyless"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_from_outside_is_run(target: str, attack: str, tree: Path) -> None:
    make(tree, target, **dict.fromkeys(OUTSIDE, attack))
    make(tree, target, *(f"{name}={attack}" for name in OUTSIDE))
    assert not list(tree.rglob("PWNED"))


def test_a_script_gets_it_whole(tree: Path) -> None:
    path = "a b/c'd $HOME"
    done = make(tree, "reproduce", VERSION="v0.1.0 x", AGAINST=path)
    assert done.stdout.splitlines()[1:] == [f"<--against={path}>", "<-->", "<v0.1.0 x>"], done.stderr
    done = make(tree, "verify-dist", DIST=path, PUBLIC_KEY=path)
    assert done.stdout.splitlines()[3:] == [f"<--key={path}>", "<-->", f"<{path}>"], done.stderr


@pytest.mark.parametrize(
    ("unsigned", "committed", "given"),
    [
        ("", False, []),
        ("", True, ["<--key=docs/release_key.pub>"]),
        ("1", False, ["<--allow-unsigned>"]),
        ("1", True, ["<--key=docs/release_key.pub>", "<--allow-unsigned>"]),
        ("no-key", False, ["<--allow-unsigned>"]),
        ("no-key", True, ["<--key=docs/release_key.pub>"]),
        ("0", False, []),
    ],
)
def test_a_release_without_signature_is_taken_only_when_asked_and_never_for_a_key_that_is_committed(
    unsigned: str, committed: bool, given: list[str], tree: Path
) -> None:
    if committed:
        (tree / "docs").mkdir()
        (tree / "docs" / "release_key.pub").touch()
    for target, before in (("verify-dist", 3), ("try-dist", 2)):
        said = make(tree, target, UNSIGNED=unsigned).stdout.splitlines()
        assert said[before:] == [*given, "<-->", "<dist>"]


def test_the_first_job_refuses_a_tag_of_another_form() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "release_dist.py"), "--only-agree", "--", ATTACKS[0]]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 2 and "expected one such as v0.1.0" in done.stderr
