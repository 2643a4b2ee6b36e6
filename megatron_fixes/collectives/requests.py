# SPDX-License-Identifier: Apache-2.0
"""What is asked of a group: one collective, or a coalesced run of one kind, described before anything is issued.

Shapes: ``all_reduce`` takes one tensor of any shape, read and written. ``reduce_scatter`` reads ``[n × world, …]`` and
writes ``[n, …]``; ``all_gather`` reads ``[n, …]`` and writes ``[n × world, …]``; contiguous, all on one device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_fixes.collectives.waiting import ThreadedWork
from megatron_fixes.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


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
            return dist.reduce_scatter_tensor(*self.tensors, op=self.op, group=group, async_op=True)
        return dist.all_gather_into_tensor(*self.tensors, group=group, async_op=True)

    def __str__(self) -> str:
        op = f" {self.op}".lower().replace("redopt.", "").replace("redoptype.", "") if self.op is not None else ""
        sizes = " <- ".join(
            f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in self.tensors
        )
        return f"{self.kind}{op} {sizes}"


def check(requests: Sequence[Request], world_size: int) -> None:
    """Refuse what back ends reduce wrongly without an error, or refuse without saying where.

    Raises:
        UsageError: A tensor is not contiguous, the sizes or types of output and input do not go together, or the
            requests of a run are not of one kind.
    """
    if len(requests) > 1 and len({(request.kind, str(request.op)) for request in requests}) > 1:
        raise UsageError(
            f"got a run of {describe(requests)}, expected collectives of one kind and one operation",
            hint="Use one run for each kind.",
        )
    for request in requests:
        if not all(tensor.is_contiguous() for tensor in request.tensors):
            raise UsageError(
                f"got {request} of strides {[tensor.stride() for tensor in request.tensors]}, expected contiguous ones",
                hint="Reduce tensor.contiguous() and copy the result back: gloo reduces other elements, with no error.",
            )
        if len(request.tensors) == 1:
            continue
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
    """Issue requests that were checked, several as one coalesced run; the works to wait for."""
    if len(requests) == 1:
        return _works([requests[0].issue(group)], requests[0])
    with c10d._coalescing_manager(group, async_ops=True) as manager:
        for request in requests:
            request.issue(group)
    return _works(list(manager.works), requests[0])


def _works(works: list[Any], request: Request) -> list[Any]:
    if request.kind == "reduce_scatter" and not request.tensors[0].is_cuda:
        return [ThreadedWork(work) for work in works]
    return works
