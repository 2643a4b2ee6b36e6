# SPDX-License-Identifier: Apache-2.0
"""Random lives of contexts and groups on two real ranks: whatever the order of calls, results are right and errors due.

Hypothesis makes a plan; both ranks carry it out, each with its own delays, and report what was not as it must be. The
same two ranks serve all plans, so that what a plan leaves behind (a collective, a group, a thread) shows in the next.
``LIVES=10000 pytest tests/collectives/test_random_lives.py --timeout 0`` tries more than the gate does, new plans each
time; a plan is one life cycle: contexts and groups are made, used, left in some way and made anew.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.distributed import distributed_c10d as c10d

from megatron_fixes.collectives import AllReduceContext, ClosedContextError, GroupDestroyedError, groups
from megatron_fixes.collectives.registry import adrift
from megatron_fixes.proofs.ranks import ForkedRank
from megatron_fixes.proofs.rendezvous import join_store, keep_store

CONTEXTS, GROUPS, WORLD = 3, 2, 2
PLANS = int(os.environ.get("LIVES", "60"))
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "coalesced")

context_steps = st.tuples(
    st.sampled_from(["wait", "wait first", "wait last", "close", "drop", "raise", "renew", "fork"]),
    st.integers(0, CONTEXTS - 1),
)
steps = st.one_of(
    st.tuples(st.sampled_from(KINDS), st.integers(0, CONTEXTS - 1)),
    st.tuples(st.sampled_from(KINDS), st.integers(0, CONTEXTS - 1)),
    context_steps,
    st.tuples(st.sampled_from(["destroy group", "renew group"]), st.integers(0, GROUPS - 1)),
    st.tuples(st.just("late"), st.integers(0, WORLD - 1)),
)


class Life:
    """What one rank does with a plan, and what it expects."""

    def __init__(self, rank: int, world: list[Any]) -> None:
        self.rank, self.groups = rank, world
        self.contexts: list[Any] = [None] * CONTEXTS
        self.due: list[list[tuple[Any, torch.Tensor, list[float]]]] = [[] for _ in range(CONTEXTS)]
        self.faults: list[str] = []
        self.number = 0

    def expect(self, good: bool, fault: str) -> None:
        if not good:
            self.faults.append(fault)

    def context(self, index: int) -> Any:
        """The context at a place, made if there is none; None if its group is gone."""
        if self.contexts[index] is None:
            group = self.groups[index % GROUPS]
            try:
                self.contexts[index] = AllReduceContext(group, deadline_s=20.0)
                self.expect(alive(group), "a context was made on a group that is gone")
            except GroupDestroyedError:
                self.expect(not alive(group), "no context could be made on a group that lives")
        return self.contexts[index]

    def issue(self, kind: str, index: int) -> None:
        context, group = self.context(index), self.groups[index % GROUPS]
        if context is None:
            return
        self.number += 1
        value = float(self.number)
        mine = torch.full((2,), value * (self.rank + 1))
        try:
            if kind == "all_reduce":
                handle, result, right = context.all_reduce(mine), mine, [3 * value] * 2
            elif kind == "reduce_scatter":
                result, right = torch.empty(1), [3 * value]
                handle = context.reduce_scatter(result, mine)
            elif kind == "all_gather":
                result, right = torch.empty(4), [value] * 2 + [2 * value] * 2
                handle = context.all_gather(result, mine)
            else:
                with context.coalesced() as run:
                    run.all_reduce(mine)
                    run.all_reduce(torch.ones(1))
                handle, result, right = None, mine, [3 * value] * 2
            self.expect(alive(group) and not context.closed, f"{kind} went out on a closed context or a gone group")
            self.due[index].append((handle, result, right))
        except ClosedContextError:
            self.expect(context.closed, f"{kind}: told closed, is open")
        except GroupDestroyedError:
            self.expect(not alive(group), f"{kind}: told gone, lives")

    def settle(self, index: int) -> None:
        for _, result, right in self.due[index]:
            self.expect(result.tolist() == right, f"got {result.tolist()}, expected {right}")
        self.due[index].clear()

    def on_context(self, what: str, index: int) -> None:
        context = self.contexts[index]
        if context is None:
            return
        handles = [entry for entry in self.due[index] if entry[0] is not None]
        if what == "wait":
            context.wait()
            self.settle(index)
        elif what in ("wait first", "wait last") and handles:
            handle, result, right = handles[0 if what == "wait first" else -1]
            handle.wait()
            handle.wait()
            self.expect(result.tolist() == right, f"{what}: got {result.tolist()}, expected {right}")
        elif what == "close":
            context.close()
            context.close()
            self.settle(index)
        elif what == "raise":
            self.left_by_exception(context)
            self.settle(index)
        elif what == "fork":
            child = os.fork()
            if child == 0:
                self.contexts[index] = context = None
                os._exit(0)
            self.expect(os.waitpid(child, 0)[1] == 0, "a fork died")
        elif what in ("drop", "renew"):
            self.due[index].clear()
            self.contexts[index] = None
        if context is not None and what in ("wait", "close", "raise"):
            self.expect(not context.outstanding, f"outstanding after {what}")

    def left_by_exception(self, context: Any) -> None:
        closed = context.closed
        try:
            with context:
                self.expect(not closed, "a block began on a closed context")
                raise KeyError
        except ClosedContextError:
            self.expect(closed, "told closed at the beginning of a block, is open")
        except KeyError:
            self.expect(context.closed, "open after an exception left its block")

    def on_group(self, what: str, index: int) -> None:
        if what == "destroy group" and alive(self.groups[index]):
            groups.destroy(self.groups[index])
            for number in range(index, CONTEXTS, GROUPS):
                self.settle(number)
        elif what == "renew group" and not alive(self.groups[index]):
            self.groups[index] = dist.new_group(list(range(WORLD)))
            for number in range(index, CONTEXTS, GROUPS):
                self.contexts[number] = None
                self.due[number].clear()

    def live(self, plan: list[tuple[str, int]]) -> list[str]:
        for what, index in plan:
            if what == "late":
                time.sleep(0.002 * (self.rank == index))
            elif what in KINDS:
                self.issue(what, index)
            elif what in ("destroy group", "renew group"):
                self.on_group(what, index)
            else:
                self.on_context(what, index)
        for index in range(CONTEXTS):
            self.on_context("close", index)
            self.contexts[index] = None
        for index in range(GROUPS):
            self.on_group("renew group", index)
        dist.barrier()
        end = time.monotonic() + 10
        while (left := adrift()) and time.monotonic() < end:
            time.sleep(0.001)
        self.expect(not left, f"{left} collectives left")
        self.expect(len(c10d._world.pg_map) == GROUPS + 1, f"{len(c10d._world.pg_map)} groups left")
        while threading.active_count() > 1 and time.monotonic() < end:
            time.sleep(0.001)
        self.expect(threading.active_count() == 1, f"{threading.active_count()} threads")
        return self.faults


def alive(group: Any) -> bool:
    return group in c10d._world.pg_map


def serve(rank: int, folder: Path, plans: int, faults: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=join_store(folder), rank=rank, world_size=WORLD)
    made = [dist.new_group(list(range(WORLD))) for _ in range(GROUPS)]
    with os.fdopen(plans) as lines:
        for line in lines:
            try:
                found = Life(rank, made).live([(what, index) for what, index in json.loads(line)])
            except Exception as error:  # noqa: BLE001 - hypothesis is to see it
                found = [f"{type(error).__name__}: {error}"]
            os.write(faults, (json.dumps(found) + "\n").encode())


class TwoRanks:
    """Two ranks that carry out one plan after the other; new ones after a plan that did not go well."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, 0
        self.start()

    def start(self) -> None:
        self.started += 1
        folder = self.folder / str(self.started)
        folder.mkdir()
        self.pipes = [(os.pipe(), os.pipe()) for _ in range(WORLD)]
        self.processes = [ForkedRank(lambda: keep_store(folder), folder / "store.log")] + [
            ForkedRank(
                lambda rank=rank: serve(rank, folder, self.pipes[rank][0][0], self.pipes[rank][1][1]),  # type: ignore[misc]
                folder / f"{rank}.log",
            )
            for rank in range(WORLD)
        ]
        self.answers = [os.fdopen(answer) for _, (answer, _) in self.pipes]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()

    def carry_out(self, plan: list[tuple[str, int]]) -> list[list[str]]:
        for (_, plans), _ in self.pipes:
            os.write(plans, (json.dumps(plan) + "\n").encode())
        found = [json.loads(line) if (line := self.answer(rank)) else ["no answer"] for rank in range(WORLD)]
        if any(found):
            self.stop()
            self.start()
        return found

    def answer(self, rank: int) -> str:
        ready, _, _ = select.select([self.answers[rank]], [], [], 60.0)
        return self.answers[rank].readline() if ready else ""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    ranks = TwoRanks(tmp_path_factory.mktemp("lives"))
    yield ranks
    ranks.stop()


@settings(
    max_examples=PLANS,
    deadline=None,
    derandomize="LIVES" not in os.environ,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@example(
    plan=[("all_reduce", 0), ("drop", 0), ("late", 1), ("destroy group", 0), ("all_reduce", 0), ("renew group", 0)]
)
@example(plan=[("reduce_scatter", 0), ("late", 0), ("drop", 0)])
@example(plan=[("coalesced", 1), ("raise", 1), ("all_reduce", 1), ("renew", 1), ("all_gather", 1), ("wait first", 1)])
@given(plan=st.lists(steps, min_size=5, max_size=40))
def test_whatever_the_order_of_calls_results_are_right_and_nothing_is_left(
    plan: list[tuple[str, int]], two_ranks: TwoRanks
) -> None:
    assert two_ranks.carry_out(plan) == [[], []]
