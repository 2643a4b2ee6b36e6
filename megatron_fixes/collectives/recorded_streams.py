# SPDX-License-Identifier: Apache-2.0
"""Stands for the streams and events of ``torch.cuda`` where there is no CUDA: names without asynchrony.

Work runs at once, in program order; which stream is current, and who waits for whom, is what a GPU would be asked for,
so ``StreamOrderChecker`` can tell on a CPU what order a GPU would be bound to. The classes wait by way of the same
methods as those of torch (``Event.record``, ``Event.wait``), where the checker listens.

Not handled: memory, devices, graphs, and streams made before ``install``.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import Any

import torch

_CPU = torch.device("cpu")
_numbers = itertools.count()


class Stream:
    """Stands for ``torch.cuda.Stream``: a name in whose order work is issued.

    Attributes:
        cuda_stream: Its number, where torch has the handle.
        name: For messages.
    """

    def __init__(self, *_: Any, name: str = "", **__: Any) -> None:
        self.cuda_stream = next(_numbers)
        self.name = name or f"stream {self.cuda_stream}"
        self.device = _CPU

    def __repr__(self) -> str:
        return f"<{self.name}>"

    def wait_stream(self, stream: Stream) -> None:
        """Order later work here after earlier work on ``stream``; the host does not block."""
        self.wait_event(stream.record_event())

    def wait_event(self, event: Event) -> None:
        """Order later work here after ``event``; the host does not block."""
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event`` (a new one if None) at this point of the stream."""
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Block the host until the stream's work is done: it is."""

    def query(self) -> bool:
        """Work runs at once here, so a stream is always idle."""
        return True


class Event:
    """Stands for ``torch.cuda.Event``."""

    def __init__(self, *_: Any, **__: Any) -> None:
        return

    def record(self, stream: Stream | None = None) -> None:
        """Let this event stand for all earlier work on ``stream`` (the current one if None)."""

    def wait(self, stream: Stream | None = None) -> None:
        """Order later work on ``stream`` (the current one if None) after this event."""

    def synchronize(self) -> None:
        """Block the host until this event has happened: it has."""

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


class State:
    """Which stream is current.

    Attributes:
        default: Current in the beginning.
    """

    def __init__(self) -> None:
        self.default = Stream(name="default stream")
        self.current = self.default


state = State()


def replace(owner: Any, name: str, value: Any, undo: ExitStack) -> None:
    """Set an attribute until ``undo`` closes; one that was inherited is inherited again."""
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)


def installed() -> bool:
    """Whether these streams stand in ``torch.cuda``."""
    return torch.cuda.Stream is Stream


def install() -> ExitStack:
    """Put these streams in the place of those of ``torch.cuda``, and let ``record_stream`` take them.

    Returns:
        What puts everything back when it is closed; dropped, nothing is.
    """
    undo = ExitStack()
    double = {
        "Stream": Stream,
        "Event": Event,
        "stream": StreamContext,
        "default_stream": lambda *_: state.default,
        "current_stream": lambda *_: state.current,
        "synchronize": lambda *_: None,
    }
    for name, value in double.items():
        replace(torch.cuda, name, value, undo)
    replace(torch.Tensor, "record_stream", lambda *_: None, undo)
    return undo
