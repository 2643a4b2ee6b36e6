# SPDX-License-Identifier: Apache-2.0
"""The processes of a case: started, waited for until a deadline, and never left behind.

A rank is a fork of the process that has imported Megatron, or, with NCCL where that import has started CUDA, a
process of its own that imports for itself. Either is killed by the kernel when the process that started it dies,
whatever ended that (Linux only; elsewhere its own alarm ends it later).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from functools import cache
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

# Peers of a rank that failed get this long to fail as well.
GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1


class Rank(Protocol):
    """A started rank."""

    def poll(self) -> int | None:
        """Its exit code, negative for a signal, or None while it runs."""

    def kill(self) -> None:
        """End it at once and collect it; nothing happens if it has ended."""


class ForkedRank:
    """A fork of this process that runs ``body`` and ends."""

    def __init__(self, body: Callable[[], None], log: Path) -> None:
        parent = os.getpid()
        self._code: int | None = None
        self._pid = os.fork()
        if self._pid == 0:
            _run_and_end(body, log, parent)

    def poll(self) -> int | None:
        """See ``Rank``."""
        if self._code is None:
            done, status = os.waitpid(self._pid, os.WNOHANG)
            if done:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def kill(self) -> None:
        """See ``Rank``."""
        if self.poll() is None:
            os.kill(self._pid, signal.SIGKILL)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


class SpawnedRank:
    """A process of its own."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        with log.open("wb") as stream:
            self._process = subprocess.Popen(command, stdout=stream, stderr=stream)

    def poll(self) -> int | None:
        """See ``Rank``."""
        return self._process.poll()

    def kill(self) -> None:
        """See ``Rank``."""
        self._process.kill()
        self._process.wait()


def _run_and_end(body: Callable[[], None], log: Path, parent: int) -> None:
    code = 1
    # Whatever happens, this child must end here and not go on as a second parent.
    try:
        die_with(parent)
        stream = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(stream, 1)
        os.dup2(stream, 2)
        body()
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@cache
def cuda_starts_in_a_fork() -> bool:
    """Whether a fork of this process can use CUDA; found by trying, since any library may have started it unseen."""
    import torch

    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.cuda.init()
            torch.cuda.get_device_properties(0)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; end now if it is dead already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def wait(ranks: Mapping[int, Rank], deadline: float) -> dict[int, int | None]:
    """Wait for every rank until the deadline, or until the peers of a failed one had their grace.

    Args:
        ranks: By number.
        deadline: On the clock of ``time.monotonic``.

    Returns:
        Exit codes by number; None for those that were still running.
    """
    codes: dict[int, int | None] = dict.fromkeys(ranks)
    while None in codes.values() and time.monotonic() < deadline:
        for number, rank in ranks.items():
            if codes[number] is None:
                codes[number] = rank.poll()
                if codes[number]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.005)
    return codes
