# SPDX-License-Identifier: Apache-2.0
"""Turns what a torch program does into a ``StreamHistory``: tensors to storages and byte ranges, works to collectives.

* What an operator reads and writes comes from its schema; views, and what looks at shapes alone, touch nothing. What
  it returns and is no view is new memory of the current stream's pool, and written: the allocator may hand out memory
  that earlier work of that stream still uses.
* A collective runs on a stream of its process group, as NCCL's do: that stream waits for the current one at the
  call, and ``Work.wait()`` makes the current stream wait for it.
* A storage is watched through a weak reference, so that it is freed when the program lets go of it. What that
  means is looked at before the next thing that the program does.

Not handled: how it gets to know (``stream_hooks``); tensors on other devices, and two devices in one process.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
import weakref
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from megatron_fixes.collectives.stream_order import Access, StreamHistory

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from types import FrameType

# The schemas of c10d carry no write marks. An argument is written unless its name begins with "input" or the whole
# operator only reads.
_ONLY_READ = ("send.default", "check_for_nan.default")
# Their tensor only says which device is meant.
_BARRIERS = ("c10d::barrier", "c10d::monitored_barrier_")
_C10D = ("c10d", "_c10d_functional")
# NCCL's tells the allocator which stream uses a tensor, below the dispatcher, where other collectives keep the tensor.
_RECORDS = ("c10d::send", "c10d::recv_", "c10d::recv_any_source_")
# These touch no memory though their schemas say so.
_BOOKKEEPING = (
    "aten::record_stream",
    "aten::set_",
    "aten::is_same_size",
    "aten::is_set_to",
    "aten::is_pinned",
    "_c10d_functional::_wrap_tensor_autograd",
)
_WAIT = "_c10d_functional::wait_tensor"
# These give numbers, or tensors of a size that depends on numbers, to the host, which has to wait for them.
_FOR_THE_HOST = ("aten::_local_scalar_dense", "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2")
_COPIES = ("aten::copy_", "aten::_to_copy")
_NOT_A_USERS = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(__file__) + os.sep,
    contextlib.__file__,
    weakref.__file__,
)


def place(tools: tuple[str, ...] = ()) -> str:
    """Where the program is, as ``path:line``: the innermost frame that is neither torch's nor this room's.

    Args:
        tools: Files, or folders with their separator, that are not the program either.

    Threads of autograd have no frame of the program; there it is where the main thread waits for them.
    """
    passed = (*_NOT_A_USERS, *tools)
    told = _outside(sys._getframe(1), passed)
    if told is None and (main := threading.main_thread()) is not threading.current_thread():
        # Not for the thread itself: a frame that holds itself would keep the program's tensors.
        told = _outside(sys._current_frames().get(main.ident or 0), passed)
    return told or "an unknown place"


def _outside(frame: FrameType | None, passed: tuple[str, ...]) -> str | None:
    while frame is not None and frame.f_code.co_filename.startswith(passed):
        frame = frame.f_back
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """From a strided tensor's first to after its last byte, within its storage."""
    if tensor.numel() == 0:
        return 0, 0
    size = tensor.element_size()
    start = tensor.storage_offset() * size
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size


