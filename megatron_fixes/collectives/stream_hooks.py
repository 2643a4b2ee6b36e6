# SPDX-License-Identifier: Apache-2.0
"""Listens to torch for an ``Observer``: operators, waits of streams, events and works, and what becomes of memory.

Everything is put back when the block ends. On CUDA, torch's own GPU trace tells of events that are recorded and waited
for below Python too, such as those of the autograd engine; it can't be switched off again, but then tells nobody.
Source: ``torch.cuda._gpu_trace``, which CUDA Sanitizer uses.

Not handled: names that a module has imported out of ``torch.cuda`` (``from torch.cuda import synchronize``), where
there is no trace.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_fixes.collectives import recorded_streams
from megatron_fixes.collectives.recorded_streams import replace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from megatron_fixes.collectives.stream_observer import Observer


class _Operators(TorchDispatchMode):  # type: ignore[misc]
    """Feeds every operator call to an observer."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self.observer = observer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        plain = torch._C._disabled_torch_dispatch_impl
        if any(kind.__torch_dispatch__ is not plain for kind in types):
            # A wrapper (DTensor, a tensor that waits for its collective) is asked first for what it is made of.
            return NotImplemented
        return self.observer.runs(func, args, kwargs or {})


@contextmanager
def listening(observer: Observer) -> Iterator[None]:
    """Tell ``observer`` of everything inside the block."""
    with ExitStack() as undo:
        undo.callback(observer.stop)
        _listen_to_python(observer, undo)
        if not recorded_streams.installed():
            _listen_to_trace(observer, undo)
        undo.enter_context(_Operators(observer))
        yield


def _after(owner: Any, name: str, tell: Callable[..., None], undo: ExitStack) -> None:
    """Call ``tell`` with the result and the arguments of each call of a function that has not raised."""
    original = getattr(owner, name)

    def hooked(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        tell(result, *args, **kwargs)
        return result

    replace(owner, name, hooked, undo)


def _before(owner: Any, name: str, tell: Callable[[Any], None], undo: ExitStack) -> None:
    """Call ``tell`` with the object before each call of a method."""
    original = getattr(owner, name)

    def hooked(this: Any, *args: Any, **kwargs: Any) -> Any:
        tell(this)
        return original(this, *args, **kwargs)

    replace(owner, name, hooked, undo)


def _listen_to_python(observer: Observer, undo: ExitStack) -> None:
    history = observer.history

    def recorded(_: Any, event: Any, stream: Any = None) -> None:
        observer.settle()
        history.event_recorded(observer.event(event), observer.stream(stream))

    def waited(_: Any, event: Any, stream: Any = None) -> None:
        observer.settle()
        history.stream_waits_event(observer.stream(stream), observer.event(event))

    def host_saw_event(happened: Any, event: Any) -> None:
        observer.settle()
        if happened is not False:
            history.host_waits_event(observer.event(event))

    def host_saw_stream(idle: Any, stream: Any) -> None:
        observer.settle()
        if idle is not False:
            history.host_waits_stream(observer.stream(stream))

    def host_saw_all(*_: Any, **__: Any) -> None:
        observer.settle()
        history.host_waits_all()

    def kept(_: Any, tensor: Any, stream: Any) -> None:
        observer.settle()
        observer.stream_recorded(tensor, stream)

    cuda, work = torch.cuda, torch.distributed.Work
    _after(cuda.Event, "record", recorded, undo)
    _after(cuda.Event, "wait", waited, undo)
    _after(cuda.Event, "synchronize", host_saw_event, undo)
    _after(cuda.Stream, "synchronize", host_saw_stream, undo)
    if not recorded_streams.installed():
        # There, work runs at once, and the answer is always yes.
        _after(cuda.Event, "query", host_saw_event, undo)
        _after(cuda.Stream, "query", host_saw_stream, undo)
    _after(cuda, "synchronize", host_saw_all, undo)
    _after(torch.Tensor, "record_stream", kept, undo)
    _listen_to_resizes(observer, undo)
    _listen_to_coalescing(observer, undo)
    for name in ("wait", "synchronize", "block_current_stream"):
        if hasattr(work, name):
            # Before: gloo's wait() copies results, and what a work keeps is let go of in it.
            _before(work, name, observer.work_waited, undo)


def _listen_to_coalescing(observer: Observer, undo: ExitStack) -> None:
    def began(*_: Any) -> None:
        observer.coalescing = True

    group = torch.distributed.ProcessGroup
    _after(group, "_start_coalescing", began, undo)
    _after(group, "_end_coalescing", lambda work, *_, **__: observer.coalesced(work), undo)


def _listen_to_resizes(observer: Observer, undo: ExitStack) -> None:
    original = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        observer.settle()
        before = storage.data_ptr()
        result = original(storage, size)
        if storage.data_ptr() != before:
            observer.storage_resized(storage)
        return result

    replace(torch.UntypedStorage, "resize_", resize, undo)


def _listen_to_trace(observer: Observer, undo: ExitStack) -> None:
    import torch.cuda._gpu_trace as trace

    history = observer.history

    def settled(tell: Callable[..., None]) -> Callable[..., None]:
        def told(*handles: int) -> None:
            observer.settle()
            tell(*handles)

        return told

    callbacks: list[tuple[Any, Callable[..., None]]] = [
        (trace.EventRecordCallbacks, settled(observer.event_traced)),
        (
            trace.EventWaitCallbacks,
            settled(lambda event, stream: history.stream_waits_event(stream, ("handle", event))),
        ),
        # Not settled: NCCL's watchdog deletes events from a thread of its own.
        (trace.EventDeletionCallbacks, lambda event: history.event_gone(("handle", event))),
        (trace.EventSynchronizationCallbacks, settled(lambda event: history.host_waits_event(("handle", event)))),
        (trace.StreamSynchronizationCallbacks, settled(history.host_waits_stream)),
        (trace.DeviceSynchronizationCallbacks, settled(history.host_waits_all)),
    ]
    torch._C._activate_gpu_trace()
    for registry, callback in callbacks:
        registry.add_callback(callback)
        undo.callback(registry.callback_list.remove, callback)
