# SPDX-License-Identifier: Apache-2.0
"""Waits for works, with or without a deadline, without a hot loop.

Order: without a deadline, ``Work.wait``: on the CPU the host blocks until the work is complete; on CUDA the current
stream is ordered after it and the host goes on. With a deadline the host blocks on both, since only so it can tell: on
CUDA by asking at growing intervals, and then the current stream is ordered after the work.
Source: ``Work.wait`` of torch.distributed; NCCL's takes a timeout only in blocking-wait mode.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

# gloo counts in milliseconds.
TICK_S = 1e-3
SHORTEST_SLEEP_S = 20e-6
LONGEST_SLEEP_S = 2e-3


class DeadlinePassed(Exception):
    """A work was not complete in time."""


def wait_for(works: Iterable[Any], deadline: float | None, *, on_device: bool) -> None:
    """Wait for works, in order.

    Args:
        works: ``torch.distributed.Work``.
        deadline: On the clock of ``time.monotonic``; None waits as torch does.
        on_device: They are works of CUDA tensors.

    Raises:
        DeadlinePassed: At the deadline; the works are still under way.
        RuntimeError: A work has failed, as the back end says it.
    """
    for work in works:
        if deadline is None:
            work.wait()
        elif on_device:
            _poll(work, deadline)
            work.wait()
        else:
            left = deadline - time.monotonic()
            try:
                # gloo takes a timeout of zero for none.
                work.wait(timedelta(seconds=max(left, TICK_S)))
            except RuntimeError:
                # A work that failed says that it is complete, except for gloo's reduce-scatter: see ``ended``.
                if not work.is_completed() and time.monotonic() >= deadline - 2 * TICK_S:
                    raise DeadlinePassed from None
                raise


def ended(work: Any, *, on_device: bool) -> bool:
    """Whether a work is over, well or not. On the CPU the host may block for a millisecond.

    gloo's reduce-scatter never says that it is complete (torch 2.13): its last part runs in ``wait``. So a work that
    does not say so is waited for as briefly as can be.
    """
    if work.is_completed():
        return True
    if on_device:
        return False
    began = time.monotonic()
    try:
        work.wait(timedelta(seconds=TICK_S))
    except RuntimeError:
        return time.monotonic() - began < 0.9 * TICK_S
    return True


def _poll(work: Any, deadline: float) -> None:
    pause = SHORTEST_SLEEP_S
    while not work.is_completed():
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlinePassed
        time.sleep(min(pause, left))
        pause = min(1.5 * pause, LONGEST_SLEEP_S)
