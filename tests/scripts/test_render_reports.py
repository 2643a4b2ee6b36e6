# SPDX-License-Identifier: Apache-2.0
"""Reports for upstream: all but what scripts print is held without a run, and nobody files what is known there.

That the scripts show their defects is held by ``tests/fixes/test_upstream_scripts.py``.
"""

from __future__ import annotations

import re

import pytest

from megatron_fixes import catalog

from ..loading import load_program

REPORTS = load_program("scripts/render_reports.py")
CATALOG = catalog.load()
TEXT = REPORTS.REPORTS.read_text("utf-8")


def test_every_script_has_its_report_with_what_is_known_upstream() -> None:
    assert REPORTS.stale(CATALOG, TEXT) == []
    for fix_id in REPORTS.with_script(CATALOG):
        assert all(link.url in TEXT for link in CATALOG.matrix.fixes[fix_id].links)
    assert TEXT.count("**Observed**: ") == TEXT.count("**Expected**: ") == len(REPORTS.with_script(CATALOG))


def test_what_a_script_observed_may_be_anything_but_nothing() -> None:
    start = TEXT.index("**Observed**", TEXT.index("(MF0004 here"))
    end = TEXT.index("**Expected**", start)
    assert REPORTS.stale(CATALOG, f"{TEXT[:start]}**Observed**: 3\n\n- 4\n\n{TEXT[end:]}") == []
    for nothing in ("", "**Observed**: \n\n", "**Observed**:\n\n"):
        assert REPORTS.stale(CATALOG, TEXT[:start] + nothing + TEXT[end:]) == ["MF0004"]


@pytest.mark.parametrize(
    ("pattern", "other", "said"),
    [
        (r"issues/1150", "issues/1151", "MF0002"),
        (r"\*\*Known upstream\*\*: nothing that we found\n\n", "", "MF0003"),
        (r"DDP: after", "DDP: before", "MF0002"),
        (r"\*\*Expected\*\*: 1.5 on both ranks, both ways", "**Expected**: 1.5", "MF0002"),
        (r"\*\*Cause\*\*: in megatron", "**Cause**: somewhere in megatron", "MF0013"),
        (r"wrong masters in 6 of 6", "wrong masters in 5 of 6", "MF0025"),
        (r"## Gradient norm misses(?:(?!\n## ).)*", "", "MF0024"),
        (r"megatron-core 0\.\d+\.\d+ with", "megatron-core 0.1.0 with", "what stands above the reports"),
        (r"\Z", "\n## Another\n", "a report of nothing"),
    ],
)
def test_what_is_old_is_named(pattern: str, other: str, said: str) -> None:
    spoilt, count = re.subn(pattern, other, TEXT, count=1, flags=re.DOTALL)
    assert count == 1
    assert REPORTS.stale(CATALOG, spoilt)[:1] == [said]


def test_nobody_is_sent_to_a_thread_about_something_else() -> None:
    told = {
        report[: report.index(" here")]: report[report.index("**Known upstream**") :].splitlines()[0]
        for report in TEXT.split("\n(")[1:]
    }
    assert sorted(told) == REPORTS.with_script(CATALOG)
    for fix_id, line in told.items():
        to_add_to, _, related = line.partition("; related: ")
        for link in CATALOG.matrix.fixes[fix_id].links:
            assert (link.url in to_add_to, f"{link.url} ({link.about})" in related) == (
                link.kind == "same",
                link.kind == "related",
            )
        assert ("nothing that we found" in to_add_to) == ("https://" not in to_add_to)
    assert "nothing that we found; related: https://github.com/NVIDIA/Megatron-LM/issues/1150 (" in told["MF0002"]


def test_a_line_below_another_becomes_an_item_of_a_list() -> None:
    said = ["observed: sums\n  rank 0: 1\n  rank 1: 2", "expected: 3"]
    assert REPORTS.as_markdown(said) == "**Observed**: sums\n\n- rank 0: 1\n- rank 1: 2\n\n**Expected**: 3"
