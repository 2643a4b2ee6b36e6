# SPDX-License-Identifier: Apache-2.0
"""Ranks that differ are named, and only what counts is compared."""

from __future__ import annotations

from dataclasses import replace

from megatron_fixes.overlay.agreement import Account, disagreement

SAME = Account("0.1.0", True, "0.16.1", ("MF0001", "MF0003"), ("megatron.core.a 12",))


def test_equal_ranks_agree() -> None:
    assert disagreement([SAME] * 8) == ""
    assert disagreement([]) == ""


def test_the_smaller_groups_are_named_after_the_largest() -> None:
    ranks = [SAME] * 8
    ranks[3] = replace(SAME, in_force=("MF0001",))
    ranks[6] = replace(SAME, on=False)
    assert disagreement(ranks) == (
        "ranks 0-2, 4-5, 7: MF0001, MF0003 in force, megatron-core 0.16.1, megatron-fixes 0.1.0; "
        "rank 3: MF0001 in force, megatron-core 0.16.1, megatron-fixes 0.1.0; "
        "rank 6: overlay off (megatron-core 0.16.1)"
    )


def test_each_thing_that_counts_makes_a_difference() -> None:
    for other in (
        replace(SAME, version="0.2.0"),
        replace(SAME, release="0.16.0"),
        replace(SAME, texts=("megatron.core.a 13",)),
        replace(SAME, in_force=()),
        replace(SAME, release=""),
        replace(SAME, in_files=("MF0002",)),
    ):
        assert disagreement([SAME, other]).count("rank ") == 2


def test_what_the_files_hold_is_not_said_to_be_missing() -> None:
    assert str(replace(SAME, in_force=(), in_files=("MF0001", "MF0003"))) == (
        "no fix put in at import, MF0001, MF0003 in the files already, megatron-core 0.16.1, megatron-fixes 0.1.0"
    )
    assert "MF0001, MF0003 in force, MF0002 in the files already, " in str(replace(SAME, in_files=("MF0002",)))
    assert str(replace(SAME, in_force=())).startswith("no fix in force, megatron-core")
