# SPDX-License-Identifier: Apache-2.0
"""What is asked of a group: one collective, or a coalesced run of one kind, described before anything is issued.

Shapes: ``all_reduce`` takes one tensor of any shape, read and written. ``reduce_scatter`` reads ``[n × world, …]`` and
writes ``[n, …]``; ``all_gather`` reads ``[n, …]`` and writes ``[n × world, …]``; contiguous, all on one device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.overrides import has_torch_function

from megatron_fixes.collectives.threads import interpreter_ends
from megatron_fixes.collectives.waiting import ThreadedWork
from megatron_fixes.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


def _options(op: Any) -> Any:
    options = c10d.AllreduceOptions()
    options.reduceOp = op
    if hasattr(options, "asyncOp"):  # torch 2.8 and later: NCCL uses its own stream only if told so
        options.asyncOp = True
    return options


_SUM_OP = dist.ReduceOp.SUM
# Made once: making it takes as long as issuing does.
_SUM = _options(_SUM_OP)
# torch 2.13 warns of the older names at each call.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Request:
    """One collective; not to be changed once it is made (a frozen dataclass takes thrice as long to make).

    Attributes:
        kind: ``all_reduce``, ``reduce_scatter`` or ``all_gather``.
        tensors: All that it reads or writes, what it writes first.
        op: Of ``torch.distributed.ReduceOp``; None for ``all_gather``.
    """

    __slots__ = ("kind", "op", "tensors")

    def __init__(self, kind: str, tensors: tuple[torch.Tensor, ...], op: Any) -> None:
        self.kind, self.tensors, self.op = kind, tensors, op

    def issue(self, group: Any) -> Any:
        """Issue it; a ``Work``, or None inside a coalescing manager."""
        if self.kind == "all_reduce":
            return dist.all_reduce(self.tensors[0], self.op, group=group, async_op=True)
        if self.kind == "reduce_scatter":
            return _reduce_scatter(*self.tensors, op=self.op, group=group, async_op=True)
        return _all_gather(*self.tensors, group=group, async_op=True)

    def issue_alone(self, group: Any) -> Any:
        """Issue it outside of a coalescing manager; a ``Work``.

        An all-reduce goes to the group itself: what ``dist.all_reduce`` does besides is done by ``check`` and by the
        context, and costs more than both.
        """
        if self.kind != "all_reduce" or self.tensors[0].is_complex() or has_torch_function(self.tensors):
            return self.issue(group)
        options = _SUM if self.op is _SUM_OP else _options(self.op)
        return group.allreduce([self.tensors[0]], options)

    def __str__(self) -> str:
        op = f" {self.op}".lower().replace("redopt.", "").replace("redoptype.", "") if self.op is not None else ""
        sizes = " <- ".join(
            f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in self.tensors
        )
        return f"{self.kind}{op} {sizes}"


class Run:
    """Collectives of one kind that go out as one when the block of ``AllReduceContext.coalesced`` ends.

    Attributes:
        requests: What was asked for, in order.
        ended: Whether the block has; then it takes no more.
    """

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.ended = False

    def _add(self, request: Request) -> None:
        if self.ended:
            raise UsageError(
                f"got {request.kind} for a run whose block has ended, expected it within the block",
                hint="Call the context itself, or begin another run.",
            )
        self.requests.append(request)

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """See ``AllReduceContext.all_reduce``."""
        self._add(Request("all_reduce", (tensor,), op))

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """See ``AllReduceContext.reduce_scatter``."""
        self._add(Request("reduce_scatter", (output, tensor), op))

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> None:
        """See ``AllReduceContext.all_gather``."""
        self._add(Request("all_gather", (output, tensor), None))


def check(requests: Sequence[Request], world_size: int) -> None:
    """Refuse what back ends reduce wrongly without an error, or refuse without saying where.

    Raises:
        UsageError: Something is no tensor, or none with memory, or no operation; a tensor is not contiguous, the sizes
            or types of output and input do not go together, or the requests of a run are not of one kind.
    """
    for request in requests:
        if request.op is not _SUM_OP:
            _check_operation(request)
        for tensor in request.tensors:  # all() of a generator takes thrice as long
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
                raise UsageError(f"got {tensor!r:.80} for {request.kind}, expected a tensor that has data")
        for tensor in request.tensors:
            if not tensor.is_contiguous():
                layouts = [one.stride() if one.layout is torch.strided else one.layout for one in request.tensors]
                raise UsageError(
                    f"got {request} of strides {layouts}, expected contiguous ones",
                    hint="Reduce tensor.contiguous() and copy the result back: gloo reduces other elements, with no "
                    "error.",
                )
        if len(request.tensors) > 1:
            _check_sizes(request, world_size)
    if len(requests) > 1 and len({(request.kind, str(request.op)) for request in requests}) > 1:
        raise UsageError(
            f"got a run of {describe(requests)}, expected collectives of one kind and one operation",
            hint="Use one run for each kind.",
        )


def _check_operation(request: Request) -> None:
    expected = isinstance(request.op, dist.ReduceOp) if request.kind != "all_gather" else request.op is None
    if not expected:
        raise UsageError(f"got op={request.op!r:.80} for {request.kind}, expected one of torch.distributed.ReduceOp")


def _check_sizes(request: Request, world_size: int) -> None:
    output, tensor = request.tensors
    whole, part = (output, tensor) if request.kind == "all_gather" else (tensor, output)
    if whole.numel() != part.numel() * world_size or whole.dtype != part.dtype:
        raise UsageError(
            f"got {request} on {world_size} ranks, expected the same type, and {world_size} times the elements of "
            "one in the other",
            hint="Make the larger tensor as large as the smaller one of all ranks.",
        )


def describe(requests: Sequence[Request]) -> str:
    """The requests of one operation in one line; equal lines belong together on all ranks."""
    first, *more = map(str, requests)
    return f"coalesced [{'; '.join([first, *more])}]" if more else first


def issue(requests: Sequence[Request], group: Any) -> list[Any]:
    """Issue requests that were checked, several as one coalesced run; the works to wait for.

    Raises:
        UsageError: It needs a thread, and the interpreter is being torn down; nothing was issued.
    """
    first = requests[0]
    threaded = first.kind == "reduce_scatter" and not first.tensors[0].is_cuda
    if threaded and interpreter_ends():
        raise UsageError(
            f"got {describe(requests)} while the interpreter ends, expected it earlier: no thread can wait for it",
            hint="Use contexts in the program, not in destructors that run at its exit.",
        )
    works = [first.issue_alone(group)] if len(requests) == 1 else _issue_run(requests, group)
    if threaded:
        return [ThreadedWork(work) for work in works]
    return works


def _issue_run(requests: Sequence[Request], group: Any) -> list[Any]:
    with c10d._coalescing_manager(group, async_ops=True) as manager:
        for request in requests:
            request.issue(group)
    return list(manager.works)
