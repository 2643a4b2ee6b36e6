# SPDX-License-Identifier: Apache-2.0
"""What AllReduceContext refuses, and what its checked mode finds: each before anything is issued, on all ranks.

Needs torch (CPU).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fixes.collectives import (
    AllReduceContext,
    CollectiveMismatchError,
    TensorModifiedError,
)
from megatron_fixes.errors import UsageError
from megatron_fixes.proofs.world import run

from .test_context import ones, results, said


def test_checked_ranks_that_differ_raise_on_both_sides_and_issue_nothing(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        context = AllReduceContext(checked=True)
        text = said(CollectiveMismatchError, lambda: context.all_reduce(ones(4 - rank)))
        other = said(
            CollectiveMismatchError,
            lambda: context.all_reduce(ones()) if rank else context.all_gather(torch.empty(4), torch.empty(2)),
        )
        assert not context.outstanding
        return [text, other]

    for sizes, kinds in results(run(body, 2, tmp_path)):
        assert "ranks [0]: all_reduce sum float32[4]" in sizes and "ranks [1]: all_reduce sum float32[3]" in sizes
        assert "all_gather float32[4] <- float32[2]" in kinds


def test_checked_ranks_that_agree_get_their_result_again_and_again(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        values = []
        with AllReduceContext(checked=True) as context:
            for step in range(20):
                tensor = ones() * step
                context.all_reduce(tensor).wait()
                values.append(tensor[0].item())
        return values

    assert results(run(body, 2, tmp_path)) == [[2.0 * step for step in range(20)]] * 2


def test_checked_mode_finds_a_write_before_the_wait(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        context = AllReduceContext(checked=True)
        tensor, untouched = ones(), ones()
        context.all_reduce(tensor)
        tensor[:2].add_(1)
        context.all_reduce(untouched)
        text = said(TensorModifiedError, context.wait)
        context.wait()
        untouched.add_(1)
        context.close()
        return text

    for text in results(run(body, 2, tmp_path)):
        assert "test_refusals.py:" in text and "all_reduce" in text


def test_checked_mode_leaves_alone_what_only_the_back_end_wrote(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        for _ in range(30):
            with AllReduceContext(checked=True) as context:
                context.all_gather(torch.zeros(4), ones(2))
                context.reduce_scatter(torch.zeros(2), ones())
                with context.coalesced() as run_:
                    run_.all_reduce(ones())
                    run_.all_reduce(ones())
        return True

    assert results(run(body, 2, tmp_path)) == [True, True]


def test_what_a_back_end_would_reduce_wrongly_is_refused(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        buffer = torch.arange(8.0) + 1
        with AllReduceContext() as context:
            texts = [
                said(UsageError, lambda: context.all_reduce(buffer[::2])),
                said(UsageError, lambda: context.reduce_scatter(torch.empty(3), ones())),
                said(UsageError, lambda: context.all_gather(torch.empty(4).double(), ones(2))),
            ]
            context.all_reduce(buffer)
        return [texts, buffer.tolist()]

    for (strides, sizes, types), buffer in results(run(body, 2, tmp_path)):
        assert "of strides [(2,)], expected contiguous" in strides
        assert "reduce_scatter sum float32[3] <- float32[4] on 2 ranks" in sizes
        assert "float64[4] <- float32[2]" in types
        assert buffer == [2.0 * number for number in range(1, 9)]


def test_a_group_that_this_rank_is_not_in_and_what_is_no_group_are_refused(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        group = dist.new_group([0])
        outside = said(UsageError, lambda: AllReduceContext(group)) if rank == 1 else ""
        dist.barrier()
        wrong = [
            said(UsageError, lambda: AllReduceContext("x")),
            said(UsageError, lambda: AllReduceContext(deadline_s="3")),  # type: ignore[arg-type]
            said(UsageError, lambda: AllReduceContext(stream=3)),
        ]
        return [outside, wrong]

    (_, _), (outside, wrong) = results(run(body, 2, tmp_path))
    assert "a process group that this rank is in" in outside
    assert ["'x'" in wrong[0], "'3'" in wrong[1], "stream=3" in wrong[2]] == [True] * 3


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("all_reduce", ([1.0, 2.0],)),
        ("all_reduce", (torch.ones(2), "sum")),
        ("all_reduce", (torch.ones(2), None)),
        ("all_reduce", (torch.ones(2, device="meta"),)),
        ("all_reduce", (torch.ones(2).to_sparse(),)),
        ("reduce_scatter", (None, torch.ones(2))),
        ("reduce_scatter", (torch.ones(2), torch.ones(2), 0)),
        ("all_gather", (torch.ones(2), [torch.ones(2)])),
    ],
)
def test_an_argument_that_is_no_tensor_or_no_operation_is_refused(
    kind: str, given: tuple[Any, ...], group_of_one: None
) -> None:
    def in_a_run() -> None:
        with context.coalesced() as run_:
            run_.all_reduce(ones())
            getattr(run_, kind)(*given)

    with AllReduceContext() as context:
        for call in (lambda: getattr(context, kind)(*given), in_a_run):
            assert "got " in said(UsageError, call)
        assert not context.outstanding


def test_a_run_takes_nothing_after_its_block(group_of_one: None) -> None:
    with AllReduceContext() as context:
        with context.coalesced() as run_:
            run_.all_reduce(ones())
        with pytest.raises(KeyError), context.coalesced() as abandoned:
            raise KeyError
        for ended in (run_, abandoned):
            said(UsageError, lambda ended=ended: ended.all_reduce(ones()))
            said(UsageError, lambda ended=ended: ended.reduce_scatter(ones(), ones()))
            assert "all_gather for a run whose block has ended" in said(
                UsageError, lambda ended=ended: ended.all_gather(ones(), ones())
            )
        assert len(context.outstanding) == 1
