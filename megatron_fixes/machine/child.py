# SPDX-License-Identifier: Apache-2.0
"""Asks what may hang, crash or print without end, in a process that can be given up.

The wait and the output have limits; what reaches one is killed with its whole process group. A process that the kernel
does not let go (state D, inside a driver) is left behind, as whoever waits for it hangs too. Not handled: a descendant
that left the group.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MOST_BYTES = 1 << 20
_REAPING_S = 1.0


class GivenUpError(Exception):
    """There is no answer; the message says why, without a subject."""


def forked(question: Callable[[], bytes], patience_s: float) -> bytes:
    """What a function answers in a fork of this process, whose standard streams go nowhere.

    Raises:
        GivenUpError: It took too long, answered too much, or its process ended without an answer.
    """
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        _answer(question, theirs)
    os.close(theirs)
    try:
        (text,) = _drained([ours], patience_s)
    except BaseException:
        _kill(pid)
        _reap(pid)
        raise
    finally:
        os.close(ours)
    status = _reap(pid)
    if not text:
        how = f", by signal {os.WTERMSIG(status)}" if status is not None and os.WIFSIGNALED(status) else ""
        raise GivenUpError(f"ended its process without an answer{how}")
    return text


def started(*command: str, patience_s: float) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, whatever it ends with.

    Raises:
        GivenUpError: It can't be started, takes too long, or prints too much.
    """
    until = time.monotonic() + patience_s
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True
        )
    except OSError as error:
        raise GivenUpError(f"can't be started: {error}") from error
    streams = [stream for stream in (process.stdout, process.stderr) if stream]
    try:
        out, err = _drained([stream.fileno() for stream in streams], patience_s)
        code = process.wait(max(until - time.monotonic(), 0.01))
    except BaseException as error:
        _kill(process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_REAPING_S)
        if isinstance(error, subprocess.TimeoutExpired):
            raise GivenUpError(f"did not end within {patience_s:g} s") from None
        raise
    finally:
        for stream in streams:
            stream.close()
    return subprocess.CompletedProcess(command, code, out.decode(errors="replace"), err.decode(errors="replace"))


def _answer(question: Callable[[], bytes], end: int) -> NoReturn:
    """The child's part; it never returns into what the parent was doing."""
    try:
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nowhere, number)
        with open(end, "wb") as file:
            file.write(question())
    finally:
        os._exit(0)


def _drained(ends: Sequence[int], patience_s: float) -> list[bytes]:
    """All that comes out of some pipes until each is closed."""
    until = time.monotonic() + patience_s
    texts = {end: b"" for end in ends}
    opened = set(ends)
    while opened:
        left = until - time.monotonic()
        ready = select.select(list(opened), [], [], left)[0] if left > 0 else []
        if not ready:
            raise GivenUpError(f"gave no answer within {patience_s:g} s")
        for end in ready:
            part = os.read(end, 1 << 16)
            texts[end] += part
            if not part:
                opened.discard(end)
            if len(texts[end]) > _MOST_BYTES:
                raise GivenUpError(f"gave more than {_MOST_BYTES >> 20} MiB")
    return list(texts.values())


def _kill(pid: int) -> None:
    """The group that the child leads, or the child alone where it has not come to lead one."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def _reap(pid: int) -> int | None:
    """How a child ended; None if it did not for a second, or somebody else has asked."""
    until = time.monotonic() + _REAPING_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < until:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                return status
            time.sleep(0.001)
    return None
