# SPDX-License-Identifier: Apache-2.0
"""``StreamOrder``: producer, communication and consumer in that order, each on its own stream, without the host.

States of one communication::

    open ──► recorded ──► consumed      a consumer's stream comes after it; that may be done by several
                │
                └───────► dropped       nobody came: the allocator is told to wait for it

Rules: whatever stream calls is the producer, whatever stream consumes is the consumer; no stream is guessed. Tensors
are kept until they are consumed, and the allocator is told where another stream than theirs uses them, so that none
of their memory is handed out too early.

Not handled: what the body issues on streams of its own, but for the works of collectives that it waits for;
``torch.cuda.graph`` capture; several devices in one process.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from megatron_fixes.collectives import recorded_streams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self


class Communication:
    """One piece of work on the communication stream, from its producer to its consumers.

    Without a stream of its own it was done in the caller's order, and nothing is left to do.
    """

    __slots__ = ("_event", "_kept", "_made", "_producer", "_stream")

    def __init__(self, stream: Any, producer: Any, tensors: tuple[torch.Tensor, ...]) -> None:
        self._stream, self._producer = stream, producer
        self._kept, self._made = list(tensors), list[torch.Tensor]()
        self._event: Any = None

    def made(self, *tensors: torch.Tensor) -> None:
        """Tell of tensors that the body allocated and consumers will use; kept until then.

        Args:
            tensors: Any dtype and shape, on the stream's device.
        """
        if self._stream is not None:
            self._made += tensors

    def consume(self) -> None:
        """Let the stream that is current now use the results.

        Order: later work on the current stream comes after all that the body put on the communication stream. The host
        does not block. A second call, on another stream, orders that one too.
        """
        if self._event is None:
            return
        consumer = torch.cuda.current_stream()
        if consumer != self._stream:
            consumer.wait_event(self._event)
        # The consumer comes after the communication, so memory that waits for the consumer has waited for both.
        if consumer != self._producer:
            self._record(self._kept, consumer)
        if consumer != self._stream:
            self._record(self._made, consumer)
        self._kept = []

    def _recorded(self) -> None:
        if self._stream is not None:
            self._event = self._stream.record_event()

    @staticmethod
    def _record(tensors: list[torch.Tensor], stream: Any) -> None:
        for tensor in tensors:
            if tensor.is_cuda or recorded_streams.installed():
                tensor.record_stream(stream)

    def __del__(self) -> None:
        if not sys.is_finalizing() and self._stream is not None:
            self._record(self._kept, self._stream)


class StreamOrder:
    """Puts work on a communication stream, behind what it needs and before what needs it.

    ::

        order = StreamOrder.of_its_own()
        with order.communication(gradient) as done:     # behind what wrote the gradient
            dist.all_reduce(gradient)
        ...                                             # overlaps
        done.consume()                                  # before what reads it

    Args:
        stream: CUDA stream to communicate on. None: the one that is current, and there is nothing to order.
    """

    def __init__(self, stream: Any = None) -> None:
        self.stream = stream

    @classmethod
    def of_its_own(cls, priority: int = 0) -> Self:
        """With a new stream of the current device; without one where there is no CUDA.

        Args:
            priority: As of ``torch.cuda.Stream``; lower goes first.
        """
        there = torch.cuda.is_available() or recorded_streams.installed()
        return cls(torch.cuda.Stream(priority=priority) if there else None)

    @contextmanager
    def communication(self, *tensors: torch.Tensor) -> Iterator[Communication]:
        """Run the body on the communication stream.

        Args:
            tensors: What the body reads or writes and was allocated on the current stream; any dtype and shape, on the
                stream's device. Kept until the communication is consumed.

        Order: the body's work comes after all earlier work of the stream that is current at the call; nothing comes
        after the body but by ``consume``. The host does not block. If the body raises, what it has issued is ordered
        and kept all the same.

        Yields:
            The communication, to be consumed after the block.
        """
        if self.stream is None:
            yield Communication(None, None, ())
            return
        producer = torch.cuda.current_stream()
        if producer != self.stream:
            self.stream.wait_stream(producer)
        communication = Communication(self.stream, producer, tensors)
        with torch.cuda.stream(self.stream):
            try:
                yield communication
            finally:
                communication._recorded()
