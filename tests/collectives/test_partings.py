# SPDX-License-Identifier: Apache-2.0
"""Ranks that gave a group up are not waited for as it is destroyed; those that are gone are waited for once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_fixes.collectives import AllReduceContext, CollectiveTimeoutError, TeardownError, groups, partings
from megatron_fixes.proofs.world import run, stay

from .test_context import ones, results, said


@pytest.mark.parametrize("giver", [0, 1])
def test_a_rank_that_gave_a_group_up_is_not_waited_for_and_not_called_absent(giver: int, tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        group = dist.new_group([0, 1, 2])
        if rank == giver:
            context = AllReduceContext(group, deadline_s=0.2)
            context.all_reduce(ones())
            said(CollectiveTimeoutError, context.close)
        dist.barrier()
        began, errors = time.monotonic(), {}
        if rank == 2:
            time.sleep(0.3)
        try:
            groups.destroy_all(agree_s=10.0)
        except TeardownError as error:
            errors = error.errors
        return [errors, group.group_name, time.monotonic() - began]

    for rank, (errors, name, took_s) in enumerate(results(run(body, 3, tmp_path))):
        assert errors == ({} if rank == giver else {name: f"ranks [{giver}] gave it up"})
        assert took_s < 5


def test_a_rank_that_is_gone_is_waited_for_once_however_many_groups_there_are(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        for _ in range(8):
            dist.new_group([0, 1, 2])
        if rank == 2:
            stay([0, 1])
            return None
        finished, began = c10d._get_default_store(), time.monotonic()
        try:
            groups.destroy_all(agree_s=1.0)
        except TeardownError as error:
            took_s = time.monotonic() - began
            finished.set(f"finished/{rank}", "1")
            return [list(error.errors.values()), took_s]
        return None

    first, second, _ = run(body, 3, tmp_path)
    for rank in (first, second):
        assert rank.result, rank.log
        told, took_s = rank.result
        assert told == ["ranks [2] did not come to destroy it within 1 s"] * 9
        assert took_s < 1.0 + partings.LOOK_S + 1.5


def test_a_rank_that_is_late_at_one_group_alone_is_not_called_absent_at_the_next(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        partings.LOOK_S = 8.0
        group = dist.new_group([0, 1])
        dist.barrier()
        if rank == 1:
            time.sleep(1.4)
        try:
            groups.destroy_all(agree_s=1.0)
        except TeardownError as error:
            return [error.errors, group.group_name]
        return None

    (first, name), (second, _) = results(run(body, 2, tmp_path))
    assert first == {name: "ranks [1] did not come to destroy it within 1 s"}
    assert second == {name: "rank 0 came and did not wait to destroy it within 1 s"}


class Mute:
    """A group whose store does not answer."""

    name, rank, ranks, asked = "mute", 0, (0, 1), 0

    def listed(self) -> Any:
        return self

    def store(self) -> Any:
        self.asked += 1
        raise RuntimeError("Broken pipe")


def test_a_store_that_did_not_answer_is_not_asked_again() -> None:
    one, record = partings.Partings(0.1), Mute()
    for _ in range(3):
        assert one.agree(record) == ["the store did not answer to destroy it within 0.1 s"]  # type: ignore[arg-type]
        one.tell_given_up(record)  # type: ignore[arg-type]
    assert record.asked == 1
