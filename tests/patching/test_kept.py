# SPDX-License-Identifier: Apache-2.0
"""What apply and revert keep: of other files and of folders all, of a rewritten file all but its bytes and its times.

Why a rewritten file has a new modification time, after a revert too: docs/decisions/0004.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_fixes.patching.target import find_target
from megatron_fixes.patching.transaction import revert

from .test_transaction import BUFFER, FINALIZE, OPTIMIZER, apply

LONG_AGO = 1_600_000_000_123_456_789
# Owner, user 1234 read only, group, mask, others: a POSIX access control list as the kernel stores it.
ACL = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", *entry)
    for entry in ((1, 6, 2**32 - 1), (2, 4, 1234), (4, 4, 2**32 - 1), (0x10, 4, 2**32 - 1), (0x20, 0, 2**32 - 1))
)


def attributes(path: Path) -> dict[str, bytes]:
    return {name: os.getxattr(path, name, follow_symlinks=False) for name in os.listxattr(path, follow_symlinks=False)}


def give(path: Path, name: str, value: bytes) -> bool:
    """Set an extended attribute; False where the file system has none of the kind."""
    try:
        os.setxattr(path, name, value)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        return False
    return True


def rights(path: Path) -> tuple[Any, ...]:
    found = path.lstat()
    return found.st_mode, found.st_uid, found.st_gid, attributes(path)


@pytest.fixture
def odd(tree: Path) -> Path:
    """The tree with modes, owners, times, attributes and links that an unpacked archive would not have."""
    modes = {BUFFER: 0o640, FINALIZE: 0o444, OPTIMIZER: 0o755, "megatron/core/distributed": 0o2750, "megatron": 0o711}
    (tree / "megatron/core/link.py").symlink_to("optimizer.py")
    os.link(tree / FINALIZE, tree / "megatron/core/second_name.py")
    if os.geteuid() == 0:
        for path in (BUFFER, FINALIZE, "megatron/core/distributed"):
            os.chown(tree / path, 1234, 2345)
    for path, mode in modes.items():
        (tree / path).chmod(mode)
    for path in (BUFFER, FINALIZE, "megatron/core/distributed"):
        if not (tree / path).is_file() or (tree / path).stat().st_mode & stat.S_IWUSR:
            give(tree / path, "user.site", b"ours")
    give(tree / BUFFER, "system.posix_acl_access", ACL)
    for path in tree.rglob("*"):
        os.utime(path, ns=(LONG_AGO, LONG_AGO), follow_symlinks=False)
    return tree


def test_all_else_is_kept(odd: Path) -> None:
    rewritten = {odd / BUFFER, odd / OPTIMIZER}
    others = [path for path in odd.rglob("*") if path not in rewritten]
    folders = {path for path in others if path.is_dir() and not path.is_symlink()}

    def kept() -> dict[Path, tuple[Any, ...]]:
        found = {path: (*rights(path), path.lstat().st_ino) for path in others}
        return {
            path: what if path in folders else (*what, path.lstat().st_mtime_ns, path.lstat().st_nlink)
            for path, what in found.items()
        }

    before, of_rewritten = kept(), {path: rights(path) for path in rewritten}
    for step in (lambda: apply(odd, "MF0001", BUFFER, OPTIMIZER), lambda: revert(find_target(odd))):
        step()
        assert kept() == before
        assert {path: rights(path) for path in rewritten} == of_rewritten
    assert all(path.stat().st_mtime_ns != LONG_AGO for path in rewritten)
    assert any(of_rewritten[path][3] for path in rewritten) or not give(odd / BUFFER, "user.site", b"")


def test_an_attribute_that_may_not_be_set_is_left_out(odd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "setxattr", refuse)
    assert apply(odd, "MF0001", BUFFER).files == (BUFFER,)
    assert (odd / BUFFER).read_bytes().endswith(b"# MF0001\n")


def test_bytecode_of_the_fix_is_not_run_after_a_revert(tree: Path) -> None:
    """The sizes are equal, so the times alone tell Python that its bytecode is stale."""
    module = tree / OPTIMIZER
    module.write_bytes(b"VALUE = 'a'\n")
    seen = []
    program = "import sys; sys.path.insert(0, sys.argv[1]); import optimizer; print(optimizer.VALUE)"

    def run() -> None:
        command = [sys.executable, "-c", program, str(module.parent)]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
        seen.append(done.stdout.strip())

    from megatron_fixes.patching.transaction import commit

    run()
    commit(find_target(tree), {OPTIMIZER: (b"VALUE = 'a'\n", b"VALUE = 'b'\n")}, [], release=None)
    run()
    revert(find_target(tree))
    run()
    assert seen == ["a", "b", "a"]
    assert list((module.parent / "__pycache__").glob("optimizer.*.pyc"))
