# SPDX-License-Identifier: Apache-2.0
"""StreamOrderChecker on a CPU, over recorded streams: finds each missing order, cries no wolf, and leaves no trace.

The programs of ``benchmarks/stream_cases.py``, which runs them on a GPU too, and what only the observer can get wrong.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.cuda import _gpu_trace as trace

from megatron_fixes.collectives import StreamOrderChecker, StreamOrderError, recorded_streams
from megatron_fixes.collectives.stream_hooks import _listen_to_trace, listening
from megatron_fixes.collectives.stream_observer import Observer
from megatron_fixes.errors import UsageError

from ..loading import load_program

cases = load_program("benchmarks/stream_cases.py")
THIS = Path(__file__).name

pytestmark = pytest.mark.usefixtures("group_of_one")


@pytest.fixture
def streams() -> Iterator[tuple[Any, Any]]:
    """The default stream and another one, recorded."""
    with recorded_streams.install():
        yield torch.cuda.default_stream(), torch.cuda.Stream(name="side")


def verbs(checker: StreamOrderChecker) -> list[tuple[str, str]]:
    return [(race.earlier.verb, race.later.verb) for race in checker.races]


@pytest.mark.parametrize("name", cases.CASES)
def test_a_missing_order_is_found_and_a_right_program_is_left_alone(name: str) -> None:
    for right in (False, True):
        with StreamOrderChecker() as checker:
            cases.CASES[name].run(cases.Place("cpu"), right=right)
        assert bool(checker.races) == (not right), [str(race) for race in checker.races]
        if right:
            checker.require_none()
        else:
            with pytest.raises(StreamOrderError) as caught:
                checker.require_none()
            assert caught.value.races == checker.races


def test_both_places_are_told_by_line_of_the_program(streams: Any) -> None:
    main, side = streams
    with StreamOrderChecker() as checker:
        tensor = torch.zeros(8)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            tensor.add_(1)  # first
        tensor.sum()  # second
        with torch.cuda.stream(side):
            tensor.mul_(2)
        del tensor  # third
    lines = Path(__file__).read_text().splitlines()
    first, second, third = (
        next(number for number, line in enumerate(lines, 1) if line.endswith(f"  # {name}"))
        for name in ("first", "second", "third")
    )
    text = str(checker.races[0])
    assert f"aten::add_.Tensor writes on side at {__file__}:{first}" in text
    assert f"aten::sum reads on default stream at {__file__}:{second}" in text
    assert verbs(checker)[-1] == ("writes", "frees")
    assert checker.races[-1].later.place == f"{__file__}:{third}"


def test_a_place_in_a_backward_is_the_line_that_asked_for_it(streams: Any) -> None:
    _, side = streams
    with StreamOrderChecker() as checker:
        weight = torch.ones(8, requires_grad=True)
        loss = (weight * weight).sum()
        with torch.cuda.stream(side):
            loss.backward()
    assert checker.races
    assert all(THIS in race.later.place and THIS in race.earlier.place for race in checker.races)


def test_frames_of_tools_are_passed_over() -> None:
    with StreamOrderChecker(tools=[cases.__file__]) as checker:
        cases.write_then_read(cases.Place("cpu"), right=False)
    assert THIS in checker.races[0].earlier.place


def test_frees_can_be_left_out() -> None:
    with StreamOrderChecker(frees=False) as checker:
        cases.free_while_used(cases.Place("cpu"), right=False)
        cases.free_before_the_wait(cases.Place("cpu"), right=False)
    assert not checker.races


def test_a_free_is_where_the_last_reference_goes(streams: Any) -> None:
    main, side = streams
    with StreamOrderChecker() as checker:
        tensor = torch.zeros(8)
        view = tensor[2:]
        side.wait_stream(main)
        with torch.cuda.stream(side):
            view.sum()
        del tensor
        main.wait_stream(side)
        del view
    checker.require_none()


def test_a_storage_that_is_resized_away_is_freed(streams: Any) -> None:
    main, side = streams
    for waits in (False, True):
        with StreamOrderChecker() as checker:
            tensor = torch.zeros(8)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                tensor.sum()
            if waits:
                main.wait_stream(side)
            tensor.untyped_storage().resize_(0)
        assert verbs(checker) == ([] if waits else [("reads", "frees")])


def test_a_storage_that_was_resized_belongs_to_the_stream_that_did_it(streams: Any) -> None:
    main, side = streams
    with StreamOrderChecker() as checker:
        tensor = torch.zeros(8)
        tensor.untyped_storage().resize_(0)
        with torch.cuda.stream(side):
            tensor.untyped_storage().resize_(32)
            tensor.zero_()
        main.wait_stream(side)
        tensor.sum()
        del tensor
    (race,) = checker.races
    assert (race.earlier.verb, race.later.verb, race.names) == ("reads", "frees", ("default stream", "side"))


def test_tensors_from_before_the_block_are_checked_but_not_for_frees(streams: Any) -> None:
    _, side = streams
    tensor, other = torch.zeros(8), torch.zeros(8)
    with StreamOrderChecker() as checker:
        with torch.cuda.stream(side):
            tensor.sum()
            other.sum()
        other.zero_()
        del tensor, other
    assert verbs(checker) == [("reads", "writes")]


def test_shapes_and_views_touch_nothing(streams: Any) -> None:
    _, side = streams
    with StreamOrderChecker() as checker:
        tensor = torch.zeros(8)
        with torch.cuda.stream(side):
            tensor.view(2, 4).t()[1:].expand(3, 3, 2)
            torch.zeros_like(tensor)
            tensor.new_zeros(3)
    checker.require_none()


def test_memory_may_not_be_used_elsewhere_before_the_stream_that_it_came_from(streams: Any) -> None:
    _, side = streams
    with StreamOrderChecker() as checker:
        tensor = torch.empty(8)
        with torch.cuda.stream(side):
            tensor.zero_()
    assert verbs(checker)[0] == ("writes", "writes")


def test_the_host_has_waited_for_a_number_that_it_has(streams: Any) -> None:
    main, side = streams
    with StreamOrderChecker() as checker:
        tensor = torch.zeros(8)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            tensor.add_(1)
            tensor.sum().item()
        tensor.zero_()
    checker.require_none()


def test_waiting_for_one_collective_is_no_wait_for_the_next(streams: Any) -> None:
    with StreamOrderChecker() as checker:
        first, second = torch.zeros(8), torch.zeros(8)
        work = dist.all_reduce(first, async_op=True)
        last = dist.all_reduce(second, async_op=True)
        work.wait()
        first.sum()
        assert not checker.races
        second.sum()
        last.wait()
    assert verbs(checker) == [("writes", "reads")]


def test_a_coalesced_run_is_waited_for_as_a_whole(streams: Any) -> None:
    with StreamOrderChecker() as checker:
        first, second = torch.zeros(8), torch.zeros(8)
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(first)
            dist.all_reduce(second)
        manager.wait()
        first.sum()
        second.sum()
    checker.require_none()


def test_a_collective_without_a_work_ran_in_the_order_of_its_stream(
    streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NCCL's do that are not asynchronous, since torch 2.8."""
    main, side = streams
    with StreamOrderChecker() as checker:
        monkeypatch.setattr(dist.Work, "unbox", lambda _: None)
        monkeypatch.setattr(dist.Work, "wait", lambda *_: None)
        tensor = torch.zeros(8)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            dist.all_reduce(tensor)
            tensor.sum()
        assert not checker.races
        tensor.sum()
        monkeypatch.undo()
    assert verbs(checker) == [("writes", "reads")]


