# SPDX-License-Identifier: Apache-2.0
"""The guard ``streams``: the stream of a collective comes after the one that wrote its input.

With several distributed-optimizer instances and overlap, ``start_grad_sync`` reduces on ``communication_stream``. It
is called by the hook of a bucket group's last gradient, so the stream that is current then is the one that hooks
accumulate on, and the one that the gradients are scaled on. While it runs, this stream's ``wait_stream`` is looked at:
where Megatron has it wait for another than the current one (the default stream: MF0001, up to 0.16.1), the missing wait
is added there, between scaling and collective, and told once a bucket group. After ``finish_grad_sync`` the current
stream is ordered after the communication stream in the same way.

Not handled: hooks of one bucket group that run on several streams (autograd runs them on the stream that the
parameters' accumulators were made on, one for a whole DistributedDataParallel), and collectives that Megatron issues
on the current stream, which c10d orders itself. One instance, or tensors on the CPU: nothing is done.

``ColumnParallelLinear``: once a process, when a layer is made and CUDA runs, ``launch_order`` judges what the order of
its collective in backward relies on. Layers of TransformerEngine are their own, and are not looked at.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch

from megatron_fixes.events import Event, emit
from megatron_fixes.guards.attach import innermost
from megatron_fixes.guards.launch_order import VARIABLE, LaunchFacts, Verdict, judge
from megatron_fixes.guards.ledger import LEDGER

if TYPE_CHECKING:
    from collections.abc import Callable

LEVELS: dict[Verdict, int] = {
    "kept": logging.DEBUG,
    "not-needed": logging.DEBUG,
    "not-asked-for": logging.INFO,
    "not-kept": logging.WARNING,
    "set-too-late": logging.WARNING,
}
_first_look: tuple[bool, str | None] = (False, None)
_judged = False


class CheckedWait:
    """Stands for ``wait_stream`` of a communication stream while a bucket group starts its reduction."""

    __slots__ = ("_bucket_group", "_stream")

    def __init__(self, bucket_group: Any, stream: Any) -> None:
        self._bucket_group, self._stream = bucket_group, stream

    def __call__(self, awaited: Any) -> None:
        """Wait for it, and for the current stream too if that is another."""
        wait: Callable[[Any, Any], None] = type(self._stream).wait_stream
        wait(self._stream, awaited)
        current = torch.cuda.current_stream()
        if current != awaited:
            wait(self._stream, current)
            _tell(self._bucket_group, "the reduction was not ordered after the stream that wrote the gradients")


def _tell(bucket_group: Any, what: str) -> None:
    page = LEDGER.page(bucket_group)
    if what in page.said:
        return
    page.said.add(what)
    sizes = tuple(bucket.grad_data.numel() for bucket in bucket_group.buckets)
    elements = ", ".join(map(str, sizes))
    message = f"{what}, in a bucket group of {elements} elements: the missing wait was added. MF0001 mends this"
    fields = {"what": what, "bucket_elements": sizes, "current_stream": str(torch.cuda.current_stream())}
    emit(Event("stream-not-ordered", message, fields))


def _has_own_stream(bucket_group: Any) -> bool:
    config = bucket_group.ddp_config
    return bool(config.num_distributed_optimizer_instances > 1 and config.overlap_grad_reduce)


def start_grad_sync(wrapped: Any, bucket_group: Any, args: Any, kwargs: Any) -> Any:
    """Look at what the communication stream waits for."""
    if not _has_own_stream(bucket_group):
        return wrapped(*args, **kwargs)
    stream = bucket_group.communication_stream
    stream.wait_stream = CheckedWait(bucket_group, stream)
    try:
        return wrapped(*args, **kwargs)
    finally:
        vars(stream).pop("wait_stream", None)


def finish_grad_sync(wrapped: Any, bucket_group: Any, args: Any, kwargs: Any) -> Any:
    """Have the current stream wait for the reduction where Megatron has only the default one wait."""
    result = wrapped(*args, **kwargs)
    if _has_own_stream(bucket_group) and "default_stream" in innermost(wrapped).__code__.co_names:
        current = torch.cuda.current_stream()
        if current != torch.cuda.default_stream():
            current.wait_stream(bucket_group.communication_stream)
            _tell(bucket_group, "later reads of the gradients were not ordered after the reduction")
    return result


def look_first() -> None:
    """Remember what the variable says now, and whether CUDA has started."""
    global _first_look, _judged  # noqa: PLW0603 - facts of the process
    _first_look = (torch.cuda.is_initialized(), os.environ.get(VARIABLE))
    _judged = False


def made_column_parallel(wrapped: Any, layer: Any, args: Any, kwargs: Any) -> Any:
    """Judge the order of launches, once there is a layer that counts on it."""
    global _judged  # noqa: PLW0603 - once a process
    result = wrapped(*args, **kwargs)
    if not _judged and torch.cuda.is_initialized():
        _judged = tell_launch_order(layer)
    return result


def tell_launch_order(layer: Any) -> bool:
    """Emit ``launch-order``, if the layer issues a collective in backward; whether it does."""
    needs = "all-reduce" if getattr(layer, "allreduce_dgrad", False) else ""
    needs = "sequence parallelism" if getattr(layer, "sequence_parallel", False) else needs
    started, then = _first_look
    facts = LaunchFacts(needs, torch.cuda.get_device_capability(), os.environ.get(VARIABLE), started, then)
    verdict, why = judge(facts)
    if verdict == "not-needed":
        return False
    fields = {"verdict": verdict, "needs": needs, "capability": facts.capability, "setting": facts.setting or ""}
    emit(Event("launch-order", why, fields, level=LEVELS[verdict]))
    return True


WRAPPERS = {
    ("streams", "_ParamAndGradBucketGroup.start_grad_sync"): start_grad_sync,
    ("streams", "_ParamAndGradBucketGroup.finish_grad_sync"): finish_grad_sync,
    ("streams", "ColumnParallelLinear.__init__"): made_column_parallel,
}
