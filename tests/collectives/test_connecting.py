# SPDX-License-Identifier: Apache-2.0
"""Before the first collective of a group that would block the host, ranks meet at the store, all or none, in time.

Needs torch (CPU). gloo connects when a group is made, so it is told to meet here; with NCCL: ``test_drills.py``.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_fixes.collectives import AllReduceContext, CollectiveTimeoutError, connecting
from megatron_fixes.collectives.arrivals import NotMetError, forget, meet
from megatron_fixes.proofs.world import finish, run, stay

from .test_context import ones, results


def missed(context: AllReduceContext) -> list[Any]:
    began = time.monotonic()
    try:
        context.all_reduce(ones())
    except CollectiveTimeoutError as error:
        return [str(error), list(error.missing or ()), time.monotonic() - began, len(context.outstanding)]
    raise AssertionError("no error")


def test_a_rank_that_never_comes_is_named_in_time_and_those_that_come_later_are_told(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        if rank == 1:
            stay([0])
        context = AllReduceContext(deadline_s=0.5, meet_first=True)
        said = missed(context)
        finish(rank)
        tensor = ones()
        context.all_reduce(tensor).wait()
        return [*said, tensor.tolist()]

    (first, absent, took, left, again), (second, gave_up, _, _, _) = results(run(body, 2, tmp_path))
    assert "within 0.5 s" in first and "all_reduce sum float32[4]: ranks [1] did not come" in first
    assert "test_connecting.py:" in first
    assert (absent, left, again) == ([1], 0, [2.0] * 4)
    assert 0.4 < took < 2.0
    assert "rank 0 came and did not wait" in second and gave_up == [0]


def test_ranks_that_come_late_are_waited_for_and_meet_once_a_group(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        time.sleep(0.3 * rank)
        group = dist.new_group([0, 1, 2])
        with mock.patch.object(connecting, "meet", wraps=connecting.meet) as meetings:
            for _ in range(3):
                with AllReduceContext(group, deadline_s=10.0, meet_first=True) as context:
                    tensor = ones()
                    context.all_reduce(tensor)
                    context.all_reduce(ones())
        return [tensor.tolist(), meetings.call_count]

    assert results(run(body, 3, tmp_path)) == [[[3.0] * 4, 1]] * 3


def record(rank: int, store: Any, ranks: int = 3) -> Any:
    return SimpleNamespace(rank=rank, ranks=tuple(range(ranks)), store=lambda: store)


def test_all_meet_or_none_does() -> None:
    store, late_s = dist.HashStore(), 0.004
    start = threading.Barrier(3)

    def come(rank: int) -> list[str]:
        ended = []
        for number in range(100):
            start.wait()
            # The last one comes at about the time when the others give up.
            time.sleep(late_s + (number - 50) * 8e-5 if rank == 2 else 0.0)
            try:
                meet(record(rank, store), f"meeting/{number}", late_s)
                ended.append("met")
            except NotMetError:
                ended.append("not")
            start.wait()
            forget(record(rank, store), f"meeting/{number}")
        return ended

    with ThreadPoolExecutor(3) as pool:
        first, second, third = pool.map(come, range(3))
    assert first == second == third
    assert set(first) == {"met", "not"}
    assert store.num_keys() == 0


def test_without_a_store_nobody_is_named() -> None:
    gone = mock.Mock(**{"set.side_effect": RuntimeError("Broken pipe")})
    with pytest.raises(NotMetError, match="did not answer") as caught:
        meet(record(0, gone), "meeting", 1.0)
    assert caught.value.missing is None


@pytest.mark.parametrize(
    ("back_end", "blocks"),
    [
        (SimpleNamespace(_is_initialized=lambda: False), True),
        (SimpleNamespace(_is_initialized=lambda: True), False),
        (SimpleNamespace(), False),
    ],
)
def test_nccl_that_is_not_connected_blocks(back_end: Any, blocks: bool) -> None:
    group: Any = SimpleNamespace(_get_backend=lambda device: back_end)
    tensor: Any = SimpleNamespace(is_cuda=True, device="cuda")
    assert connecting.blocks_to_connect(group, tensor) is blocks
    assert not connecting.blocks_to_connect(group, ones())


@pytest.mark.parametrize(
    ("deadline_s", "meet_first", "meets"), [(5.0, None, 1), (None, None, 0), (5.0, False, 0), (None, True, 1)]
)
def test_a_context_with_a_deadline_meets_where_the_back_end_would_block(
    tmp_path: Path, deadline_s: float | None, meet_first: bool | None, meets: int
) -> None:
    def body(rank: int) -> Any:
        with (
            mock.patch.object(connecting, "blocks_to_connect", return_value=True),
            mock.patch.object(connecting, "meet", wraps=connecting.meet) as meetings,
            AllReduceContext(deadline_s=deadline_s, meet_first=meet_first) as context,
        ):
            context.all_reduce(torch.ones(2))
        return meetings.call_count

    assert results(run(body, 2, tmp_path)) == [meets] * 2