@pytest.mark.parametrize("waits", [False, True])
def test_a_run_that_is_gathered_by_the_back_end_is_waited_for_as_a_whole(
    waits: bool, streams: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside of it collectives have no work, and are not in the order of the stream either; gloo can't do it."""
    works = [dist.all_reduce(torch.zeros(8), async_op=True)]
    monkeypatch.setattr(dist.ProcessGroup, "_start_coalescing", lambda *_: None)
    monkeypatch.setattr(dist.ProcessGroup, "_end_coalescing", lambda *_: works[0])
    monkeypatch.setattr(dist.Work, "unbox", lambda _: None)
    with StreamOrderChecker() as checker:
        tensor = torch.zeros(8)
        dist.group.WORLD._start_coalescing(torch.device("cpu"))
        works.append(dist.all_reduce(tensor, async_op=True))
        work = dist.group.WORLD._end_coalescing(torch.device("cpu"))
        if waits:
            work.wait()
        tensor.sum()
    assert bool(checker.races) == (not waits)


def test_a_barrier_blocks_the_host(streams: Any) -> None:
    _, side = streams
    with StreamOrderChecker() as checker:
        tensor = torch.zeros(8)
        dist.barrier()
        with torch.cuda.stream(side):
            tensor.zero_()
    checker.require_none()


def test_a_work_is_not_kept_once_the_program_has_it(streams: Any) -> None:
    with StreamOrderChecker():
        work = dist.all_reduce(torch.zeros(8), async_op=True)
        work.wait()
        watched = weakref.ref(work)
        del work
        torch.zeros(1)
        assert watched() is None


def test_collectives_of_host_memory_order_no_streams(monkeypatch: pytest.MonkeyPatch, streams: Any) -> None:
    """As on a GPU, where only tensors on a device count: this observer is told that none of these is."""
    observer = Observer(recorded=False, frees=True)
    main, side = map(observer.stream, streams)
    with listening(observer):
        observer.history.begin(main)
        work = dist.all_reduce(torch.zeros(8), async_op=True)
        with torch.cuda.stream(streams[1]):
            work.wait()
    assert main not in observer.history._clock(side)


def test_what_is_sent_may_go_while_it_is_under_way(streams: Any) -> None:
    """NCCL's send records its stream. The group sends nothing: nobody is there to receive."""
    from torch.testing._internal.distributed import fake_pg

    assert fake_pg is not None, "registers its back end"
    group = dist.new_group([0], backend="fake")
    with StreamOrderChecker() as checker:
        tensor = torch.zeros(8)
        work = group.send([tensor], 0, 0)
        del tensor
        assert not checker.races
        tensor = torch.zeros(8)
        last = group.send([tensor], 0, 0)
        tensor.zero_()
        work.wait()
        last.wait()
    assert verbs(checker) == [("reads", "writes")]


def test_what_a_backward_used_is_the_business_of_autograd(streams: Any) -> None:
    main, side = streams
    with StreamOrderChecker() as checker:
        weight = torch.ones(8, requires_grad=True)
        loss = (weight * weight).sum()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            loss.backward()
        del loss, weight
    checker.require_none()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, case in cases.CASES.items() if not case.collective])
