# SPDX-License-Identifier: Apache-2.0
"""The watcher tells each late collective of a device once, asks nothing of those in time, and its thread ends."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from megatron_fixes import events
from megatron_fixes.collectives import GroupDestroyedError
from megatron_fixes.guards import late, watcher
from megatron_fixes.guards.handles import keep
from megatron_fixes.guards.ledger import GRADIENTS, Ledger, works_of


class Work:
    """Of a device: asked, never waited for."""

    def __init__(self) -> None:
        self.done, self.asked = False, 0

    def is_completed(self) -> bool:
        self.asked += 1
        return self.done


class Handle:
    """As c10d's coalescing manager."""

    def __init__(self, *works: Work) -> None:
        self.works = list(works)


class BucketGroup:
    """What is looked at of one."""

    def __init__(self, handle: Handle | None) -> None:
        data = SimpleNamespace(is_cuda=True, numel=lambda: 64)
        self.buckets = [SimpleNamespace(grad_data=data)]
        self.ddp_config = SimpleNamespace(use_distributed_optimizer=True, num_distributed_optimizer_instances=1)
        self.grad_reduce_handle: Handle | None = handle


@pytest.fixture
def heard() -> Iterator[list[events.Event]]:
    told: list[events.Event] = []
    end = events.subscribe(told.append)
    yield told
    end()


def noted(ledger: Ledger, work: Work) -> BucketGroup:
    bucket_group = BucketGroup(Handle(work))
    keep(ledger.note(bucket_group, GRADIENTS, sys._getframe()))
    return bucket_group


def test_a_late_collective_is_told_once_with_place_and_sizes(heard: list[events.Event]) -> None:
    ledger = Ledger()
    held = noted(ledger, Work())
    looking = watcher.Watcher(ledger, late.Terms(deadline_s=0.05))
    looking.look()
    assert heard == []
    time.sleep(0.06)
    looking.look()
    looking.look()
    (event,) = heard
    assert event.name == "collective-late" and event.fields["bucket_elements"] == (64,)
    assert "test_watcher.py:" in event.fields["place"] and held.grad_reduce_handle is not None


def test_works_are_not_asked_before_the_deadline_nor_after_they_are_complete(heard: list[events.Event]) -> None:
    ledger, work = Ledger(), Work()
    held = noted(ledger, work)
    terms = late.Terms(deadline_s=60.0)
    looking = watcher.Watcher(ledger, terms)
    looking.look()
    assert work.asked == 0
    work.done, terms.deadline_s = True, 1e-9
    looking.look()
    looking.look()
    assert work.asked == 1 and heard == [] and held.grad_reduce_handle is not None


def test_without_a_deadline_nothing_is_told(heard: list[events.Event]) -> None:
    ledger = Ledger()
    held = noted(ledger, Work())
    watcher.Watcher(ledger, late.Terms()).look()
    assert heard == [] and held


def test_what_megatron_let_go_of_is_not_outstanding() -> None:
    ledger = Ledger()
    kept, finished, gone = (noted(ledger, Work()) for _ in range(3))
    finished.grad_reduce_handle = None
    del gone
    assert [one.bucket_group for one in ledger.outstanding()] == [kept]


def test_a_hang_is_told_though_megatron_let_go_of_the_handle(heard: list[events.Event]) -> None:
    """As with NCCL, whose wait only tells the stream to wait."""
    ledger = Ledger()
    held = noted(ledger, Work())
    held.grad_reduce_handle = None
    time.sleep(0.06)
    for _ in range(2):
        watcher.Watcher(ledger, late.Terms(deadline_s=0.05)).look()
    assert [event.name for event in heard] == ["collective-late"] and ledger.outstanding() == []


def test_works_are_kept_until_they_are_complete_or_the_next_is_issued_or_the_model_goes(
    heard: list[events.Event],
) -> None:
    ledger = Ledger()
    works = [Work() for _ in range(4)]
    alive = [weakref.ref(work) for work in works]
    works[0].done = True
    groups = [noted(ledger, work) for work in works[:3]]
    for bucket_group in groups:
        bucket_group.grad_reduce_handle = None
    groups[1].grad_reduce_handle = Handle(works[3])
    keep(ledger.note(groups[1], GRADIENTS, sys._getframe()))
    works.clear()
    del groups[2], bucket_group
    assert [reference() is not None for reference in alive] == [True, False, False, True]
    looking = watcher.Watcher(ledger, late.Terms(deadline_s=1e-9))
    looking.look()
    assert [reference() is not None for reference in alive] == [False, False, False, True]
    assert len(heard) == 1


