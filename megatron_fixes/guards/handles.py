# SPDX-License-Identifier: Apache-2.0
"""Waits for what Megatron holds of collectives under way that end in time.

``wait`` of Megatron's handle itself is always called in the end, once, since some do more than wait.

Order: on the CPU the host blocks in a wait with a deadline, as it does without. On CUDA it blocks only in ``drain``,
which comes after a step or a layout was given up; in a step the watcher looks on instead (``watcher``).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from megatron_fixes.collectives import threads
from megatron_fixes.collectives.waiting import DeadlinePassed, wait_for
from megatron_fixes.guards.late import tell_late
from megatron_fixes.guards.ledger import works_of

if TYPE_CHECKING:
    import threading

    from megatron_fixes.guards.late import Terms
    from megatron_fixes.guards.ledger import Outstanding


class StreamEnd:
    """Stands for a work: all that a CUDA stream has been given by now."""

    def __init__(self, stream: Any) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def is_completed(self) -> bool:
        """Whether the stream has come so far; blocks nobody."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Have the current stream wait for it."""
        self._event.wait()


def keep(outstanding: Outstanding) -> None:
    """Keep the works of a handle that names no tensors but its bucket group's: a hang shows after Megatron's wait."""
    handle = outstanding.handle
    if hasattr(handle, "works"):
        outstanding.keep(works_of(handle))


class BoundedHandle:
    """Stands for a handle of CPU tensors in Megatron's attribute: its ``wait`` ends at the deadline.

    The handle is waited for in a thread: gloo's reduce-scatter takes no timeout, never says that it is complete, and
    copies the result when its wait ends. So there is one such thread a handle, which later waits join, and no result is
    copied after the last of them.
    """

    def __init__(self, handle: Any, outstanding: Outstanding, terms: Terms) -> None:
        self.inner = handle
        self._outstanding, self._terms = outstanding, terms
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Wait within the deadline.

        Raises:
            CollectiveTimeoutError: It passed; the collective is still under way and its handle outstanding.
            RuntimeError: The back end ended it with an error.
        """
        self.wait_within(self._terms.deadline_s)

    def wait_within(self, within_s: float | None) -> None:
        """As ``wait``, with another deadline in seconds; None: for ever."""
        if self._thread is None:
            self._thread = threads.start(self._wait, "megatron-guards-wait")
        if self._thread is None:
            self.inner.wait()  # at the interpreter's exit, with no bound but the back end's
            return
        self._thread.join(within_s)
        if self._thread.is_alive():
            raise tell_late(self._outstanding, time.monotonic() - self._outstanding.since_s, self._terms)
        if self._error is not None:
            raise self._error

    @property
    def waiting(self) -> bool:
        """Whether its thread is in the middle of a wait."""
        return self._thread is not None and self._thread.is_alive()

    def _wait(self) -> None:
        try:
            self.inner.wait()
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            self._error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def drain(handle: Any, outstanding: Outstanding | None, terms: Terms, within_s: float | None) -> None:
    """Wait for a handle; in the end as Megatron does.

    Args:
        handle: What Megatron's attribute holds; None if it has let go of it.
        outstanding: What is known of it, to be told if it is late.
        terms: Whether the group is aborted then.
        within_s: In seconds; None waits as torch does.

    Raises: see ``BoundedHandle.wait``.
    """
    if within_s is None or outstanding is None:
        handle.wait()
    elif outstanding.on_device:
        try:
            wait_for(outstanding.works, time.monotonic() + within_s, on_device=True)
        except DeadlinePassed:
            raise tell_late(outstanding, time.monotonic() - outstanding.since_s, terms) from None
        if handle is not None:
            handle.wait()
    else:
        bounded = handle if isinstance(handle, BoundedHandle) else BoundedHandle(handle, outstanding, terms)
        bounded.wait_within(within_s)
