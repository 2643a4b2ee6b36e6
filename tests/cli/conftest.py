# SPDX-License-Identifier: Apache-2.0
"""Real megatron-core files to work on, and the command line as a process of its own and within this one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_fixes.cli.main import main
from megatron_fixes.overlay.tables import load_tables

ROOT = Path(__file__).resolve().parents[2]
BUFFER = "megatron/core/distributed/param_and_grad_buffer.py"
# All that find_target and the fixes look at; the rest of a release would only be copied.
FILES = ("megatron/core/__init__.py", "megatron/core/package_info.py", *load_tables().paths.values())


def copy_files(release_tree: Path, to: Path) -> Path:
    for path in FILES:
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(release_tree / path, to / path)
    return to


@pytest.fixture
def contents() -> Callable[[Path], dict[str, bytes]]:
    """Tell every file below a folder with its bytes, git's own aside."""

    def tell(root: Path) -> dict[str, bytes]:
        found = {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        return {path: content for path, content in found.items() if not path.startswith(".git/")}

    return tell


class Done(NamedTuple):
    """What a command printed and ended with."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def tree(release_tree: Path, tmp_path: Path) -> Path:
    """A writable copy of 0.16.1, cut down to what the fixes touch."""
    return copy_files(release_tree, tmp_path / "Megatron-LM")


@pytest.fixture
def buffer(tree: Path) -> Path:
    """The file that most fixes edit, in the copy."""
    return tree / BUFFER


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run the command line within this process."""

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Done(code, *capsys.readouterr())

    return run


def spawn(
    *arguments: object, root: Path = ROOT, program: Sequence[str] = ("-m", "megatron_fixes"), **variables: str
) -> Done:
    """Run the command line as a process, from the package below ``root``."""
    command = [sys.executable, *program, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONSAFEPATH": "1", **variables}
    done = subprocess.run(command, capture_output=True, env=environment, cwd=root, timeout=60)
    return Done(done.returncode, done.stdout.decode("utf-8"), done.stderr.decode("utf-8"))


@pytest.fixture
def process() -> Callable[..., Done]:
    return spawn


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of this checkout's package and data, to be spoilt."""
    place = tmp_path / "checkout"
    for name in ("megatron_fixes", "patches"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__", "_data"))
    shutil.copyfile(ROOT / "compat_matrix.yaml", place / "compat_matrix.yaml")
    return place


@pytest.fixture
def git() -> Callable[..., str]:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")

    def run(cwd: Path, *arguments: str) -> str:
        command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.invalid", *arguments]
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True, timeout=60).stdout

    return run