def test_real_streams_are_watched_as_well(name: str) -> None:
    for right in (False, True):
        with StreamOrderChecker() as checker:
            cases.CASES[name].run(cases.Place("cuda"), right=right)
        torch.cuda.synchronize()
        assert bool(checker.races) == (not right), [str(race) for race in checker.races]


@pytest.mark.parametrize("waits", [False, True])
def test_a_functional_collective_is_waited_for_when_it_is_used(waits: bool, streams: Any) -> None:
    from torch.distributed import _functional_collectives as functional

    with StreamOrderChecker() as checker:
        tensor = torch.zeros(8)
        reduced = functional.all_reduce(tensor, "sum", dist.group.WORLD)
        if waits:
            reduced.sum()
        tensor.zero_()
    reduced.sum()
    assert bool(checker.races) == (not waits)


def test_streams_are_recorded_for_the_time_of_the_block_only() -> None:
    before = {
        name: vars(torch.cuda).get(name) for name in ("Stream", "Event", "stream", "current_stream", "synchronize")
    }
    with StreamOrderChecker():
        assert torch.cuda.Stream is recorded_streams.Stream
    assert before == {name: vars(torch.cuda).get(name) for name in before}


def test_all_hooks_are_taken_away_also_after_an_exception(streams: Any) -> None:
    owners = (torch.cuda, torch.cuda.Event, torch.cuda.Stream, torch.Tensor, torch.UntypedStorage, dist.Work)
    before = [dict(vars(owner)) for owner in owners]
    with pytest.raises(KeyError), StreamOrderChecker():
        assert [dict(vars(owner)) for owner in owners] != before
        raise KeyError
    assert [dict(vars(owner)) for owner in owners] == before
    assert torch.zeros(2).untyped_storage().resize_(0) is not None


def test_nothing_is_kept_alive_and_what_is_freed_later_is_not_looked_at(streams: Any) -> None:
    main, side = streams
    with StreamOrderChecker() as checker:
        tensor = torch.zeros(8)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            tensor.sum()
    del tensor
    gc.collect()
    checker.require_none()


def test_one_checker_runs_once_at_a_time_and_again_afterwards() -> None:
    checker = StreamOrderChecker()
    with checker, pytest.raises(UsageError, match="second start"), checker:
        pass
    for right in (False, True):
        with checker:
            cases.write_then_read(cases.Place("cpu"), right=right)
        assert bool(checker.races) == (not right)


def test_many_races_are_told_shortly(streams: Any) -> None:
    _, side = streams
    with StreamOrderChecker() as checker:
        tensors = [torch.zeros(8) for _ in range(9)]
        for tensor in tensors:
            with torch.cuda.stream(side):
                tensor.add_(1)
    assert len(checker.races) == 9
    with pytest.raises(StreamOrderError, match="got 9 pairs") as caught:
        checker.require_none()
    assert str(caught.value).count(" writes on ") == 2 * 1, "equal lines are told once"


def test_events_below_python_order_too(monkeypatch: pytest.MonkeyPatch, streams: Any) -> None:
    """The trace of torch, as it fires on CUDA, is fed by hand: what it tells orders, and its callbacks go again."""
    monkeypatch.setattr(torch._C, "_activate_gpu_trace", lambda: None)
    observer = Observer(recorded=True, frees=True)
    main, side = map(observer.stream, streams)
    before = [list(registry.callback_list) for registry in (trace.EventRecordCallbacks, trace.EventWaitCallbacks)]
    with ExitStack() as undo:
        _listen_to_trace(observer, undo)
        written = observer.history.begin(side)
        trace.EventRecordCallbacks.fire_callbacks(7, side)
        trace.EventWaitCallbacks.fire_callbacks(7, main)
        assert observer.history._clock(main)[side] == written
        trace.EventDeletionCallbacks.fire_callbacks(7)
        trace.DeviceSynchronizationCallbacks.fire_callbacks()
        assert observer.history._host[side] == written
    assert before == [list(r.callback_list) for r in (trace.EventRecordCallbacks, trace.EventWaitCallbacks)]
