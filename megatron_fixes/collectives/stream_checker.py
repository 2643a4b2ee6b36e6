# SPDX-License-Identifier: Apache-2.0
"""``StreamOrderChecker``: finds accesses to memory that no stream, event, work or host wait orders. For tests.

On a GPU it watches the real streams. Where there is no CUDA it lets a program have ``recorded_streams`` for the time
of its block, and finds what the same program would be free to do on a GPU.

What it can't see, and so neither finds nor takes for an order:

* Kernels that are launched past torch's dispatcher: Triton and other kernels launched by hand, and what C++ calls
  inside one operator. An extension's operator counts as its schema says.
* What runs in ``torch.compile``'s code or in the replay of a CUDA graph, and other processes.
* Host memory: that the host reads a pinned tensor before the copy to it is done.
* Frees of memory that was there before the block or that came past the dispatcher; of what a backward used and what
  NCCL sends and receives, since torch tells the allocator of these itself; in pools of graphs.
* A work that it can't tell apart (one made below Python, or by a back end that gathers collectives): waiting for it is
  taken to wait for all that were issued. A collective is taken to run on one stream a process group.
* A byte range runs from a tensor's first to its last byte: two interleaved strided views look as if they overlapped.
* Without CUDA, what the autograd engine orders: it runs a backward on the stream of the forward, here on the current.

It costs tens of microseconds an operator, and memory for accesses that are not yet ordered.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from megatron_fixes.collectives import recorded_streams
from megatron_fixes.collectives.errors import StreamOrderError
from megatron_fixes.collectives.stream_hooks import listening
from megatron_fixes.collectives.stream_observer import Observer
from megatron_fixes.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from typing_extensions import Self

    from megatron_fixes.collectives.stream_order import Race

_SHOWN = 5


class StreamOrderChecker:
    """Watches a block for reads, writes and frees of tensors that nothing orders after what they need.

    ::

        with StreamOrderChecker() as checker:
            step()
        checker.require_none()

    Args:
        frees: Look at frees too: that memory goes back to the stream that it was allocated on while another one may
            still use it.
        tools: Files whose frames are passed over when a place is told, besides torch's.

    One device a process, and one checker at a time.
    """

    def __init__(self, *, frees: bool = True, tools: Sequence[str] = ()) -> None:
        self._frees, self._tools = frees, tuple(tools)
        self._undo: ExitStack | None = None
        self._observer: Observer | None = None

    @property
    def races(self) -> tuple[Race, ...]:
        """What was found, in order of the program; complete when the block has ended."""
        return () if self._observer is None else tuple(self._observer.history.races)

    def require_none(self) -> None:
        """Raise if anything was found.

        Raises:
            StreamOrderError: With the places of both accesses of each race.
        """
        if not self.races:
            return
        told = list(dict.fromkeys(map(str, self.races)))
        more = [f"and {len(told) - _SHOWN} others"] if len(told) > _SHOWN else []
        raise StreamOrderError(
            f"got {len(self.races)} pairs of accesses that nothing orders, expected none: "
            + "; ".join([*told[:_SHOWN], *more]),
            races=self.races,
            hint="Let the second stream wait for the first (wait_stream, an event, Work.wait), "
            "or call record_stream before memory is let go.",
        )

    def __enter__(self) -> Self:
        if self._undo is not None:
            raise UsageError("got a second start of a StreamOrderChecker, expected one at a time")
        with ExitStack() as undo:
            if not torch.cuda.is_available() and not recorded_streams.installed():
                undo.enter_context(recorded_streams.install())
            recorded = recorded_streams.installed()
            self._observer = Observer(recorded=recorded, frees=self._frees, tools=self._tools)
            undo.enter_context(listening(self._observer))
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            undo.close()
