# SPDX-License-Identifier: Apache-2.0
"""Process groups are destroyed in one order on all ranks, drained first, each once, and errors do not stop it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_fixes.collectives import (
    AllReduceContext,
    CollectiveTimeoutError,
    GroupDestroyedError,
    TeardownError,
    groups,
    registry,
)
from megatron_fixes.errors import UsageError
from megatron_fixes.events import Event, subscribe
from megatron_fixes.proofs.world import finish, run, stay

from .test_context import ones, results, said


def test_destroy_drains_what_is_under_way_and_then_destroys(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        group = dist.new_group([0, 1])
        context = AllReduceContext(group, deadline_s=10.0)
        tensor = ones()
        handle = context.all_reduce(tensor)
        teardown = groups.destroy(group)
        gone = said(GroupDestroyedError, lambda: groups.destroy(group))
        return [handle.state, tensor.tolist(), len(teardown.destroyed), group in c10d._world.pg_map, gone]

    for state, tensor, count, listed, gone in results(run(body, 2, tmp_path)):
        assert (state, tensor, count, listed) == ("done", [2.0] * 4, 1, False)
        assert "for groups.destroy, but it was destroyed" in gone


def test_all_groups_go_children_first_and_the_default_one_last(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        made = [dist.group.WORLD.group_name]
        for ranks in ([0, 1, 2, 3], [0, 1], [2, 3], [0, 2], [1, 3]):
            group = dist.new_group(ranks)
            if rank in ranks:
                made.append(group.group_name)
                with AllReduceContext(group) as context:
                    context.all_reduce(ones())
        teardown = groups.destroy_all()
        assert not dist.is_initialized() and groups.destroy_all().destroyed == ()
        return [made, list(teardown.destroyed)]

    for made, destroyed in results(run(body, 4, tmp_path)):
        assert destroyed == made[::-1]


def test_a_rank_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        group = dist.new_group([0, 1])
        if rank == 1:
            time.sleep(0.5)
        began = time.monotonic()
        groups.destroy(group)
        return time.monotonic() - began

    first, _ = results(run(body, 2, tmp_path))
    assert first > 0.3


def test_a_rank_that_never_comes_is_named_and_everything_is_destroyed_all_the_same(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        first, second = dist.new_group([0, 1]), dist.new_group([0, 1])
        if rank == 1:
            stay([0])
            return None
        finished = dist.distributed_c10d._get_default_store()
        try:
            groups.destroy_all(agree_s=0.3)
        except TeardownError as error:
            finished.set("finished/0", "1")
            return [error.errors, dist.is_initialized(), [first.group_name, second.group_name]]
        raise AssertionError("no error")

    (errors, initialized, names), _ = results(run(body, 2, tmp_path))
    assert not initialized
    assert set(names) < set(errors)
    assert all("ranks [1] did not come to destroy it within 0.3 s" in text for text in errors.values())


def test_a_stuck_collective_is_aborted_and_told_and_does_not_stop_the_teardown(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        stuck, fine = dist.new_group([0, 1]), dist.new_group([0, 1])
        context = AllReduceContext(stuck, deadline_s=0.3)
        if rank == 0:
            context.all_reduce(torch.ones(7))
        with AllReduceContext(fine) as other:
            other.all_reduce(ones())
        try:
            groups.destroy_all(agree_s=5.0)
        except TeardownError as error:
            return [error.errors, stuck.group_name, dist.is_initialized()]
        return [{}, stuck.group_name, dist.is_initialized()]

    (errors, name, initialized), (_, _, peer_initialized) = results(run(body, 2, tmp_path))
    assert not initialized and not peer_initialized
    assert "all_reduce sum float32[7]" in errors[name]


def test_a_group_that_was_given_up_is_destroyed_like_the_others(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        first, second, unused = (dist.new_group([0, 1]) for _ in range(3))
        if rank == 1:
            stay([0])
            return None
        finished = c10d._get_default_store()
        for group in (first, second):
            context = AllReduceContext(group, deadline_s=0.3)
            context.all_reduce(ones())
            said(CollectiveTimeoutError, context.close)
        alone = list(groups.destroy(first, agree_s=0.3).destroyed)
        again = said(GroupDestroyedError, lambda: groups.destroy(first))
        text = said(TeardownError, lambda: groups.destroy_all(agree_s=0.3))
        finished.set("finished/0", "1")
        names = [first.group_name, second.group_name, unused.group_name]
        return [names, alone, again, text, dist.is_initialized(), len(c10d._world.pg_map)]

    gave_up, _ = run(body, 2, tmp_path)
    assert gave_up.result, gave_up.log
    names, alone, again, text, initialized, left = gave_up.result
    assert alone == names[:1] and "it was aborted" in again
    assert (initialized, left) == (False, 0)
    # What was given up is not agreed on any more: its ranks were told when it was.
    assert "teardown of 2 process groups" in text and f"{names[2]}: ranks [1] did not come" in text


def test_a_fork_can_not_destroy_a_group_that_no_context_has_used(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        group = dist.new_group([0, 1])
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            calls = (
                AllReduceContext,
                lambda: groups.destroy(group, agree_s=0.2),
                lambda: groups.destroy_all(agree_s=0.2),
            )
            try:
                os.write(write, "\n".join(said(GroupDestroyedError, call) for call in calls).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(write)
        told = os.read(read, 5000).decode()
        return [told.count("belongs to the process that this one was forked from"), groups.destroy_all().destroyed]

    for told, destroyed in results(run(body, 2, tmp_path)):
        assert (told, len(destroyed)) == (3, 2)


@pytest.mark.parametrize("agree_s", [0, -1.0, float("nan"), float("inf"), 1e300])
def test_a_time_to_agree_that_is_none_is_refused_before_anything_is_destroyed(agree_s: float) -> None:
    for call in (groups.destroy, groups.destroy_all):
        with pytest.raises(UsageError, match="got agree_s="):
            call(agree_s=agree_s)


class Stuck:
    """A group whose abort does not end, as NCCL's on one rank alone may not; its work must not be asked meanwhile."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def abort(self) -> None:
        self.released.wait()

    def is_completed(self) -> bool:
        assert self.released.is_set()
        return True


