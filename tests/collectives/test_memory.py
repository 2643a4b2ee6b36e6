# SPDX-License-Identifier: Apache-2.0
"""The memory of a collective that was dropped or given up stays as long as its work is under way, and no longer.

Works are doubles that hold no tensor: gloo's hold theirs until they end, so with them it doesn't show who kept them.
Needs torch (CPU).
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fixes.collectives import AllReduceContext, CollectiveTimeoutError, registry, requests


class Memory(bytearray):
    """What a tensor lies in; unlike a storage of torch's own, it can be referred to weakly."""


class UnderWay:
    """Double of a work that holds nothing of its collective, and ends when it is told."""

    def __init__(self) -> None:
        self.complete = False

    def is_completed(self) -> bool:
        return self.complete

    def wait(self, *timeout: Any) -> None:
        raise RuntimeError("Operation timed out!")


def dropped(context: AllReduceContext) -> None:
    """It goes when the caller, who hands over the only reference, does."""


def aborted(context: AllReduceContext) -> None:
    with pytest.raises(CollectiveTimeoutError):
        context.close()


def issued(group: Any, *, run: bool) -> tuple[AllReduceContext, list[weakref.ref[Memory]]]:
    """A context with one collective under way, and the memory that this reads and writes, which nobody else holds."""
    memories = [Memory(16), Memory(32)]
    small, large = (torch.frombuffer(memory, dtype=torch.float32) for memory in memories)
    context = AllReduceContext(group, deadline_s=0.01)
    if run:
        with context.coalesced() as run_:
            run_.all_reduce(small)
            run_.all_reduce(large)
    else:
        context.reduce_scatter(large[:4], small)
    return context, [weakref.ref(memory) for memory in memories]


@pytest.mark.parametrize("run", [False, True], ids=["alone", "run"])
@pytest.mark.parametrize("end", [dropped, aborted])
def test_memory_is_kept_until_the_work_ends_and_let_go_then(
    end: Any, run: bool, group_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, work = dist.new_group([0]), UnderWay()
    monkeypatch.setattr(requests, "issue", lambda *_: [work])
    context, memories = issued(group, run=run)
    end(context)
    del context
    gc.collect()
    record = registry.record_of(group, to_destroy=True)
    assert record.aborted is (end is aborted)
    assert record.sweep() == 1 and all(memory() is not None for memory in memories)
    work.complete = True
    assert record.sweep() == 0
    gc.collect()
    assert [memory() for memory in memories] == [None, None]
    dist.destroy_process_group(group)
