# SPDX-License-Identifier: Apache-2.0
"""StreamOrder gives the order that it promises, and keeps memory while it is used: StreamOrderChecker is judge.

Over recorded streams on a CPU; each promise is also shown to be needed, by the same program without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fixes.collectives import AllReduceContext, StreamOrder, StreamOrderChecker, recorded_streams
from megatron_fixes.collectives.streams import Communication

pytestmark = pytest.mark.usefixtures("group_of_one")


@pytest.fixture
def checker() -> Iterator[StreamOrderChecker]:
    with recorded_streams.install():
        yield StreamOrderChecker()


def verbs(checker: StreamOrderChecker) -> list[tuple[str, str]]:
    return [(race.earlier.verb, race.later.verb) for race in checker.races]


@pytest.mark.parametrize("consumes", [True, False])
def test_communication_comes_after_its_producer_and_before_its_consumer(
    consumes: bool, checker: StreamOrderChecker
) -> None:
    producer = torch.cuda.Stream()
    with checker:
        order = StreamOrder.of_its_own()
        with torch.cuda.stream(producer):
            gradient = torch.ones(8)
            with order.communication(gradient) as done:
                assert torch.cuda.current_stream() is order.stream
                dist.all_reduce(gradient)
            assert torch.cuda.current_stream() is producer
            if consumes:
                done.consume()
            gradient.mul_(2)
    assert verbs(checker) == ([] if consumes else [("writes", "writes")])


def test_every_consumer_has_to_consume_and_may(checker: StreamOrderChecker) -> None:
    second, third = torch.cuda.Stream(), torch.cuda.Stream()
    with checker:
        gradient = torch.ones(8)
        with StreamOrder.of_its_own().communication(gradient) as done:
            gradient.add_(1)
        for stream in (second, third):
            with torch.cuda.stream(stream):
                done.consume()
                gradient.sum()
        assert not checker.races
        gradient.sum()
    assert verbs(checker) == [("writes", "reads")]


def test_a_second_communication_comes_after_what_is_written_between(checker: StreamOrderChecker) -> None:
    with checker:
        order, gradient = StreamOrder.of_its_own(), torch.ones(8)
        for _ in range(2):
            gradient.add_(1)
            with order.communication(gradient) as done:
                gradient.mul_(2)
            done.consume()
    checker.require_none()


@pytest.mark.parametrize("told", [True, False])
def test_memory_is_kept_from_issue_to_consumption(told: bool, checker: StreamOrderChecker) -> None:
    with checker:
        gradient = torch.ones(8)
        with StreamOrder.of_its_own().communication(*([gradient] if told else [])) as done:
            gradient.sum()
        del gradient
        done.consume()
    assert verbs(checker) == ([] if told else [("reads", "frees")])


@pytest.mark.parametrize("told", [True, False])
def test_memory_of_the_producer_waits_for_another_consumer(told: bool, checker: StreamOrderChecker) -> None:
    consumer = torch.cuda.Stream()
    with checker:
        gradient = torch.ones(8)
        with StreamOrder.of_its_own().communication(*([gradient] if told else [])) as done:
            gradient.mul_(2)
        with torch.cuda.stream(consumer):
            done.consume()
            gradient.sum()
        del gradient
    assert set(verbs(checker)) == (set() if told else {("writes", "frees"), ("reads", "frees")})


@pytest.mark.parametrize("told", [True, False])
def test_memory_made_by_the_body_waits_for_its_consumer(told: bool, checker: StreamOrderChecker) -> None:
    with checker:
        with StreamOrder.of_its_own().communication() as done:
            gathered = torch.ones(8)
            if told:
                done.made(gathered)
        done.consume()
        gathered.sum()
        del gathered, done
    assert verbs(checker) == ([] if told else [("reads", "frees")])


def test_a_communication_that_is_dropped_tells_the_allocator(checker: StreamOrderChecker) -> None:
    with checker:
        gradient = torch.ones(8)
        with StreamOrder.of_its_own().communication(gradient) as done:
            gradient.sum()
        del gradient, done
    checker.require_none()


def test_what_was_issued_before_an_exception_is_ordered_too(checker: StreamOrderChecker) -> None:
    with checker:
        gradient = torch.ones(8)
        communications: list[Communication] = []
        with pytest.raises(KeyError), StreamOrder.of_its_own().communication(gradient) as done:
            communications.append(done)
            gradient.add_(1)
            raise KeyError
        assert torch.cuda.current_stream() is torch.cuda.default_stream()
        communications[0].consume()
        gradient.sum()
    checker.require_none()


def test_the_host_never_blocks(checker: StreamOrderChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the host waits")

    for owner in (recorded_streams.Stream, recorded_streams.Event, torch.cuda):
        monkeypatch.setattr(owner, "synchronize", refuse)
    with StreamOrder.of_its_own().communication(torch.ones(8)) as done:
        pass
    done.consume()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_without_cuda_nothing_is_asked_of_it() -> None:
    order, tensor = StreamOrder.of_its_own(), torch.ones(8)
    assert order.stream is None
    with order.communication(tensor) as done:
        tensor.add_(1)
        done.made(torch.ones(2))
    done.consume()
    assert tensor.sum() == 16


@pytest.mark.parametrize("waits", [True, False])
def test_a_context_with_a_stream_orders_producer_collective_and_consumer(
    waits: bool, checker: StreamOrderChecker
) -> None:
    producer = torch.cuda.Stream()
    with checker:
        context = AllReduceContext(stream=torch.cuda.Stream())
        with torch.cuda.stream(producer):
            gradient = torch.ones(8)
            handle = context.all_reduce(gradient)
            if waits:
                handle.wait()
            gradient.mul_(2)
        context.close()
    assert verbs(checker) == ([] if waits else [("writes", "writes")])


def test_a_context_that_is_waited_for_on_another_stream_lets_no_memory_go_early(checker: StreamOrderChecker) -> None:
    consumer = torch.cuda.Stream()
    with checker:
        context = AllReduceContext(stream=torch.cuda.Stream())
        gradient = torch.ones(8)
        handle = context.all_reduce(gradient)
        with torch.cuda.stream(consumer):
            handle.wait()
            gradient.sum()
        del gradient, handle
        context.close()
    checker.require_none()
