# SPDX-License-Identifier: Apache-2.0
"""Lets Megatron-LM's DistributedDataParallel, pipeline schedules and optimizers run on CPU tensors with gloo.

A double for the part of ``torch.cuda`` that Megatron touches on these paths, installed only in processes that
the proof harness started for the gloo backend. It changes where tensors live and which stream is current;
arithmetic, autograd and process groups are the real ones.

* ``torch.cuda.current_device()`` answers ``cpu``, and ``device="cuda"`` in a tensor factory means ``cpu``.
* ``tensor.type()`` names the type as if the tensor were on a GPU (the mixed-precision optimizers sort parameters by
  that name), and ``tensor.cuda()`` gives the tensor itself, as it does for one that is there already.
* Streams and events are names without asynchrony: work runs at once, in program order. A listener hears every
  wait and can check afterwards what order a GPU would have been bound to (``recorder``).
* ``torch.utils.cpp_extension.load_inline`` raises ``RuntimeError``, since megatron-core 0.15 compiles an
  extension on import and falls back when that fails.

Not handled: memory (allocator, pinned memory), graphs, and anything that needs a kernel.
"""

from __future__ import annotations

import itertools
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class Listener(Protocol):
    """Hears the order that the program asks for between streams."""

    def stream_waits_stream(self, waiter: Stream, awaited: Stream) -> None:
        """All later work on ``waiter`` comes after all earlier work on ``awaited``."""

    def event_recorded(self, event: Event, stream: Stream) -> None:
        """``event`` stands for all earlier work on ``stream``."""

    def stream_waits_event(self, waiter: Stream, event: Event) -> None:
        """All later work on ``waiter`` comes after what ``event`` stands for."""

    def host_waits(self, awaited: Stream | Event | None) -> None:
        """The host blocks for a stream, an event, or (None) everything."""


class _Deaf:
    def stream_waits_stream(self, waiter: Stream, awaited: Stream) -> None: ...
    def event_recorded(self, event: Event, stream: Stream) -> None: ...
    def stream_waits_event(self, waiter: Stream, event: Event) -> None: ...
    def host_waits(self, awaited: Stream | Event | None) -> None: ...


_numbers = itertools.count()


class Stream:
    """Stands for ``torch.cuda.Stream``: a name in whose order work is issued."""

    def __init__(self, *_: Any, name: str = "", **__: Any) -> None:
        self.number = next(_numbers)
        self.name = name or f"stream {self.number}"
        self.device = CPU

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def wait_stream(self, stream: Stream) -> None:
        """Order later work here after earlier work on ``stream``; the host does not block."""
        state.listener.stream_waits_stream(self, stream)

    def wait_event(self, event: Event) -> None:
        """Order later work here after ``event``; the host does not block."""
        state.listener.stream_waits_event(self, event)

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event`` (a new one if None) at this point of the stream."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Block the host until the stream's work is done."""
        state.listener.host_waits(self)

    def query(self) -> bool:
        """Work runs at once here, so a stream is always idle."""
        return True


class Event:
    """Stands for ``torch.cuda.Event``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.number = next(_numbers)

    def record(self, stream: Stream | None = None) -> None:
        """Let this event stand for all earlier work on ``stream`` (the current one if None)."""
        state.listener.event_recorded(self, stream or state.current)

    def wait(self, stream: Stream | None = None) -> None:
        """Order later work on ``stream`` after this event."""
        state.listener.stream_waits_event(stream or state.current, self)

    def synchronize(self) -> None:
        """Block the host until this event has happened."""
        state.listener.host_waits(self)

    def query(self) -> bool:
        """Work runs at once here, so an event has always happened."""
        return True


class StreamContext:
    """Stands for ``torch.cuda.stream(s)``; real code enters one object several times, so it keeps a stack."""

    def __init__(self, stream: Stream | None) -> None:
        self.stream = stream
        self._previous: list[Stream] = []

    def __enter__(self) -> None:
        self._previous.append(state.current)
        if self.stream is not None:
            state.current = self.stream

    def __exit__(self, *_: object) -> None:
        state.current = self._previous.pop()


class _State:
    def __init__(self) -> None:
        self.default = Stream(name="default stream")
        self.current = self.default
        self.listener: Listener = _Deaf()


state = _State()


class _CudaMeansCpu(TorchFunctionMode):
    """Maps ``device="cuda"`` in any torch function to ``cpu``, and lets a CPU tensor pass for one on a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs = {**kwargs, "device": CPU}
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def install() -> None:
    """Put the double in place for the rest of this process. Call before megatron is imported."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.Stream = Stream
    cuda.Event = Event
    cuda.stream = StreamContext
    cuda.default_stream = lambda *_: state.default
    cuda.current_stream = lambda *_: state.current
    cuda.synchronize = lambda *_: state.listener.host_waits(None)

    import torch.utils.cpp_extension as cpp_extension

    def no_inline_extensions(*_: Any, **__: Any) -> None:
        raise RuntimeError("inline extensions are not built where there is no GPU")

    extension: Any = cpp_extension
    extension.load_inline = no_inline_extensions
    _CudaMeansCpu().__enter__()


def listen(listener: Listener | None) -> None:
    """Send every wait to ``listener`` from now on; None stops it."""
    state.listener = listener or _Deaf()
