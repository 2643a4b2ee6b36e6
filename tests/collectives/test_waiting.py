# SPDX-License-Identifier: Apache-2.0
"""Waits with a deadline, at its edge: what is complete by then is told as what it is. Works are doubles."""

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