class Observer:
    """What the hooks tell, in words of torch.

    Args:
        recorded: Streams are ``recorded_streams``, and every tensor counts; else those on a CUDA device.
        frees: Look at frees too.
        tools: See ``place``.

    Attributes:
        history: What came of it.
        coalescing: Collectives are gathered, and only the work of them all can be waited for.
    """

    def __init__(self, *, recorded: bool, frees: bool, tools: tuple[str, ...] = ()) -> None:
        self.history = StreamHistory()
        self._recorded, self._frees, self._tools = recorded, frees, tools
        self._numbers = itertools.count()
        # Kept, not held weakly: events of CUDA leave weak references to them dangling (torch 2.11).
        self._events: dict[int, tuple[Any, int]] = {}
        self._storages: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._gone: deque[tuple[int, int, str]] = deque()
        self._collectives: dict[str, str] = {}
        self._works: weakref.WeakKeyDictionary[Any, tuple[str, int]] = weakref.WeakKeyDictionary()
        self._handed_over: Any = None
        self.coalescing = False
        self._issuing: str | None = None

    def stream(self, stream: Any = None) -> Hashable:
        """The name in the history of a stream, the current one if None."""
        if stream is None:
            stream = torch.cuda.current_stream()
        elif not hasattr(stream, "cuda_stream"):  # a torch.Stream
            stream = torch.cuda.Stream(
                stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
            )
        key: int = stream.cuda_stream
        if key not in self.history.names:
            self.history.names[key] = getattr(stream, "name", f"stream {key:#x}" if key else "default stream")
        return key

    def event(self, event: Any) -> Hashable:
        """The name in the history of an event."""
        if id(event) not in self._events:
            self._events[id(event)] = event, next(self._numbers)
        return ("event", self._events[id(event)][1])

    def settle(self) -> None:
        """Look at what was freed since; call it before anything else that is told."""
        self._handed_over = None
        while self._gone:
            address, number, where = self._gone.popleft()
            if self._storages.get(address, (None,))[0] == number:
                del self._storages[address]
            if self._frees:
                self.history.freed(number, where)
            else:
                self.history.forget((number,))

    def stop(self) -> None:
        """Let go of everything; what is freed later is not looked at."""
        self.settle()
        self._storages.clear()
        self._events.clear()
        self._gone.clear()

    def runs(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and tell what it does."""
        self.settle()
        if func.namespace in _C10D and func._schema.name not in (*_BOOKKEEPING, _WAIT):
            return self._collective(func, args, kwargs)
        stream = self.stream()
        result = func(*args, **kwargs)
        self.settle()
        name, schema = func._schema.name, func._schema
        if name == _WAIT:
            self.works_waited()
        returned = [r.alias_info is not None for r in schema.returns]
        reads, writes = self._arguments(func, args, kwargs)
        if name in _BOOKKEEPING or (returned and all(returned) and not writes):
            return result
        made = self._made(schema, result, stream)
        if reads or writes or made:
            looks_only = name.startswith("aten::new_") or name.endswith("_like")
            self._accesses(func, stream, self.history.begin(stream), () if looks_only else reads, (*writes, *made))
            if name in _FOR_THE_HOST or (name in _COPIES and self._blocks(args, result, kwargs)):
                self.history.host_waits_stream(stream)
        return result

    def _collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        reads, writes = self._arguments(func, args, kwargs)
        if not self._on_device(args):
            # Of host memory alone: the host waits for it, and streams do not.
            result = func(*args, **kwargs)
            self._hand_over(func, result)
            return result
        group = _group_name(_values(func, args, kwargs))
        stream = self._collectives.setdefault(group, f"NCCL stream of {group}")
        current = self.stream()
        self.history.stream_waits_stream(stream, current)
        tick = self.history.begin(stream)
        self._issuing = stream
        try:
            result = func(*args, **kwargs)
        finally:
            self._issuing = None
        self.settle()
        if func.namespace == "_c10d_functional":
            writes += self._made(func._schema, result, current)
        self._accesses(func, stream, tick, reads, writes)
        if func.namespace == "c10d":
            self._hand_over(func, result, stream)
        return result

    def _hand_over(self, func: Any, result: Any, *streams: Hashable) -> None:
        """Remember the work of a collective; without one (NCCL, not asynchronous) the current stream comes after."""
        barrier = func._schema.name in _BARRIERS
        boxed = next((w for w in tree_leaves(result) if isinstance(w, torch.ScriptObject)), None)
        work = None if boxed is None else torch.distributed.Work.unbox(boxed)
        name = ("barrier" if barrier else "work", next(self._numbers))
        self.history.event_recorded(name, *streams)
        if work is not None:
            self._works[work] = name
            # Held until it is in the program's hands: an object of Python that nobody holds would be made anew.
            self._handed_over = work
        elif not self.coalescing:
            self._waited(name)

    def work_waited(self, work: Any) -> None:
        """``Work.wait()``: the current stream waits for that collective, or for all if it is not known."""
        self.settle()
        if (event := self._works.get(work)) is None:
            self.works_waited()
        else:
            self._waited(event)

    def _waited(self, event: tuple[str, int]) -> None:
        self.history.stream_waits_event(self.stream(), event)
        if event[0] == "barrier":
            self.history.host_waits_event(event)

    def coalesced(self, work: Any) -> None:
        """A coalesced run is issued; without a work it ran in the order of the current stream."""
        self.settle()
        self.coalescing = False
        if work is None:
            self.works_waited()

    def works_waited(self) -> None:
        """The current stream waits for the collectives issued so far."""
        for stream in self._collectives.values():
            self.history.stream_waits_stream(self.stream(), stream)

    def event_traced(self, event: int, stream: int) -> None:
        """An event, by its handle, was recorded below Python; during a collective it stands for that too."""
        issued = self._issuing if self._issuing is not None and stream != self.stream() else None
        self.history.event_recorded(("handle", event), stream, *([issued] if issued else []))

    def stream_recorded(self, tensor: Any, stream: Any) -> None:
        """``Tensor.record_stream``."""
        if self._counts(tensor):
            self.history.recorded(self._number(tensor), self.stream(stream))

    def storage_resized(self, storage: Any) -> None:
        """``UntypedStorage.resize_`` gave its memory back, and got other memory."""
        if (known := self._storages.get(storage._cdata)) is not None:
            if self._frees:
                self.history.freed(known[0], place(self._tools))
            self.history.allocated(known[0], self.stream())

    def _arguments(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The tensors that count among the arguments: those that are read alone, and those that are written."""
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        values = {} if func._schema.name in _BARRIERS else _values(func, args, kwargs)
        for argument in func._schema.arguments:
            if func.namespace == "c10d":
                written = not argument.name.startswith("input") and func.__name__ not in _ONLY_READ
            else:
                written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if written else reads).extend(filter(self._counts, tree_leaves(values.get(argument.name))))
        return reads, writes

    def _made(self, schema: Any, result: Any, stream: Hashable) -> list[torch.Tensor]:
        """The tensors that count among the results and are no views; they are allocated on ``stream`` if new."""
        made: list[torch.Tensor] = []
        results = result if len(schema.returns) > 1 else (result,)
        for declared, value in zip(schema.returns, results, strict=False):
            if declared.alias_info is None:
                made += filter(self._counts, tree_leaves(value))
        for tensor in made:
            if tensor.untyped_storage()._cdata not in self._storages:
                self.history.allocated(self._number(tensor), stream)
        return made

    def _accesses(self, func: Any, stream: Hashable, tick: int, reads: Sequence[Any], writes: Sequence[Any]) -> None:
        where = place(self._tools)
        # The autograd engine tells the allocator itself, below the dispatcher, where gradients change streams.
        told = torch._C._current_graph_task_id() != -1 or func._schema.name in _RECORDS
        for tensor in (*reads, *writes) if told else ():
            self.history.recorded(self._number(tensor), stream)
        for tensor in reads:
            access = Access(stream, tick, func.name(), "reads", *byte_range(tensor), where)
            self.history.access(self._number(tensor), access)
        for tensor in writes:
            access = Access(stream, tick, func.name(), "writes", *byte_range(tensor), where)
            self.history.access(self._number(tensor), access)

    def _counts(self, value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.layout == torch.strided
            and (self._recorded or value.is_cuda)
            and torch._C._has_storage(value)
        )

    def _on_device(self, args: tuple[Any, ...]) -> bool:
        return any(map(self._counts, tree_leaves(args)))

    def _blocks(self, args: tuple[Any, ...], result: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a copy blocks the host: between host and device, unless it was asked not to."""
        asked_not_to = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        everything = [t for t in tree_leaves((args, result)) if isinstance(t, torch.Tensor)]
        return not self._recorded and not asked_not_to and not all(t.is_cuda for t in everything)

    def _number(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._storages:
            number = next(self._numbers)
            self._storages[address] = number, weakref.ref(storage, partial(self._free, address, number))
        return self._storages[address][0]

    def _free(self, address: int, number: int, _: Any) -> None:
        # Called from wherever the last reference goes, which may be inside this class: so it is only noted here.
        self._gone.append((address, number, place(self._tools)))


def _values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}


def _group_name(values: dict[str, Any]) -> str:
    """Of the group among the arguments of a collective."""
    group = next((value for value in values.values() if isinstance(value, torch.ScriptObject)), None)
    if group is None:
        return str(values.get("group_name", "all groups"))
    return str(torch.distributed.ProcessGroup.unbox(group).group_name)
