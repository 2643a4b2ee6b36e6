# SPDX-License-Identifier: Apache-2.0
"""Small programs over two streams, each with the one order that it lacks, and beside it the same program in order.

Each takes a tensor that the default stream has just written, and is over in a moment: what is looked at is which order
the program asks for, not what one run does. Run by ``stream_checkers`` and by tests/collectives.

Not handled: a device. Tensors are made on ``device``, streams and events come from ``torch.cuda``, whatever that is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

SIZE = 1024


class Place:
    """What a case runs with: the device of its tensors, and a stream besides the one that is current."""

    def __init__(self, device: str) -> None:
        self.device, self.side = device, torch.cuda.Stream()

    def tensor(self) -> torch.Tensor:
        """A tensor of the current stream, written."""
        return torch.zeros(SIZE, device=self.device)


def write_then_read(at: Place, *, right: bool) -> None:
    """A side stream writes, the default stream reads."""
    main, tensor = torch.cuda.current_stream(), at.tensor()
    at.side.wait_stream(main)
    with torch.cuda.stream(at.side):
        tensor.add_(1)
    if right:
        main.wait_stream(at.side)
    tensor.sum()
    main.wait_stream(at.side)


def read_then_write(at: Place, *, right: bool) -> None:
    """A side stream reads, the default stream writes."""
    main, tensor = torch.cuda.current_stream(), at.tensor()
    at.side.wait_stream(main)
    with torch.cuda.stream(at.side):
        tensor.sum()
    if right:
        main.wait_stream(at.side)
    tensor.zero_()
    main.wait_stream(at.side)


def event_too_early(at: Place, *, right: bool) -> None:
    """The default stream waits for an event of the side stream, which was recorded before the write."""
    main, tensor = torch.cuda.current_stream(), at.tensor()
    at.side.wait_stream(main)
    early = at.side.record_event()
    with torch.cuda.stream(at.side):
        tensor.add_(1)
    main.wait_event(at.side.record_event() if right else early)
    tensor.sum()
    main.wait_stream(at.side)


def half_of_a_buffer(at: Place, *, right: bool) -> None:
    """Two streams write to slices of one buffer, apart or with an element in common."""
    main, tensor = torch.cuda.current_stream(), at.tensor()
    at.side.wait_stream(main)
    with torch.cuda.stream(at.side):
        tensor[: SIZE // 2].add_(1)
    tensor[SIZE // 2 - (0 if right else 1) :].mul_(2)
    main.wait_stream(at.side)


def free_while_used(at: Place, *, right: bool) -> None:
    """A tensor of the default stream goes while the side stream still reads it, told to the allocator or not."""
    main, tensor = torch.cuda.current_stream(), at.tensor()
    at.side.wait_stream(main)
    with torch.cuda.stream(at.side):
        tensor.sum()
    if right:
        tensor.record_stream(at.side)
    del tensor
    at.tensor()
    main.wait_stream(at.side)


def free_before_the_wait(at: Place, *, right: bool) -> None:
    """A tensor of the side stream goes while the default stream, which has waited, still reads it."""
    main = torch.cuda.current_stream()
    with torch.cuda.stream(at.side):
        tensor = at.tensor()
    main.wait_stream(at.side)
    tensor.sum()
    if right:
        at.side.wait_stream(main)
    del tensor
    with torch.cuda.stream(at.side):
        at.tensor()
    at.side.wait_stream(main)


def forward_before_producer(at: Place, *, right: bool) -> None:
    """A forward on a side stream, and its backward, where autograd itself orders streams."""
    main, weight = torch.cuda.current_stream(), at.tensor().requires_grad_()
    if right:
        at.side.wait_stream(main)
    with torch.cuda.stream(at.side):
        loss = (weight * weight).sum()
    main.wait_stream(at.side)
    loss.backward()
    assert weight.grad is not None
    weight.grad.sum()
    if right:
        # The gradient lies in memory of the stream that its backward ran on.
        at.side.wait_stream(main)


def input_written_under_way(at: Place, *, right: bool) -> None:
    """The input of a collective is written after it was issued and before anybody waited."""
    tensor, output = at.tensor(), torch.empty(SIZE * dist.get_world_size(), device=at.device)
    work = dist.all_gather_into_tensor(output, tensor, async_op=True)
    if right:
        work.wait()
    tensor.zero_()
    work.wait()


def output_read_under_way(at: Place, *, right: bool) -> None:
    """The output of a collective is read before anybody waited."""
    tensor = at.tensor()
    work = dist.all_reduce(tensor, async_op=True)
    if right:
        work.wait()
    tensor.sum()
    work.wait()


def collective_before_producer(at: Place, *, right: bool) -> None:
    """A communication stream reduces what the default stream has written, as in MF0001."""
    main, tensor = torch.cuda.current_stream(), at.tensor()
    if right:
        at.side.wait_stream(main)
    with torch.cuda.stream(at.side):
        dist.all_reduce(tensor)
    main.wait_stream(at.side)
    tensor.sum()


def consumer_before_collective(at: Place, *, right: bool) -> None:
    """The default stream reads what a communication stream reduces."""
    main, tensor = torch.cuda.current_stream(), at.tensor()
    at.side.wait_stream(main)
    with torch.cuda.stream(at.side):
        dist.all_reduce(tensor)
    if right:
        main.wait_stream(at.side)
    tensor.sum()
    main.wait_stream(at.side)


def work_waited_elsewhere(at: Place, *, right: bool) -> None:
    """The work is waited for on another stream than the one that reads."""
    main, tensor = torch.cuda.current_stream(), at.tensor()
    work = dist.all_reduce(tensor, async_op=True)
    with torch.cuda.stream(main if right else at.side):
        work.wait()
    tensor.sum()
    main.wait_stream(at.side)


class Case(NamedTuple):
    """A program.

    Attributes:
        collective: Needs a process group.
    """

    run: Callable[..., None]
    collective: bool = False


CASES = {
    "write, then read": Case(write_then_read),
    "read, then write": Case(read_then_write),
    "event recorded too early": Case(event_too_early),
    "slices with an element in common": Case(half_of_a_buffer),
    "free without record_stream": Case(free_while_used),
    "free before the owner waits": Case(free_before_the_wait),
    "forward before its producer": Case(forward_before_producer),
    "input written before wait()": Case(input_written_under_way, collective=True),
    "output read before wait()": Case(output_read_under_way, collective=True),
    "collective before its producer": Case(collective_before_producer, collective=True),
    "consumer does not wait": Case(consumer_before_collective, collective=True),
    "wait() on another stream": Case(work_waited_elsewhere, collective=True),
}
