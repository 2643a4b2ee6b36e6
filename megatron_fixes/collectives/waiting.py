# SPDX-License-Identifier: Apache-2.0
"""Waits for works within a deadline, without a hot loop.

Order: on the CPU ``Work.wait`` blocks the host until the work is complete; on CUDA it orders the current stream after
it, and the host goes on. With a deadline the host blocks on both, since only so it can tell: on CUDA by asking at
growing intervals, and then the current stream is ordered after the work.
Source: ``Work.wait`` of torch.distributed; NCCL's takes a timeout only in blocking-wait mode.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from megatron_fixes.collectives import threads
from megatron_fixes.config import LONGEST_S
from megatron_fixes.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

# gloo counts in milliseconds.
TICK_S = 1e-3
SHORTEST_SLEEP_S = 20e-6
LONGEST_SLEEP_S = 2e-3


class DeadlinePassed(Exception):
    """A work was not complete in time."""


def require_time(name: str, value: Any) -> None:
    """Refuse what can't be waited for.

    Raises:
        UsageError: It is no number, not more than 0, or has no end.
    """
    if not isinstance(value, (int, float)) or not 0 < value <= LONGEST_S:
        raise UsageError(f"got {name}={value!r}, expected more than 0 seconds and at most {LONGEST_S:g}")


def wait_for(works: Iterable[Any], deadline: float, *, on_device: bool) -> None:
    """Wait for works, in order, within a deadline.

    Args:
        works: ``torch.distributed.Work``.
        deadline: On the clock of ``time.monotonic``.
        on_device: They are works of CUDA tensors.

    Raises:
        DeadlinePassed: At the deadline; the works are still under way.
        RuntimeError: A work has failed, as the back end says it.
    """
    for work in works:
        if on_device:
            _poll(work, deadline)
            work.wait()
        else:
            left = deadline - time.monotonic()
            try:
                # gloo takes a timeout of zero for none.
                work.wait(timedelta(seconds=max(left, TICK_S)))
            except RuntimeError:
                # A work that failed is complete; one whose wait timed out is not.
                if not work.is_completed():
                    raise DeadlinePassed from None
                # It may have become so since its wait timed out: now it says which, and does not block.
                work.wait(timedelta(seconds=TICK_S))


class ThreadedWork:
    """Stands for a work that takes no timeout and never says that it is complete: a thread of its own waits for it.

    That is gloo's reduce-scatter (torch 2.13), whose last part, a copy of the result, runs in ``wait``. The thread ends
    with the work; it is a daemon, so that the interpreter's exit doesn't wait for a peer. Where none can be started any
    more, in functions of ``atexit`` since Python 3.12, ``wait`` itself waits, and has no bound but the back end's.
    """

    def __init__(self, work: Any) -> None:
        self._work = work
        self._ended = threading.Event()
        self._error: RuntimeError | None = None
        self._thread = threads.start(self._wait, "megatron-fixes-wait")

    def _wait(self) -> None:
        try:
            self._work.wait()
        except RuntimeError as error:
            self._error = error
        self._work = None
        self._ended.set()

    def is_completed(self) -> bool:
        """See ``torch.distributed.Work``."""
        return self._ended.is_set()

    def wait(self, timeout: timedelta | None = None) -> None:
        """See ``torch.distributed.Work``.

        Raises:
            RuntimeError: It failed, or it is not complete at the timeout; then it goes on.
        """
        if self._thread is None and not self._ended.is_set():
            self._wait()
        if not self._ended.wait(timeout.total_seconds() if timeout else None):
            raise RuntimeError("Operation timed out!")
        if self._error is not None:
            raise self._error


def _poll(work: Any, deadline: float) -> None:
    pause = SHORTEST_SLEEP_S
    while not work.is_completed():
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlinePassed
        time.sleep(min(pause, left))
        pause = min(1.5 * pause, LONGEST_SLEEP_S)
