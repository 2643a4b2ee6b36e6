# SPDX-License-Identifier: Apache-2.0
"""Records which memory each stream reads and writes, and finds pairs that nothing orders (data races).

Runs on CPU under ``shim``. The program runs in one order; the recorder computes the order that a GPU would have
been *bound* to: a vector clock a stream, joined where the program makes one stream wait for another. Two
accesses to the same bytes, at least one a write, on different streams, with no such chain between them, are a
race, whether or not it would have struck in one run.

* Tensor operations run on the current stream. What they read and write comes from the operator's schema, by
  storage and byte range; views touch nothing.
* A collective runs on a stream of its process group, as NCCL's do: that stream waits for the current one at the
  call, and ``Work.wait()`` makes the current stream wait for it.

Limits: ``Work.wait()`` is taken to wait for every collective issued so far, which is exact for synchronous
calls (the only ones on the path with several distributed-optimizer instances) and can hide a race otherwise. A
byte range runs from a tensor's first to its last byte, so two interleaved strided views look as if they
overlapped.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_fixes.proofs import shim

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Clock = dict[int, int]


@dataclass(frozen=True)
class Access:
    """One read or write of bytes ``[start, end)`` of a storage by the ``tick``-th operation on a stream."""

    stream: shim.Stream
    tick: int
    operation: str
    write: bool
    start: int
    end: int


@dataclass(frozen=True)
class Race:
    """Two accesses to the same bytes that no chain of waits orders; ``later`` came second in the program."""

    earlier: Access
    later: Access

    def __str__(self) -> str:
        verbs = ["writes" if access.write else "reads" for access in (self.earlier, self.later)]
        return (
            f"{self.earlier.operation} {verbs[0]} on {self.earlier.stream.name}, "
            f"{self.later.operation} {verbs[1]} on {self.later.stream.name}, same bytes, unordered"
        )


def _join(clock: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        clock[stream] = max(clock.get(stream, 0), tick)


class Recorder:
    """Keeps clocks and accesses; a ``shim.Listener``.

    Storages seen are kept alive until the recorder goes, so that reused memory can't look like shared memory.
    """

    def __init__(self) -> None:
        self.races: list[Race] = []
        self._clocks: dict[int, Clock] = {}
        self._events: dict[int, Clock] = {}
        self._host: Clock = {}
        self._nccl: dict[str, shim.Stream] = {}
        self._accesses: dict[int, list[Access]] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def _clock(self, stream: shim.Stream) -> Clock:
        return self._clocks.setdefault(stream.number, {})

    def stream_waits_stream(self, waiter: shim.Stream, awaited: shim.Stream) -> None:
        """See ``shim.Listener``."""
        _join(self._clock(waiter), self._clock(awaited))

    def event_recorded(self, event: shim.Event, stream: shim.Stream) -> None:
        """See ``shim.Listener``."""
        self._events[event.number] = dict(self._clock(stream))

    def stream_waits_event(self, waiter: shim.Stream, event: shim.Event) -> None:
        """See ``shim.Listener``."""
        _join(self._clock(waiter), self._events.get(event.number, {}))

    def host_waits(self, awaited: shim.Stream | shim.Event | None) -> None:
        """See ``shim.Listener``."""
        if isinstance(awaited, shim.Stream):
            _join(self._host, self._clock(awaited))
        elif isinstance(awaited, shim.Event):
            _join(self._host, self._events.get(awaited.number, {}))
        else:
            for clock in self._clocks.values():
                _join(self._host, clock)

    def collective_stream(self, group: str) -> shim.Stream:
        """The stream that collectives of a process group run on; it waits for the current stream first."""
        stream = self._nccl.setdefault(group, shim.Stream(name=f"NCCL stream of {group}"))
        self.stream_waits_stream(stream, shim.state.current)
        return stream

    def work_waited(self) -> None:
        """``Work.wait()``: the current stream waits for the collectives issued so far."""
        for stream in self._nccl.values():
            self.stream_waits_stream(shim.state.current, stream)

    def operation(
        self, name: str, stream: shim.Stream, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]
    ) -> None:
        """Record one operation on ``stream``; tensors of any dtype and shape, on the CPU, are only described."""
        clock = self._clock(stream)
        _join(clock, self._host)
        tick = clock[stream.number] = clock.get(stream.number, 0) + 1
        for tensors, write in ((reads, False), (writes, True)):
            for tensor in tensors:
                start, end = _byte_range(tensor)
                if start < end:
                    self._access(tensor, Access(stream, tick, name, write, start, end), clock)

    def _access(self, tensor: torch.Tensor, access: Access, clock: Clock) -> None:
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        self._storages.setdefault(key, storage)
        earlier = self._accesses.setdefault(key, [])
        for other in earlier:
            if (
                (other.write or access.write)
                and other.start < access.end
                and access.start < other.end
                and clock.get(other.stream.number, 0) < other.tick
            ):
                self.races.append(Race(other, access))
        earlier.append(access)


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return 0, 0
    size = tensor.element_size()
    start = tensor.storage_offset() * size
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size


# c10d's schemas carry no write marks. An argument is written unless its name begins with "input" or the whole
# operator only reads.
_ONLY_READ = ("send.default", "barrier.default", "monitored_barrier_.default", "check_for_nan.default")


class _Operations(TorchDispatchMode):
    """Feeds every operator call of the ATen and c10d libraries to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        schema = func._schema
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        values = {**dict(zip((a.name for a in schema.arguments), args, strict=False)), **kwargs}
        for argument in schema.arguments:
            tensors = [t for t in tree_leaves(values.get(argument.name)) if isinstance(t, torch.Tensor)]
            if func.namespace == "c10d":
                written = not argument.name.startswith("input") and func.__name__ not in _ONLY_READ
            else:
                written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if written else reads).extend(tensors)
        aliases = [r.alias_info is not None for r in schema.returns]
        if func.namespace == "c10d":
            group = next((v for v in values.values() if isinstance(v, torch.ScriptObject)), None)
            self.recorder.operation(func.name(), self.recorder.collective_stream(_group_name(group)), reads, writes)
        elif not (aliases and all(aliases) and not writes):
            if not any(aliases):
                writes += [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
            self.recorder.operation(func.name(), shim.state.current, reads, writes)
        return result


def _group_name(group: Any) -> str:
    return "all groups" if group is None else str(torch.distributed.ProcessGroup.unbox(group).group_name)


@contextmanager
def recording() -> Iterator[Recorder]:
    """Record everything that happens inside the block; the shim must be installed.

    Yields:
        The recorder, whose ``races`` are complete when the block ends.
    """
    recorder = Recorder()
    work: Any = torch.distributed.Work
    wait = work.wait

    def recorded_wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.work_waited()
        return wait(self, *args, **kwargs)

    shim.listen(recorder)
    work.wait = recorded_wait
    try:
        with _Operations(recorder):
            yield recorder
    finally:
        work.wait = wait
        shim.listen(None)