def test_an_abort_that_does_not_end_blocks_nobody(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        stuck, record = Stuck(), registry.record_of(dist.new_group([0]))
        record.adrift.append(registry.Adrift([stuck], (), "stuck"))
        registry.ABORT_S = 0.1
        registry.GroupRecord.group = lambda _: stuck  # type: ignore[method-assign]
        began = time.monotonic()
        record.abort()
        told = [record.aborted, record.aborting(), record.sweep()]
        error = said(TeardownError, lambda: groups.destroy_all(agree_s=0.1))
        took_s = time.monotonic() - began
        stuck.released.set()
        told += [record.aborting(5.0), record.sweep()]
        groups.destroy_all(agree_s=0.1)
        return [told, error, took_s, record.name, dist.is_initialized()]

    ((told, error, took_s, name, initialized),) = results(run(body, 1, tmp_path))
    assert told == [True, True, 1, False, 0] and took_s < 5 and not initialized
    # The default group would take the other with it.
    assert error.count(f"not destroyed, since the abort of {name} has not ended after 0.1 s") == 2


def test_all_is_drained_before_the_first_group_is_destroyed(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        stuck, fine = dist.new_group([0, 1]), dist.new_group([0, 1])
        context = AllReduceContext(stuck, deadline_s=0.3)
        if rank == 0:
            context.all_reduce(ones())
        destroy, given_up = dist.destroy_process_group, []

        def watched(group: Any) -> None:
            given_up.append(registry.record_of(stuck, to_destroy=True).aborted if group is fine else None)
            destroy(group)

        dist.destroy_process_group = watched
        said(TeardownError, lambda: groups.destroy_all(agree_s=3.0))
        return given_up[0]

    # The rank with nothing under way has nothing to give up.
    assert results(run(body, 2, tmp_path)) == [True, False]


@pytest.mark.parametrize("waits", [True, False])
def test_who_would_wait_for_absent_ranks_aborts(tmp_path: Path, waits: bool) -> None:
    def body(rank: int) -> Any:
        group = dist.new_group([0, 1])
        record = registry.record_of(group)
        if rank == 1:
            stay([0])
            return None
        groups._waits_for_all = lambda _: waits  # type: ignore[assignment]
        told = said(TeardownError, lambda: groups.destroy(group, agree_s=0.2))
        finish(rank)
        return [told, record.aborted, group in c10d._world.pg_map]

    (told, aborted, listed), _ = results(run(body, 2, tmp_path))
    assert "ranks [1] did not come" in told and (aborted, listed) == (waits, False)


def test_who_would_wait_for_what_was_dropped_aborts(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        group = dist.new_group([0, 1])
        record = registry.record_of(group)
        groups._waits_for_all = lambda _: True  # type: ignore[assignment]
        if rank == 0:
            AllReduceContext(group).all_reduce(ones())
            told = said(TeardownError, lambda: groups.destroy(group, agree_s=0.5))
        else:
            told = str(groups.destroy(group, agree_s=5.0).destroyed)
        return [told, record.aborted]

    (told, aborted), (_, peer_aborted) = results(run(body, 2, tmp_path))
    assert "1 dropped collectives were not complete" in told and aborted and not peer_aborted


def test_what_is_still_under_way_after_a_teardown_is_counted_and_named_and_blocks_nobody(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        heard: list[Event] = []
        subscribe(heard.append)
        for _ in range(2):
            dist.new_group([0, 1])  # held by c10d alone, so that to destroy it may free it
        if rank == 1:
            stay([0])
            return None
        finished = c10d._get_default_store()
        for number, group in enumerate(list(c10d._world.pg_map)[1:]):
            context: Any = AllReduceContext(group)
            for _ in range(number + 1):
                context.all_reduce(ones(7 + number))
            del context
        del group
        began = time.monotonic()
        said(TeardownError, lambda: groups.destroy_all(agree_s=0.3))
        took_s = time.monotonic() - began
        told = [[event.message, dict(event.fields)] for event in heard if event.name == "collectives-adrift"]
        after = groups.destroy_all().adrift, registry.adrift()
        finished.set("finished/0", "1")
        return [took_s, told, after]

    stuck, _ = run(body, 2, tmp_path, group_timeout_s=25.0)
    assert stuck.result, stuck.log
    took_s, ((message, fields),), (none, after) = stuck.result
    # gloo waits in a group's destructor for what is under way, until the timeout of the group.
    assert took_s < 20
    left = fields["collectives"]
    assert (fields["count"], sorted(after), none) == (3, sorted(left), [])
    assert all(name in message and name.startswith("group ") and "test_groups.py:" in name for name in left)
    kinds = sorted(name.split(", ")[1] for name in left)
    assert kinds == [
        "collective 0 (all_reduce sum float32[7])",
        "collective 0 (all_reduce sum float32[8])",
        "collective 1 (all_reduce sum float32[8])",
    ]
