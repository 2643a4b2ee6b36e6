# SPDX-License-Identifier: Apache-2.0
"""Random lives of contexts and groups on two real ranks: whatever the order of calls, results are right and errors due.

Hypothesis makes a plan; both ranks carry it out, each with its own delays, and report what was not as it must be. The
same two ranks (of ``random_lives.py``) serve all plans, so that what a plan leaves behind (a collective, a group, a
thread) shows in the next. ``LIVES=10000 pytest tests/collectives/test_random_lives.py --timeout 0`` tries more than the
gate does, new plans each time; a plan is one life cycle: contexts and groups are made, used, left in some way and made
anew. With two GPUs the same runs on NCCL, which the gate never does: ``LIVES=N pytest
tests/collectives/test_random_lives.py -k nccl --timeout 0``.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ..loading import ROOT
from .random_lives import ANSWER_S, CONTEXTS, GROUPS, KINDS, WORLD

PLANS = int(os.environ.get("LIVES", "60"))
BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.gpu(count=2))]
PROGRAM = Path(__file__).parent / "random_lives.py"

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


class TwoRanks:
    """The program that has two ranks carry out plans."""

    def __init__(self, folder: Path, backend: str) -> None:
        self.said = folder / "said"
        command = [sys.executable, str(PROGRAM), str(folder), backend, str(os.getpid())]
        # What was in reach stays so: some machines have their packages there.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        pipe = subprocess.PIPE
        with self.said.open("w") as said:
            self.process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=said, text=True)

    def carry_out(self, plan: list[tuple[str, int]]) -> list[list[str]]:
        plans, answers = self.process.stdin, self.process.stdout
        assert plans is not None and answers is not None
        with suppress(BrokenPipeError):
            plans.write(json.dumps(plan) + "\n")
            plans.flush()
        ready, _, _ = select.select([answers], [], [], ANSWER_S + 30.0)
        line = answers.readline() if ready else ""
        assert line, self.said.read_text()
        found: list[list[str]] = json.loads(line)
        return found

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    ranks = TwoRanks(tmp_path_factory.mktemp("lives"), request.param)
    yield ranks
    ranks.stop()


@pytest.mark.parametrize("two_ranks", BACKENDS, indirect=True)
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
@example(plan=[("all_reduce", 0), ("all_gather", 0), ("wait last", 0), ("reduce_scatter", 0), ("fork", 0), ("wait", 0)])
@example(plan=[("coalesced", 1), ("raise", 1), ("all_reduce", 1), ("renew", 1), ("all_gather", 1), ("wait first", 1)])
@given(plan=st.lists(steps, min_size=5, max_size=40))
def test_whatever_the_order_of_calls_results_are_right_and_nothing_is_left(
    plan: list[tuple[str, int]], two_ranks: TwoRanks
) -> None:
    found = two_ranks.carry_out(plan)
    assert found == [[], []], json.dumps(found, indent=1)
