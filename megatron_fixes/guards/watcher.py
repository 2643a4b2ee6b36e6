# SPDX-License-Identifier: Apache-2.0
"""One thread that looks, at intervals, for collectives on a device whose deadline has passed.

NCCL's ``wait`` does not block the host, and must not be made to: so nobody waits with a deadline. Megatron lets go of
a handle long before the device is done, and the host then blocks somewhere else: what it has let go of is looked at
too (``ledger``). The thread compares times; only for a collective older than the deadline it asks the works, so that a
sound step makes it call nothing of CUDA. A collective is older by the host's clock, counted from when it was issued, so
the deadline has to be longer than what the device may have queued before it. The thread is on the device of the one
that started it: a new thread is on device 0, and would make a context of half a gigabyte there as soon as it asks a
work. Source: https://github.com/meta-pytorch/torchcomms/pull/777 (the same in another watchdog).

Not handled: works of a handle whose form is not known (they pass for complete), and anything after a fork: the child
starts its own thread when it issues something.
"""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

import torch

from megatron_fixes.collectives import threads
from megatron_fixes.events import Event, emit
from megatron_fixes.guards.late import group_is_gone, groups_of, tell_late

if TYPE_CHECKING:
    from megatron_fixes.guards.late import Terms
    from megatron_fixes.guards.ledger import Ledger

SHORTEST_S, LONGEST_S = 0.05, 5.0
LOOKS = 4


class Watcher:
    """See the module's docstring."""

    def __init__(self, ledger: Ledger, terms: Terms) -> None:
        self._ledger, self._terms = ledger, terms
        self._thread: threading.Thread | None = None
        self._end = threading.Event()
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        self._thread, self._end = None, threading.Event()

    @property
    def running(self) -> bool:
        """Whether the thread is there."""
        return self._thread is not None

    def start(self) -> None:
        """Start the thread, if it is not there and the interpreter still starts any."""
        if self._thread is None:
            self._end = threading.Event()
            device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
            self._thread = threads.start(self._run, "megatron-guards", self._end, device)

    def stop(self) -> None:
        """End the thread; it may be at most in the middle of telling."""
        self._end.set()
        self._thread = None

    def _run(self, end: threading.Event, device: int | None) -> None:
        if device is not None:
            torch.cuda.set_device(device)
        while not end.wait(self._interval_s()):
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 - a thread that ends unseen would guard nothing
                emit(Event("guard-failed", f"watching collectives failed: {type(error).__name__}: {error}"))
                return

    def _interval_s(self) -> float:
        deadline_s = self._terms.deadline_s
        return LONGEST_S if deadline_s is None else min(max(deadline_s / LOOKS, SHORTEST_S), LONGEST_S)

    def look(self) -> None:
        """Tell of the oldest collective of every process group that is late now; each once.

        Those that were issued after it on the same group wait for it.
        """
        deadline_s = self._terms.deadline_s
        if deadline_s is None:
            return
        stuck: set[int] = set()
        for outstanding in self._ledger.under_way():
            age_s = time.monotonic() - outstanding.since_s
            if outstanding.complete or not outstanding.on_device or age_s < deadline_s:
                continue
            if group_is_gone(outstanding) or all(work.is_completed() for work in outstanding.works):
                # Complete, and perhaps not waited for yet: a matter of the step's own pace.
                outstanding.complete = True
                outstanding.keep(())
                continue
            groups = set(map(id, groups_of(outstanding)))
            if not groups & stuck and not outstanding.told:
                tell_late(outstanding, age_s, self._terms)
            stuck |= groups
