# SPDX-License-Identifier: Apache-2.0
"""Waits with a deadline: what is complete at its edge is told as what it is, and no wait is hot. Works are doubles."""

from __future__ import annotations

import time
from typing import Any

import pytest

from megatron_fixes.collectives.waiting import DeadlinePassed, wait_for


class AtTheEdge:
    """A work whose wait times out, and that is complete, or has failed, or goes on, a moment later."""

    def __init__(self, becomes: str) -> None:
        self.becomes, self.waits = becomes, 0

    def is_completed(self) -> bool:
        return self.becomes != "under way"

    def wait(self, *timeout: Any) -> None:
        self.waits += 1
        if self.waits == 1:
            raise RuntimeError("Operation timed out!")
        if self.becomes == "failed":
            raise RuntimeError("Connection closed by peer")


def test_a_work_that_becomes_complete_as_its_wait_ends_is_what_it_became() -> None:
    wait_for([AtTheEdge("complete")], time.monotonic(), on_device=False)
    with pytest.raises(RuntimeError, match="closed by peer"):
        wait_for([AtTheEdge("failed")], time.monotonic(), on_device=False)
    with pytest.raises(DeadlinePassed):
        wait_for([AtTheEdge("under way")], time.monotonic(), on_device=False)


class OnDevice:
    """Double of a work of CUDA tensors, whose ``wait`` does not block the host: complete after some seconds."""

    def __init__(self, seconds: float) -> None:
        self.end, self.asked = time.monotonic() + seconds, 0
        self.complete_at_waits: list[bool] = []

    def is_completed(self) -> bool:
        self.asked += 1
        return time.monotonic() >= self.end

    def wait(self, *timeout: Any) -> None:
        assert not timeout
        self.complete_at_waits.append(time.monotonic() >= self.end)


def test_a_work_on_a_device_is_asked_now_and_then_and_ordered_before_the_stream_once_complete() -> None:
    works = [OnDevice(0.1), OnDevice(0.2)]
    wait_for(works, time.monotonic() + 60.0, on_device=True)
    # A loop without a pause asks a hundred thousand times in that time.
    assert [work.complete_at_waits for work in works] == [[True], [True]]
    assert 2 <= sum(work.asked for work in works) < 500


def test_a_work_on_a_device_that_is_late_is_neither_asked_without_a_pause_nor_waited_for() -> None:
    work, began = OnDevice(60.0), time.monotonic()
    with pytest.raises(DeadlinePassed):
        wait_for([work], began + 0.1, on_device=True)
    assert 0.1 <= time.monotonic() - began < 10.0
    assert work.asked < 500 and work.complete_at_waits == []
