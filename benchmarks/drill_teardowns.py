# SPDX-License-Identifier: Apache-2.0
"""The drills of ``drills.py`` about destroying groups, and what a rank has left when it has destroyed them all.

As in ``drill_cases.py``, groups have been used before, and with NCCL the host waits for the device.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any, NamedTuple

import torch.distributed as dist
from drill_cases import DEADLINE_S, last, ones, pair, told
from torch.distributed import distributed_c10d as c10d

from megatron_fixes.collectives import AllReduceContext, TeardownError, groups
from megatron_fixes.collectives.registry import adrift
from megatron_fixes.proofs.world import finish, stay

# Threads of a gloo group that was freed end soon after.
SETTLE_S = 2.0


def destroyed_bare(rank: int) -> Any:
    """A group is destroyed while a collective on it is under way, and used afterwards."""
    group = pair()
    work = dist.all_reduce(ones(), group=group, async_op=True) if rank == 0 else None
    dist.destroy_process_group(group)
    return [told(work.wait) if work else "", told(lambda: dist.all_reduce(ones(), group=group))]


def destroyed_ours(rank: int) -> Any:
    """The same with us, by ``groups``: NCCL's own destroy waits for what is under way, and nobody can help there."""
    group = pair()
    context = AllReduceContext(group, deadline_s=DEADLINE_S)
    if rank == 0:
        context.all_reduce(ones())
    # The rank with nothing under way waits until the other has given up.
    said = [told(lambda: groups.destroy(group, agree_s=2 * DEADLINE_S)), told(lambda: AllReduceContext(group))]
    if rank == 1:
        stay([0])
    finish(rank)
    return said


def one_rank_bare(rank: int) -> Any:
    """One rank destroys the group; the other goes on to use it."""
    group = pair()
    if rank == 0:
        dist.destroy_process_group(group)
        stay([1])
        return "destroyed it"
    return last(rank, told(lambda: dist.all_reduce(ones(), group=group)))


def one_rank_ours(rank: int) -> Any:
    """The same with us."""
    group = pair()
    if rank == 0:
        said = told(lambda: groups.destroy(group, agree_s=DEADLINE_S))
        stay([1])
        return said
    context = AllReduceContext(group, deadline_s=DEADLINE_S)
    context.all_reduce(ones())
    return last(rank, told(context.close))


def stuck_bare(rank: int) -> Any:
    """Ranks destroy their groups in different orders while a collective on one is under way."""
    made = [pair() for _ in range(2)]
    works = [dist.all_reduce(ones(), group=made[rank], async_op=True)]
    said = [told(lambda group=group: dist.destroy_process_group(group)) for group in (made if rank else made[::-1])]
    return [*said, told(works[0].wait)]


def stuck_ours(rank: int) -> Any:
    """The same with us."""
    made = [pair() for _ in range(2)]
    context = AllReduceContext(made[rank], deadline_s=DEADLINE_S)
    context.all_reduce(ones())
    return told(lambda: groups.destroy_all(agree_s=2 * DEADLINE_S).destroyed)


def apart_bare(rank: int) -> Any:
    """Ranks destroy healthy groups in different orders."""
    made = [pair() for _ in range(2)]
    return [told(lambda group=group: dist.destroy_process_group(group)) for group in (made if rank else made[::-1])]


def apart_ours(rank: int) -> Any:
    """The same with us: ranks are done with their groups in different orders, and ask for the end of all of them."""
    made = [pair() for _ in range(2)]
    names = {group.group_name: name for group, name in zip(made, ("first", "second"), strict=True)}
    contexts = [AllReduceContext(group, deadline_s=DEADLINE_S) for group in made]
    for context in contexts:
        context.all_reduce(ones())
    for context in contexts if rank else contexts[::-1]:
        context.close()

    def destroyed() -> str:
        return ", ".join(names.get(name, "default") for name in groups.destroy_all(agree_s=2 * DEADLINE_S).destroyed)

    return told(destroyed)


class Left(NamedTuple):
    """What is left on a rank.

    Attributes:
        groups: That c10d lists.
        threads: Of Python, beside the main one.
        adrift: Collectives that nobody holds and that are under way.
        native: All threads beside the main one; None with NCCL, since CUDA and NCCL keep some of their own.
    """

    groups: int = 0
    threads: int = 0
    adrift: int = 0
    native: int | None = None


def left_now(backend: str) -> Left:
    """What is left at this moment."""
    native = len(os.listdir("/proc/self/task")) - 1 if backend == "gloo" else None
    return Left(len(c10d._world.pg_map), threading.active_count() - 1, len(adrift()), native)


def destroy_all(backend: str) -> tuple[str, float, Left]:
    """The end of a rank: how ``groups.destroy_all`` went there, after how many seconds, and what is left then."""
    gc.collect()
    began, said = time.monotonic(), "no error"
    try:
        groups.destroy_all(agree_s=DEADLINE_S)
    except TeardownError as error:
        said = f"TeardownError: {error}"
    took_s = time.monotonic() - began
    gc.collect()
    while any(left_now(backend)) and time.monotonic() < began + took_s + SETTLE_S:
        time.sleep(0.02)
    return said, took_s, left_now(backend)
