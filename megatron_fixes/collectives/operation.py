# SPDX-License-Identifier: Apache-2.0
"""One asynchronous collective from issue to end, and what keeps its memory when nobody else does.

The tensors of a collective that is under way must not be freed: they are held here until it has ended. One that is
given up or dropped leaves its tensors to its group's record until the back end says that it is complete.

Not handled: deciding what becomes of it (``context``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_fixes.collectives.lifecycle import ENDS, MOVES, State, move
from megatron_fixes.collectives.registry import Adrift
from megatron_fixes.collectives.requests import describe

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from megatron_fixes.collectives.registry import GroupRecord
    from megatron_fixes.collectives.requests import Request
    from megatron_fixes.collectives.streams import Communication


class Operation:
    """A collective that was issued, or a coalesced run of them.

    Attributes:
        sequence: Its number on the group, counted over all contexts of this process.
        state: See ``lifecycle``.
        works: What torch gave back; empty once it has ended.
        communication: Where it was put on a stream of its own, to be consumed after its works; None once it has ended.
    """

    __slots__ = (
        "_code",
        "_instruction",
        "_record",
        "_requests",
        "_versions",
        "communication",
        "sequence",
        "state",
        "works",
    )

    def __init__(
        self,
        requests: Sequence[Request],
        works: list[Any],
        record: GroupRecord,
        frame: FrameType,
        *,
        communication: Communication | None,
        checked: bool,
    ) -> None:
        self._record = record
        self._requests: Sequence[Request] = requests
        self.communication = communication
        self.works = works
        self.sequence = record.count
        self.state: State = "issued"
        self._code, self._instruction = frame.f_code, frame.f_lasti
        self._versions = versions(requests) if checked else ()

    @property
    def place(self) -> str:
        """Where it was issued, as ``path:line``."""
        # Looked up when asked: in a long function it takes longer than all the rest of issuing.
        lines = (line for begin, end, line in self._code.co_lines() if begin <= self._instruction < end)
        return f"{self._code.co_filename}:{next(lines, None) or self._code.co_firstlineno}"

    @property
    def modified(self) -> bool:
        """In checked mode, whether a tensor of it was written to since it was issued."""
        return bool(self._versions) and self._versions != versions(self._requests)

    @property
    def under_way(self) -> bool:
        """Whether the back end may still read or write its tensors."""
        return self._record.aborting() or not all(work.is_completed() for work in self.works)

    @property
    def on_device(self) -> bool:
        """Whether its tensors are on a CUDA device."""
        return bool(self._requests[0].tensors[0].is_cuda)

    def held(self) -> object:
        """Its tensors, works and events, which must not be freed while it is under way."""
        return self._requests, self.works, self.communication

    def to(self, state: State) -> None:
        """Move to a state; at an end, let go of tensors and works unless they may be in use."""
        if state not in MOVES[self.state]:
            move(self.state, state)  # raises; asked only then, since a call takes as long as all the rest here
        self.state = state
        if state in ENDS:
            if state in ("aborted", "dropped") and self.under_way:
                self._record.adrift.append(Adrift(self.works, self._requests, f"{self}, issued at {self.place}"))
            self.works, self._requests, self.communication = [], (), None

    def __str__(self) -> str:
        return f"collective {self.sequence} ({describe(self._requests) if self._requests else self.state})"


def versions(requests: Sequence[Request]) -> tuple[int, ...]:
    """How often each tensor was written to that only the program writes to, and the one of a single all-reduce.

    gloo copies other results through torch, which counts as a write. Tensors of inference mode do not count.
    """
    alone = len(requests) == 1
    tensors = [tensor for request in requests for tensor in (request.tensors[1:] or (request.tensors if alone else ()))]
    return tuple(-1 if tensor.is_inference() else tensor._version for tensor in tensors)
