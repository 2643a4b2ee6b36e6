# SPDX-License-Identifier: Apache-2.0
"""Which accesses to memory the streams of a program are bound to order, and which they are not. Pure: no torch.

A program runs in one order; here it is computed which order a GPU is *bound* to: a vector clock a stream, joined where
the program makes one stream wait for another, and one for the host, joined where the host blocks. Rules:

* Two accesses to the same bytes, at least one a write, on different streams, with no chain of waits between them, are a
  race, whether or not it would have struck in one run.
* A free gives memory back to the stream that it was allocated on: whatever that stream does next may be handed it. So
  each use on another stream has to be ordered before that stream at the free, or the allocator be told to wait
  (``record_stream``).

An access that a later one covers, and that is ordered before it, is forgotten: who races with the earlier one races
with the later one too, or is ordered after both.

Not handled: where accesses and waits come from (``stream_checker``).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

Clock = dict[Hashable, int]
Verb = Literal["reads", "writes", "frees"]


@dataclass(frozen=True)
class Access:
    """One read, write or free of bytes ``[start, end)`` of a storage.

    Attributes:
        stream: Whose ``tick``-th operation it is; of a free, the stream that the storage was allocated on.
        operation: Its name.
        place: Where it was asked for, as ``path:line``.
    """

    stream: Hashable
    tick: int
    operation: str
    verb: Verb
    start: int
    end: int
    place: str = ""

    def covers(self, other: Access) -> bool:
        """Whether this one needs all the order that ``other`` needs, in all of its bytes."""
        stronger = self.verb == "writes" or other.verb == "reads"
        return stronger and self.start <= other.start and other.end <= self.end

    def clashes(self, other: Access) -> bool:
        """Whether the two have to be ordered."""
        both_read = self.verb == other.verb == "reads"
        return not both_read and self.start < other.end and other.start < self.end


@dataclass(frozen=True)
class Race:
    """Two accesses to the same bytes that no chain of waits orders; ``later`` came second in the program.

    Attributes:
        names: Of their streams.
    """

    earlier: Access
    later: Access
    names: tuple[str, str]

    def __str__(self) -> str:
        told = [
            f"{access.operation} {access.verb} on {name}{f' at {access.place}' if access.place else ''}"
            for access, name in zip((self.earlier, self.later), self.names, strict=True)
        ]
        return f"{told[0]}, {told[1]}, same bytes, unordered"


@dataclass
class Memory:
    """One storage, from the first time that it is seen until it is freed.

    Attributes:
        allocated_on: A stream; None if it is not known.
        recorded: Streams whose work the allocator waits for before it gives the memory out again.
    """

    allocated_on: Hashable | None = None
    recorded: set[Hashable] = field(default_factory=set)
    accesses: list[Access] = field(default_factory=list)


class StreamHistory:
    """Keeps clocks and accesses, and finds races.

    Streams, events and storages are named by any hashable values. A storage that is freed is forgotten, and its name
    may come again.

    Attributes:
        races: What was found, in order of the program.
        names: Of streams, for messages.
    """

    def __init__(self) -> None:
        self.races: list[Race] = []
        self.names: dict[Hashable, str] = {}
        self._clocks: dict[Hashable, Clock] = {}
        self._events: dict[Hashable, Clock] = {}
        self._host: Clock = {}
        self._memory: dict[Hashable, Memory] = {}

    def _clock(self, stream: Hashable) -> Clock:
        return self._clocks.setdefault(stream, {})

    def stream_waits_stream(self, waiter: Hashable, awaited: Hashable) -> None:
        """All later work on ``waiter`` comes after all earlier work on ``awaited``."""
        _join(self._clock(waiter), self._clock(awaited))

    def event_recorded(self, event: Hashable, *streams: Hashable) -> None:
        """``event`` stands for all earlier work on ``streams``, and for nothing that it stood for before."""
        # What the host has waited for needs no event: all that it issues from now on comes after that.
        clock: Clock = {}
        for stream in streams:
            _join(clock, self._clock(stream))
        self._events[event] = clock

    def event_gone(self, event: Hashable) -> None:
        """``event`` is no more; another one may get its name."""
        self._events.pop(event, None)

    def stream_waits_event(self, waiter: Hashable, event: Hashable) -> None:
        """All later work on ``waiter`` comes after what ``event`` stands for: nothing, if it was not recorded."""
        _join(self._clock(waiter), self._events.get(event, {}))

    def host_waits_stream(self, awaited: Hashable) -> None:
        """The host blocks until all earlier work on ``awaited`` is done."""
        _join(self._host, self._clock(awaited))

    def host_waits_event(self, event: Hashable) -> None:
        """The host blocks until what ``event`` stands for is done."""
        _join(self._host, self._events.get(event, {}))

    def host_waits_all(self) -> None:
        """The host blocks until all earlier work is done."""
        for clock in self._clocks.values():
            _join(self._host, clock)

    def begin(self, stream: Hashable) -> int:
        """The number of a new operation on ``stream``, which comes after all that the host has waited for."""
        clock = self._clock(stream)
        _join(clock, self._host)
        clock[stream] = clock.get(stream, 0) + 1
        return clock[stream]

    def access(self, storage: Hashable, access: Access) -> None:
        """Note an access of the operation begun last on its stream; look for what it is not ordered after."""
        if access.start >= access.end:
            return
        clock = self._clock(access.stream)
        kept = []
        accesses = self._memory.setdefault(storage, Memory()).accesses
        for other in accesses:
            ordered = clock.get(other.stream, 0) >= other.tick
            if not ordered and access.clashes(other):
                self._found(other, access)
            if not (ordered and access.covers(other)):
                kept.append(other)
        accesses[:] = [*kept, access]

    def allocated(self, storage: Hashable, stream: Hashable) -> None:
        """``storage`` is new, its memory from the pool of ``stream``."""
        self._memory[storage] = Memory(stream)

    def recorded(self, storage: Hashable, stream: Hashable) -> None:
        """The allocator was told that ``stream`` uses ``storage`` (``record_stream``)."""
        self._memory.setdefault(storage, Memory()).recorded.add(stream)

    def freed(self, storage: Hashable, place: str = "") -> None:
        """``storage`` goes back to the pool that it came from; look for uses that this is not ordered after."""
        memory = self._memory.pop(storage, None)
        if memory is None or memory.allocated_on is None:
            return
        home = memory.allocated_on
        known = dict(self._host)
        for stream in (home, *memory.recorded):
            _join(known, self._clock(stream))
        for use in memory.accesses:
            if known.get(use.stream, 0) < use.tick:
                self._found(use, Access(home, 0, "the allocator", "frees", use.start, use.end, place))

    def forget(self, storages: Iterable[Hashable]) -> None:
        """Drop storages without a word."""
        for storage in storages:
            self._memory.pop(storage, None)

    def _found(self, earlier: Access, later: Access) -> None:
        first, second = (self.names.get(access.stream, str(access.stream)) for access in (earlier, later))
        self.races.append(Race(earlier, later, (first, second)))


def _join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        clock[stream] = max(clock.get(stream, 0), tick)
