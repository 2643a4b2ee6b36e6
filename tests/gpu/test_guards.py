# SPDX-License-Identifier: Apache-2.0
"""The guards on real megatron-core with NCCL: the same gradients, a hang told and ended, a missing order put in.

Needs two CUDA devices. The same drills on gloo, and more, are in ``tests/guards``.
"""

from __future__ import annotations

from typing import Any

import pytest

from ..guards.runs import drilled, named, tree_of

RELEASES = ("0.14.0", "0.16.1", "0.19.2")
DRILLS = ("gradients", "recovered", "hung", "teardown", "side_stream")

pytestmark = [pytest.mark.gpu(count=2), pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=RELEASES)
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the drills found over one release."""
    return {"release": request.param, **drilled(tree_of(request.param), DRILLS, backend="nccl")}


def test_gradients_are_bit_identical_with_guards_and_without(found: dict[str, Any]) -> None:
    for rank in found["gradients"]:
        assert rank["result"], rank
        digests = {name: phase["digests"] for name, phase in rank["result"].items()}
        assert len(set(digests["plain"])) == 3
        assert digests["guarded"] == digests["bounded"] == digests["plain"]
        assert all(phase["left"] == 0 for phase in rank["result"].values()) and rank["events"] == []


def test_a_step_that_was_abandoned_is_drained_and_later_ones_are_right(found: dict[str, Any]) -> None:
    for rank in found["recovered"]["both"]:
        assert rank["result"], rank
        for steps in rank["result"]["situations"].values():
            assert [report.get("error", report.get("wrong")) for report in steps.values()] == [0] * 4


def test_a_late_peer_is_named_at_the_deadline_and_the_step_goes_on(found: dict[str, Any]) -> None:
    waits, comes = found["hung"]["late"]
    assert waits["result"]["said"] == comes["result"]["said"] == ["no error"] * 2, (waits, comes)
    event, *_ = named(waits, "collective-late")
    assert event["missing"] == [1] and event["ranks"] == [0, 1] and not event["aborted"] and event["bucket_elements"]


def test_a_hang_is_ended_by_an_abort_and_the_next_step_says_why(found: dict[str, Any]) -> None:
    for name in ("never", "never, several"):
        waits, _ = found["hung"][name]
        assert waits["result"], waits
        (event,) = named(waits, "collective-late")
        assert event["missing"] == [1] and event["aborted"] and event["ranks"] == [0, 1]
        first, second = waits["result"]["said"]
        assert first == "no error" and second.startswith("GroupDestroyedError"), waits["result"]
        assert waits["result"]["seconds"][0] < 10 and waits["result"]["seconds"][1] < 1, waits["result"]


def test_teardown_drains_and_names_the_groups_that_are_left(found: dict[str, Any]) -> None:
    for rank in found["teardown"]:
        assert rank["result"], rank
        assert rank["result"]["complete"] and rank["result"]["outstanding"] == 4
        (event,) = named(rank, "process-groups-left")
        assert event["count"] == rank["result"]["left"] > 10


def test_the_wait_that_a_release_lacks_is_added_on_real_streams(found: dict[str, Any]) -> None:
    wrong = {
        name: [rank["result"] and rank["result"]["wrong_steps"] for rank in found["side_stream"][name]]
        for name in ("plain", "guarded")
    }
    assert wrong["guarded"] == [0, 0], found["side_stream"]
    assert all(wrong["plain"]) == (found["release"] != "0.19.2"), wrong
