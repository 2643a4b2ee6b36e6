# SPDX-License-Identifier: Apache-2.0
"""Kills a child at its system calls: before each one that finds the files below a folder changed.

By ptrace, so that nothing is left out: whatever the child asks of the system, in Python or below it. It stands still
before each of its calls, and the files are compared with what they were before the call before. A kill at any other
call leaves the same files, since a killed process leaves nothing else. The kill comes before the call is carried out.

Linux only. Not covered: loss of power, which fsync is for.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

_TRACEME, _SYSCALL, _SETOPTIONS = 0, 24, 0x4200
_OPTIONS = 0x1 | 0x100000  # a stop at a call is told from a signal; the child dies with us
_AT_CALL = signal.SIGTRAP | 0x80
_ptrace = ctypes.CDLL(None, use_errno=True).ptrace
_ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_ptrace.restype = ctypes.c_long


def _ask(request: int, process: int, data: int = 0) -> None:
    if _ptrace(request, process, None, data) == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"ptrace: {os.strerror(error)}; a sweep needs to trace its own child")


def _fork(action: Callable[[], object]) -> int:
    """Start an action in a fork that stands still until it is traced; it ends with 0 unless the action raises."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _ask(_TRACEME, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            action()
            sys.stdout.flush()
            code = 0
        finally:
            os._exit(code)
    os.waitpid(child, 0)
    _ask(_SETOPTIONS, child, _OPTIONS)
    return child


def trace(action: Callable[[], object], go_on: Callable[[], bool]) -> bool:
    """Run an action in a fork, and ask before each of its system calls whether to go on.

    Args:
        action: Run in the child.
        go_on: Called here while the child stands still; the child is killed if it returns False.

    Returns:
        False if the child was killed.
    """
    child = _fork(action)
    entering, deliver = True, 0
    while True:
        _ask(_SYSCALL, child, deliver)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, f"the child ended with {os.WEXITSTATUS(status)}"
            return True
        assert os.WIFSTOPPED(status), f"got the status {status} of a child that nobody killed"
        stop = os.WSTOPSIG(status)
        deliver = 0
        if stop == _AT_CALL:
            if entering and not go_on():
                os.kill(child, signal.SIGKILL)
                _, status = os.waitpid(child, 0)
                assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
                return False
            entering = not entering
        elif stop != signal.SIGTRAP:  # which comes after an exec
            deliver = stop


def looks(folder: Path) -> frozenset[tuple[object, ...]]:
    """Every path below a folder with what a system call could change of it.

    Times are left out: whether one is set depends on the second, and the nth change must be the same in every run.
    """
    found: list[tuple[object, ...]] = []
    for place, folders, names in os.walk(folder):
        for name in (*folders, *names):
            path = os.path.join(place, name)
            if (state := _state(path)) is not None:
                found.append((path, *state))
    return frozenset(found)


def _state(path: str) -> tuple[int, ...] | None:
    try:
        now = os.lstat(path)
    except FileNotFoundError:
        return None
    return now.st_ino, now.st_mode, now.st_uid, now.st_size, now.st_nlink


def survives(action: Callable[[], object], folder: Path, deadly: int) -> bool:
    """Run in a fork that is killed once its calls have changed a folder ``deadly`` times (0: at its first call).

    Returns:
        False if it was killed.
    """
    seen, changes = looks(folder), 0

    def go_on() -> bool:
        nonlocal seen, changes
        if (now := looks(folder)) != seen:
            seen, changes = now, changes + 1
        return changes < deadly

    return trace(action, go_on)


def sweep(pristine: Path, action: Callable[[Path], object], folder: Path) -> Iterator[Path]:
    """Yield a copy of a tree for each state of its files in which an action on it can be killed."""
    for deadly in range(1000):
        tree = folder / f"killed-{deadly}" / pristine.name
        shutil.copytree(pristine, tree, symlinks=True)
        if survives(lambda tree=tree: action(tree), tree, deadly):
            return
        yield tree
    raise AssertionError("the action never ended")
