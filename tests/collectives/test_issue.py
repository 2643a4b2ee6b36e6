# SPDX-License-Identifier: Apache-2.0
"""How a context issues: what goes to the group itself gives what torch.distributed gives, without a warning of torch.

Needs torch (CPU).
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fixes.collectives import AllReduceContext
from megatron_fixes.proofs.world import run

from .test_context import ones, results


def test_every_operation_and_type_gives_what_torch_gives(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        different = []
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
            for kind in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
                if kind.is_complex and op is not dist.ReduceOp.SUM:
                    continue
                mine, bare = ((torch.arange(6).reshape(2, 3) + rank).to(kind) for _ in range(2))
                if kind.is_complex:
                    mine, bare = mine * 1j, bare * 1j
                with AllReduceContext() as context:
                    context.all_reduce(mine, op)
                dist.all_reduce(bare, op)
                if not torch.equal(mine, bare):
                    different.append([str(op), str(kind)])
        return different

    assert results(run(body, 2, tmp_path)) == [[], []]


def test_a_complex_tensor_can_not_be_reduced_to_its_maximum(group_of_one: None) -> None:
    context = AllReduceContext()
    with pytest.raises(ValueError, match="does not support"):
        context.all_reduce(torch.ones(2) * 1j, dist.ReduceOp.MAX)
    assert not context.outstanding


def test_no_collective_makes_torch_warn(group_of_one: None) -> None:
    with warnings.catch_warnings(), AllReduceContext() as context:
        warnings.simplefilter("error")
        context.all_reduce(ones())
        context.reduce_scatter(ones(), ones())
        context.all_gather(ones(), ones())
        with context.coalesced() as run_:
            run_.reduce_scatter(ones(), ones())
            run_.reduce_scatter(ones(), ones())
        with context.coalesced() as run_:
            run_.all_gather(ones(), ones())
            run_.all_gather(ones(), ones())


def test_the_place_is_the_line_of_the_call(group_of_one: None) -> None:
    with AllReduceContext() as context:
        line, handle = sys._getframe().f_lineno, context.all_reduce(ones())
        (second, later) = (
            context.all_reduce(ones()),
            sys._getframe().f_lineno,
        )
    assert handle.operation.place == f"{__file__}:{line}"
    assert second.operation.place == f"{__file__}:{later - 1}"


def test_an_interrupt_in_a_wait_leaves_it_outstanding_and_close_drains_it(group_of_one: None) -> None:
    class Interrupted:
        def __init__(self, work: Any) -> None:
            self.work, self.waits = work, 0

        def is_completed(self) -> bool:
            return bool(self.work.is_completed())

        def wait(self, *timeout: Any) -> None:
            self.waits += 1
            if self.waits == 1:
                raise KeyboardInterrupt
            self.work.wait(*timeout)

    context = AllReduceContext()
    handle = context.all_reduce(ones())
    (work,) = handle.operation.works
    handle.operation.works = [interrupted := Interrupted(work)]
    with pytest.raises(KeyboardInterrupt):
        handle.wait()
    assert context.outstanding == (handle.operation,)
    context.close()
    assert (interrupted.waits, handle.state) == (2, "done")
