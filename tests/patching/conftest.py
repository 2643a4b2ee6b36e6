# SPDX-License-Identifier: Apache-2.0
"""A small synthetic Megatron-LM tree for the tests of this room; the bytes are ours, the layout is Megatron's."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

FILES = {
    "megatron/core/__init__.py": b"from .package_info import __version__\n",
    "megatron/core/package_info.py": (
        b'MAJOR = 0\nMINOR = 16\nPATCH = 1\nPRE_RELEASE = ""\n'
        b"VERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)\n"
        b"raise SystemExit('this file must not be run')\n"
    ),
    "megatron/core/distributed/buffer.py": b"def start():\n    return 1\n",
    "megatron/core/distributed/finalize.py": b"def finish():\n    return 2\n",
    "megatron/core/optimizer.py": b"def step():\n    return 3\n",
}


def write_tree(root: Path) -> Path:
    for path, content in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
    return root


def snapshot(root: Path) -> dict[str, tuple[bytes | str, int]]:
    """Every path below ``root``, with content (or link target) and mode, ``.git`` and git's files aside."""
    found: dict[str, tuple[bytes | str, int]] = {}
    for path in sorted(root.rglob("*")):
        if path.relative_to(root).parts[0] == ".git":
            continue
        what = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else "directory"
        found[path.relative_to(root).as_posix()] = (what, path.lstat().st_mode)
    return found


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "Megatron-LM")


@pytest.fixture
def git() -> Callable[..., str]:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")

    def run(cwd: Path, *arguments: str) -> str:
        settings = ("-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "protocol.file.allow=always")
        command = ["git", *settings, *arguments]
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    return run
