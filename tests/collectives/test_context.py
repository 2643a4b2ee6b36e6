# SPDX-License-Identifier: Apache-2.0
"""AllReduceContext on real gloo groups: right results, clear errors, and nothing left behind whatever happens.

Needs torch (CPU). What bare torch does in the same drills: ``benchmarks/drills.py``.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fixes import events
from megatron_fixes.collectives import (
    AllReduceContext,
    ClosedContextError,
    CollectiveFailedError,
    CollectiveTimeoutError,
    GroupDestroyedError,
)
from megatron_fixes.collectives.registry import adrift
from megatron_fixes.errors import UsageError
from megatron_fixes.proofs.world import Ended, finish, run, stay


def ones(count: int = 4) -> torch.Tensor:
    return torch.ones(count)


def said(error: type[Exception], call: Any) -> str:
    """Call; the message of the error that must come."""
    try:
        call()
    except error as caught:
        return str(caught)
    raise AssertionError(f"no {error.__name__}")


def results(ended: list[Ended]) -> list[Any]:
    assert [rank.code for rank in ended] == [0] * len(ended), [rank.log[-2000:] for rank in ended]
    return [rank.result for rank in ended]


def test_every_kind_of_collective_gives_what_torch_gives(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        with AllReduceContext() as context:
            reduced, part, gathered = ones() * (rank + 1), torch.empty(2), torch.empty(4)
            first, second = ones(), ones() * 10
            context.all_reduce(reduced, dist.ReduceOp.MAX)
            context.reduce_scatter(part, torch.arange(4.0))
            context.all_gather(gathered, torch.full((2,), float(rank)))
            with context.coalesced() as run_:
                run_.all_reduce(first)
                run_.all_reduce(second)
            assert len(context.outstanding) == 4
        assert not context.outstanding and context.closed
        return [tensor.tolist() for tensor in (reduced, part, gathered, first, second)]

    expected = [[2.0] * 4, [0.0, 2.0], [0.0, 0.0, 1.0, 1.0], [2.0] * 4, [20.0] * 4]
    assert results(run(body, 2, tmp_path)) == [expected, [expected[0], [4.0, 6.0], *expected[2:]]]


def test_an_exception_in_a_run_issues_nothing_and_the_next_collective_is_right(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        context = AllReduceContext()
        try:
            with context.coalesced() as run_:
                run_.all_reduce(ones())
                raise KeyError(rank)
        except KeyError:
            pass
        assert not context.outstanding
        tensor = ones()
        context.all_reduce(tensor).wait()
        context.close()
        return tensor.tolist()

    assert results(run(body, 2, tmp_path)) == [[2.0] * 4] * 2


def test_a_run_of_several_kinds_is_refused_before_anything_is_issued(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        def mixed() -> None:
            with context.coalesced() as run_:
                run_.all_reduce(ones())
                run_.all_gather(torch.empty(4), torch.empty(2))

        context = AllReduceContext()
        text = said(UsageError, mixed)
        with context:
            tensor = ones()
            context.all_reduce(tensor)
        return [text, tensor.tolist()]

    for text, tensor in results(run(body, 2, tmp_path)):
        assert "expected collectives of one kind" in text
        assert tensor == [2.0] * 4


def test_a_step_that_raises_between_issue_and_wait_leaves_the_next_one_clean(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        for _ in range(3):
            try:
                with AllReduceContext(deadline_s=5.0) as context:
                    context.all_reduce(ones())
                    context.all_reduce(ones())
                    raise KeyError(rank)
            except KeyError:
                assert not context.outstanding
        with AllReduceContext(deadline_s=5.0) as context:
            tensor = ones()
            context.all_reduce(tensor)
        return tensor.tolist()

    assert results(run(body, 2, tmp_path)) == [[2.0] * 4] * 2


def test_a_deadline_names_the_collective_and_the_rank_that_did_not_come(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        group = dist.new_group([0, 1, 2])
        if rank == 2:
            stay([0, 1])
            return None
        context = AllReduceContext(group, deadline_s=0.5)
        operation = context.all_reduce(torch.ones(3, 5))
        try:
            operation.wait()
        except CollectiveTimeoutError as error:
            assert operation.state == "issued" and context.outstanding == (operation.operation,)
            finish(rank)
            return [str(error), list(error.missing or ())]
        raise AssertionError("no error")

    *waiting, _ = run(body, 3, tmp_path)
    for rank in waiting:
        assert rank.result, rank.log
        text, missing = rank.result
        assert missing == [2]
        assert "all_reduce sum float32[3, 5]" in text and "ranks [0, 1, 2] within 0.5 s" in text
        assert "test_context.py:" in text


def test_a_deadline_holds_for_a_reduce_scatter_and_for_a_run_of_them(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        if rank == 1:
            stay([0])
        part, parts = torch.empty(2), [torch.empty(1), torch.empty(1)]
        context = AllReduceContext(deadline_s=0.3)
        context.reduce_scatter(part, torch.arange(4.0))
        with context.coalesced() as run_:
            for one in parts:
                run_.reduce_scatter(one, torch.ones(2))
        late = [said(CollectiveTimeoutError, context.wait)] if rank == 0 else []
        finish(rank)
        end = time.monotonic() + 20
        while context.outstanding and time.monotonic() < end:
            with suppress(CollectiveTimeoutError):
                context.wait()
        return [late, part.tolist(), [one.item() for one in parts]]

    (late, *first), (_, *second) = results(run(body, 2, tmp_path))
    assert "reduce_scatter sum float32[2] <- float32[4]" in late[0] and "ranks [1]" in late[0]
    assert (first, second) == ([[0.0, 2.0], [2.0, 2.0]], [[4.0, 6.0], [2.0, 2.0]])


def test_a_dropped_reduce_scatter_blocks_nobody(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        if rank == 1:
            stay([0])  # which it does for ever if the destructor of the other waits for this one
        context: Any = AllReduceContext()
        context.reduce_scatter(torch.empty(2), torch.ones(4))
        del context
        finish(rank)
        end = time.monotonic() + 10
        while adrift() and time.monotonic() < end:
            time.sleep(0.01)
        return adrift()

    assert results(run(body, 2, tmp_path)) == [[], []]


def test_close_aborts_what_is_stuck_and_says_so_once(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        group = dist.new_group([0, 1])
        if rank == 1:
            stay([0])
            return None
        context = AllReduceContext(group, deadline_s=0.3)
        context.all_reduce(ones())
        late = said(CollectiveTimeoutError, context.close)
        context.close()
        gone = said(GroupDestroyedError, lambda: AllReduceContext(group).all_reduce(ones()))
        finish(rank)
        return [late, gone, said(ClosedContextError, lambda: context.all_reduce(ones()))]

    stuck, _ = run(body, 2, tmp_path)
    assert stuck.result, stuck.log
    late, gone, closed = stuck.result
    assert "not known to have issued it: ranks [1]" in late
    assert "it was aborted" in gone
    assert "a closed context of process group" in closed


def test_a_destroyed_group_is_an_error_at_the_call_and_at_the_wait(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        group = dist.new_group([0, 1])
        context = AllReduceContext(group, deadline_s=5.0)
        if rank == 0:
            context.all_reduce(ones())
        dist.destroy_process_group(group)
        at_wait = said(GroupDestroyedError, context.wait) if rank == 0 else ""
        texts = [
            said(GroupDestroyedError, lambda: context.all_reduce(ones())),
            said(GroupDestroyedError, lambda: AllReduceContext(group)),
            at_wait,
        ]
        context.close()
        dist.barrier()
        return texts

    for at_call, at_making, at_wait in results(run(body, 2, tmp_path)):
        assert "it was destroyed" in at_call and "was destroyed" in at_making
        assert not at_wait or "waiting for collective 0" in at_wait


def test_the_destructor_says_what_was_dropped_and_where_and_keeps_its_memory(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        heard: list[events.Event] = []
        events.subscribe(heard.append)
        group = dist.new_group([0, 1])
        if rank == 0:
            context: Any = AllReduceContext(group)
            context.all_reduce(ones())
            del context
            before = adrift()
        dist.barrier()
        if rank == 1:
            with AllReduceContext(group) as context:
                context.all_reduce(ones())
            return None
        end = time.monotonic() + 5
        while adrift() and time.monotonic() < end:
            time.sleep(0.01)
        return [before, adrift(), [(event.name, event.fields["place"]) for event in heard]]

    ((before,), after, heard), _ = results(run(body, 2, tmp_path))
    ((name, place),) = heard
    assert before.endswith(f", collective 0 (all_reduce sum float32[4]), issued at {place}") and after == []
    assert name == "collective-dropped" and "test_context.py:" in place


def test_the_destructor_is_harmless_when_the_group_is_gone(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        group = dist.new_group([0, 1])
        context: Any = AllReduceContext(group)
        if rank == 0:
            context.all_reduce(ones())
        dist.destroy_process_group(group)
        del group, context
        dist.barrier()
        return True

    assert results(run(body, 2, tmp_path)) == [True, True]


def test_a_killed_rank_is_an_error_that_names_the_collective(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        context = AllReduceContext(deadline_s=5.0)
        context.all_reduce(ones())
        context.wait()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        context.all_reduce(ones())
        text = said(CollectiveFailedError, context.wait)
        assert not context.outstanding
        context.close()
        return text

    survivor, killed = run(body, 2, tmp_path)
    assert killed.code == -signal.SIGKILL
    assert "collective 1 (all_reduce sum float32[4])" in survivor.result


def test_a_stopped_rank_is_named_at_the_deadline(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        context = AllReduceContext(deadline_s=0.5)
        context.all_reduce(ones())
        context.wait()
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            store.set("pid", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        context.all_reduce(ones())
        try:
            context.wait()
        except CollectiveTimeoutError as error:
            os.kill(int(store.get("pid")), signal.SIGKILL)
            return list(error.missing or ())
        raise AssertionError("no error")

    survivor, stopped = run(body, 2, tmp_path)
    assert survivor.result == [1], survivor.log
    assert stopped.code == -signal.SIGKILL


def test_a_block_takes_one_deadline_and_can_not_begin_on_a_closed_context(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        group = dist.new_group([0, 1])
        if rank == 1:
            stay([0])
            return None
        heard: list[str] = []
        events.subscribe(lambda event: heard.append(event.name))
        context = AllReduceContext(group, deadline_s=1.0)

        def block() -> None:
            with context:
                context.all_reduce(ones())

        text = said(CollectiveTimeoutError, block)
        finish(rank)
        return [text, heard, said(ClosedContextError, context.__enter__)]

    first, _ = run(body, 2, tmp_path)
    assert first.result, first.log
    text, heard, closed = first.result
    assert "given up" in text and heard == []
    assert "closed context" in closed


def test_a_type_that_the_back_end_does_not_take_is_not_laid_to_a_peer(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        context = AllReduceContext(deadline_s=5.0)
        text = said(CollectiveFailedError, lambda: context.all_reduce(ones().to(torch.float8_e4m3fn)).wait())
        with AllReduceContext(deadline_s=5.0) as after:
            after.all_reduce(ones())
        return text

    for text in results(run(body, 2, tmp_path)):
        assert "Invalid scalar type" in text and "Give the back end a type" in text and "peer" not in text


def test_no_thread_is_left(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        before = threading.active_count()
        for _ in range(10):
            with AllReduceContext(deadline_s=5.0) as context:
                context.all_reduce(ones())
        return threading.active_count() - before

    assert results(run(body, 2, tmp_path)) == [0, 0]


@pytest.mark.parametrize("deadline_s", [0, -1.0, float("nan"), float("inf"), 1e300])
def test_a_deadline_that_is_none_is_refused(deadline_s: float) -> None:
    with pytest.raises(UsageError, match="expected more than 0 seconds"):
        AllReduceContext(deadline_s=deadline_s)


def test_without_a_process_group_the_error_says_what_to_call() -> None:
    with pytest.raises(GroupDestroyedError, match="init_process_group"):
        AllReduceContext()
