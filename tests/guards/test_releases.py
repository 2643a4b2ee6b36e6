# SPDX-License-Identifier: Apache-2.0
"""The guards on real megatron-core of each line, two ranks on gloo: put on, of use, and taken off without a trace.

Needs torch (CPU).
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from megatron_fixes.config import GUARD_NAMES

from .runs import RELEASES, drilled, named, tree_of

DRILLS = ("identity", "gradients", "abandoned", "first_batch", "late", "teardown")
SEVERAL = {"0.12.3", "0.16.1", "0.17.1"}


@pytest.fixture(scope="module", params=RELEASES)
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the drills found over one release."""
    return drilled(tree_of(request.param), DRILLS)


@pytest.fixture(scope="module", params=sorted(SEVERAL))
def special(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """A release, and what the drills of several optimizer instances found over it."""
    return request.param, drilled(tree_of(request.param), ("streams", "undispatched"))


def test_every_attach_point_is_wrapped_once_and_the_very_same_object_put_back(found: dict[str, Any]) -> None:
    identity = found["identity"]
    assert tuple(identity["installed"]) == GUARD_NAMES
    assert identity["changed"] == [
        "ColumnParallelLinear.__init__",
        "DistributedDataParallel.zero_grad_buffer",
        "_ParamAndGradBucketGroup.finish_grad_sync",
        "_ParamAndGradBucketGroup.start_grad_sync",
        "_ParamAndGradBucketGroup.start_param_sync",
        "destroy_model_parallel",
    ]
    assert identity["second"] and identity["put_back"] and identity["after"] == []


def test_gradients_are_bit_identical_with_guards_and_without(found: dict[str, Any]) -> None:
    for rank in found["gradients"]:
        digests = {name: phase["digests"] for name, phase in rank["result"].items()}
        assert len(set(digests["plain"])) == 3
        assert digests["guarded"] == digests["bounded"] == digests["plain"]


def test_what_hooks_issue_is_outstanding_until_the_step_is_finished(found: dict[str, Any]) -> None:
    for rank in found["gradients"]:
        for name in ("guarded", "bounded"):
            phase = rank["result"][name]
            assert [kind for kind, _ in phase["tracked"][-1]] == ["grad_reduce_handle"] * 4
            for _, place in phase["tracked"][-1]:
                assert re.search(r"param_and_grad_buffer\.py:\d+ register_grad_ready$", place)
            assert phase["left"] == 0
        assert rank["events"] == []


def test_a_step_that_was_abandoned_is_drained_and_later_ones_are_right(found: dict[str, Any]) -> None:
    for rank in found["abandoned"]["both"]:
        assert rank["result"], rank
        for steps in rank["result"].values():
            assert [report.get("error", report.get("wrong")) for report in steps.values()] == [0] * 4
        assert [event["count"] for event in named(rank, "abandoned-step-drained")] == [2, 2, 4]


def test_a_first_batch_that_was_abandoned_leaves_nothing_behind(found: dict[str, Any]) -> None:
    for rank in found["first_batch"]["both"]:
        assert rank["result"], rank
        assert rank["result"]["within"] == rank["result"]["after"] == rank["result"]["whole"]
    # Where one rank alone goes on, its next reduction would meet the first one of its peer.
    assert "expected the same of ranks [1]" in found["first_batch"]["alone"][0]["result"]


def test_a_rank_that_abandons_a_step_alone_is_told_within_the_deadline(found: dict[str, Any]) -> None:
    alone, _ = found["abandoned"]["alone"]
    name, message, seconds = alone["result"]
    assert name == "CollectiveTimeoutError" and seconds < 5
    assert "expected the same of ranks [1]" in message


def test_a_late_peer_is_named_with_group_and_buckets_at_the_deadline(found: dict[str, Any]) -> None:
    name, message, missing, seconds = found["late"][0]["result"]
    assert name == "CollectiveTimeoutError" and missing == [1] and 0.4 <= seconds < 1.95
    (event,) = named(found["late"][0], "collective-late")
    assert event["ranks"] == [0, 1] and event["missing"] == [1] and event["bucket_elements"]
    assert f"on process group {event['group']} of ranks [0, 1]" in message
    assert "not known to have issued it: ranks [1]" in event["message"]


def test_teardown_drains_and_names_the_groups_that_are_left_once(found: dict[str, Any]) -> None:
    for rank in found["teardown"]:
        assert rank["result"]["complete"] and rank["result"]["outstanding"] == 4
        (event,) = named(rank, "process-groups-left")
        assert event["count"] == len(event["groups"]) == rank["result"]["left"] > 10
        assert "MF0005 destroys them" in event["message"]
        assert any(name.startswith("TENSOR_MODEL_PARALLEL_GROUP") for name in event["groups"])


def test_the_missing_wait_is_added_where_a_release_lacks_it_and_told_once_a_bucket_group(
    special: tuple[str, dict[str, Any]],
) -> None:
    release, found = special
    lacks = release != "0.17.1"
    for rank in found["streams"]:
        assert (rank["result"]["races"], rank["result"]["races_on_default_stream"], rank["result"]["wrong"]) == (
            0,
            0,
            0,
        )
        told = [event["what"] for event in named(rank, "stream-not-ordered")]
        assert sorted({*told}) == (
            [
                "later reads of the gradients were not ordered after the reduction",
                "the reduction was not ordered after the stream that wrote the gradients",
            ]
            if lacks
            else []
        )
        # Four bucket groups, two steps.
        assert len(told) == (8 if lacks else 0)


def test_a_reduction_that_was_not_dispatched_is_told_also_where_megatron_says_nothing(
    special: tuple[str, dict[str, Any]],
) -> None:
    one, two = special[1]["undispatched"]
    for rank in one:
        assert rank["result"][-1] == "AssertionError"
        assert "Megatron raises now" in named(rank, "reduction-not-dispatched")[0]["message"]
    for rank in two:
        assert rank["result"] == ["finished"] * 3
        assert "go on as if they were reduced" in named(rank, "reduction-not-dispatched")[0]["message"]
