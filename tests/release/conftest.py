# SPDX-License-Identifier: Apache-2.0
"""A release built from this work tree, signed with a key of this run, and the script that builds one.

The work tree is copied and committed, so that what is tested is what lies here. Keys are made anew each time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

import megatron_fixes
from megatron_fixes.release import layout, sums
from megatron_fixes.release.verify import Report, check
from tests.loading import ROOT, load_program

BUILD = load_program("scripts/build_release.py")
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv", ".nox", ".*_cache", ".hypothesis", "__pycache__", "build", "dist", "*.egg-info", "_data"
)
LAYOUT = layout.Layout(megatron_fixes.__version__)


def make_key(folder: Path, name: str = "key") -> Path:
    """Make a key pair; the public half lies beside it."""
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen")
    key = folder / name
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(key)], check=True)
    return key


def held(folder: Path) -> dict[str, bytes]:
    """The files of a folder: content by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def commit_all(tree: Path) -> None:
    """Make a repository of a tree, with one commit that is the same every time."""
    values = (("NAME", "t"), ("EMAIL", "t@example.invalid"), ("DATE", "1767225600 +0000"))
    variables = {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in values}
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "All"]):
        subprocess.run(["git", "-C", str(tree), *arguments], check=True, env={**os.environ, **variables})


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This work tree as a repository of its own."""
    tree = tmp_path_factory.mktemp("repository") / "tree"
    shutil.copytree(ROOT, tree, ignore=NOT_SOURCE)
    commit_all(tree)
    return tree


@dataclass(frozen=True)
class Released:
    """A release.

    Attributes:
        folder: Where it is, to be read only.
        key: The private key; the public one ends with ``.pub``.
        files: Content by name.
    """

    folder: Path
    key: Path
    files: dict[str, bytes]

    @property
    def public(self) -> Path:
        return self.key.with_suffix(".pub")


@pytest.fixture(scope="session")
def released(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Released:
    """A signed release."""
    pytest.importorskip("tomllib", reason="releases are built on Python 3.11 or later")
    key = make_key(tmp_path_factory.mktemp("key"))
    folder = tmp_path_factory.mktemp("release") / "dist"
    BUILD.build(BUILD.find_source(repository, f"v{LAYOUT.version}"), folder, key)
    return Released(folder, key, held(folder))


def sealed(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files with sums that are true of them: what only a holder of the key could publish."""
    listed = {name: sums.digest(files[name]) for name in LAYOUT.summed if name in files}
    return {**files, layout.SUMS: sums.write_sums(listed)}


def check_as_signed(files: dict[str, bytes], **options: object) -> Report:
    """Check, and take any signature for good: for what comes after it."""
    return check(files, lambda text, sidecar: "good", **options)  # type: ignore[arg-type]