def test_what_waits_behind_a_late_collective_of_its_group_is_not_told(heard: list[events.Event]) -> None:
    ledger, works = Ledger(), [Work(), Work(), Work()]
    held = [noted(ledger, work) for work in works]
    for number, bucket_group in enumerate(held):
        bucket_group.data_parallel_group = held[number // 2]  # type: ignore[attr-defined]
    monitor = watcher.Watcher(ledger, late.Terms(deadline_s=1e-9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(late, "records_of", lambda _: [])
        monitor.look()
        monitor.look()
        assert len(heard) == 2
        works[0].done = True
        monitor.look()
    assert len(heard) == 3


def test_works_of_a_group_that_is_gone_are_not_asked(
    heard: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch asks them under a lock that an abort holds, with Python's own in its hand."""

    def gone(_: object) -> list[object]:
        raise GroupDestroyedError("aborted")

    ledger, work = Ledger(), Work()
    held = noted(ledger, work)
    monkeypatch.setattr(late, "records_of", gone)
    watcher.Watcher(ledger, late.Terms(deadline_s=1e-9)).look()
    assert heard == [] and work.asked == 0 and held


def test_a_handle_counts_from_the_first_call_that_held_it() -> None:
    ledger = Ledger()
    bucket_group = noted(ledger, Work())
    (first,) = ledger.outstanding()
    # 0.16 and later: start_grad_sync does nothing if it is called again in the first batch.
    assert ledger.note(bucket_group, GRADIENTS, sys._getframe()) is None
    assert ledger.outstanding() == [first]
    bucket_group.grad_reduce_handle = Handle(Work())
    assert ledger.note(bucket_group, GRADIENTS, sys._getframe()) is not None
    assert ledger.outstanding() != [first]


def test_there_is_one_thread_and_it_ends(heard: list[events.Event]) -> None:
    ledger = Ledger()
    held = noted(ledger, Work())
    before = threading.active_count()
    looking = watcher.Watcher(ledger, late.Terms(deadline_s=0.05))
    looking.start()
    looking.start()
    assert threading.active_count() == before + 1
    end = time.monotonic() + 5
    while not heard and time.monotonic() < end:
        time.sleep(0.01)
    assert [event.name for event in heard] == ["collective-late"] and held
    looking.stop()
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() == before and not looking.running


def test_the_thread_is_on_the_device_of_the_one_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    set_by: list[tuple[int, str]] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: set_by.append((device, threading.current_thread().name))
    )
    looking = watcher.Watcher(Ledger(), late.Terms(deadline_s=0.05))
    looking.start()
    end = time.monotonic() + 5
    while not set_by and time.monotonic() < end:
        time.sleep(0.01)
    looking.stop()
    assert set_by == [(3, "megatron-guards")]


def test_the_works_of_every_kind_of_handle_are_found() -> None:
    work = Work()
    for handle in (Handle(work), SimpleNamespace(handles=[work]), SimpleNamespace(all_to_all_handle=work), work):
        assert works_of(handle) == [work]
    assert works_of(SimpleNamespace(handles=None)) == [] and works_of(object()) == []


def test_the_group_of_a_late_collective_is_aborted_if_asked_for(
    heard: list[events.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Record:
        name, ranks, rank, aborted = "7", (0, 1), 0, 0

        def abort(self) -> None:
            self.aborted += 1

    record, ledger = Record(), Ledger()
    monkeypatch.setattr(late, "records_of", lambda _: [record])
    held = noted(ledger, Work())
    for abort in (False, True):
        error = late.tell_late(ledger.outstanding()[0], 1.0, late.Terms(1.0, abort))
        assert record.aborted == abort and "process group 7 of ranks [0, 1]" in error.message
    # The second time it is not told again.
    assert [event.fields["aborted"] for event in heard] == [False] and held
