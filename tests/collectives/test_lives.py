# SPDX-License-Identifier: Apache-2.0
"""A group that comes back under its old name, in the same store, meets nothing that its earlier ones left there.

On the back end "fake", which torch tests with: it issues nothing and connects nothing. torch's gloo (2.13) itself finds
the addresses of the earlier group there, and may hang as the next one is made.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401 - registers the back end "fake"

from megatron_fixes.collectives import AllReduceContext, CollectiveTimeoutError, TeardownError, groups
from megatron_fixes.collectives.arrivals import missing_ranks
from megatron_fixes.collectives.registry import _enter_life, record_of
from megatron_fixes.proofs.world import finish, run, stay

from .test_context import ones, results, said


def of_the_same_name() -> Any:
    return dist.new_group([0, 1], use_local_synchronization=True, backend="fake")


def test_the_next_group_of_a_name_compares_with_its_own_ranks_alone(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        names = set()
        for life, destroy in enumerate((groups.destroy, dist.destroy_process_group, groups.destroy)):
            group = of_the_same_name()
            names.add(group.group_name)
            time.sleep(0.2 * rank)
            with AllReduceContext(group, deadline_s=5.0, checked=True) as context:
                context.all_reduce(ones(2 + life))
            destroy(group)
        return len(names)

    assert results(run(body, 2, tmp_path)) == [1, 1]


def test_a_peer_that_came_to_the_last_group_of_a_name_is_missed_in_the_next_one(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        group = of_the_same_name()
        with AllReduceContext(group, deadline_s=5.0, meet_first=True) as context:
            context.all_reduce(ones())
        waiting = [missing_ranks(record_of(group), 7)]
        groups.destroy(group)
        group = of_the_same_name()
        if rank == 1:
            stay([0])
            return None
        waiting.append(missing_ranks(record_of(group), 7, listen_s=0.1))
        context = AllReduceContext(group, deadline_s=0.3, meet_first=True)
        alone = said(CollectiveTimeoutError, lambda: context.all_reduce(ones()))
        destroyed = said(TeardownError, lambda: groups.destroy(group, agree_s=0.3))
        finish(rank)
        return [waiting, alone, destroyed]

    first, _ = run(body, 2, tmp_path)
    assert first.result, first.log
    waiting, alone, destroyed = first.result
    assert waiting == [[], [1]]
    assert "ranks [1] did not come" in alone and "ranks [1] did not come" in destroyed


def test_a_closed_context_keeps_no_store_alive(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        groups.destroy_all()
        store: Any = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        port = store.port
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        del store
        context = AllReduceContext(deadline_s=5.0, meet_first=True)
        context.all_reduce(ones())
        record = record_of()
        groups.destroy_all()
        with socket.socket() as client:
            return [client.connect_ex(("127.0.0.1", port)) != 0, context.closed, said(RuntimeError, record.store)]

    ((gone, closed, told),) = results(run(body, 1, tmp_path))
    assert gone and closed and "is gone" in told


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_ranks_that_were_in_a_life_are_in_the_next_one_together(kind: str, tmp_path: Path) -> None:
    store: Any = (
        dist.HashStore()
        if kind == "hash"
        else dist.FileStore(str(tmp_path / "store"), 1)
        if kind == "file"
        else dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=5))
    )
    # Whoever asks first; a rank that asks again; one that was in no group of that name before.
    assert [_enter_life(store, rank, f"a{rank}") for rank in (0, 1, 0)] == [0, 0, 0]
    assert [_enter_life(store, rank, f"b{rank}") for rank in (1, 2, 0, 1)] == [1, 1, 1, 1]
    assert [_enter_life(store, rank, f"c{rank}") for rank in (2, 1, 0)] == [2, 2, 2]
