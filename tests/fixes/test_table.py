# SPDX-License-Identifier: Apache-2.0
"""Every fix on every release: the defect shows where the matrix says so, and is gone with the patch.

Needs torch (CPU) and the megatron-core packages, which are fetched once into the cache. Real DistributedDataParallel
and pipeline schedules, real gloo process groups.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

from megatron_fixes import catalog
from megatron_fixes.catalog.expectation import VARIANTS, expected_outcome

pytestmark = pytest.mark.timeout(900)
CATALOG = catalog.load()
FIXES = tuple(CATALOG.matrix.fixes)
CELLS = [(release, variant, fix) for release in CATALOG.matrix.releases for variant in VARIANTS for fix in FIXES]


@cache
def prove(release: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Run everything over one release, as the command line does."""
    command = [sys.executable, "-m", "megatron_fixes.proofs", "--release", release]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    return {(event["variant"], event["id"]): event for event in events if event["event"] == "result"}


def controls(release: str, variant: str) -> list[dict[str, Any]]:
    """What each rank saw in the control of MF0006."""
    by_rank: list[dict[str, Any]] = prove(release)[variant, "MF0006"]["evidence"]["control"]["by_rank"]
    return by_rank


@pytest.mark.parametrize(("release", "variant", "fix_id"), CELLS, ids=["-".join(cell) for cell in CELLS])
def test_the_outcome_is_the_one_that_the_matrix_leads_one_to_expect(release: str, variant: str, fix_id: str) -> None:
    result = prove(release)[variant, fix_id]
    assert result["outcome"] == expected_outcome(CATALOG, fix_id, release, variant), result["evidence"]
    assert result["expected"] == result["outcome"]
    if variant == "overlay" and CATALOG.patch(fix_id, release):
        assert fix_id in result["evidence"]["overlay"]["in_force"]
    if result["outcome"] != "not-runnable":
        # Not one case out of several: each shows the defect by itself.
        cases = [case for case in result["evidence"].values() if "outcome" in case]
        assert {case["outcome"] for case in cases if "control" not in case} == {result["outcome"]}
        assert {case["outcome"] for case in cases if "control" in case} == {"clean"}


PATCHED = [release for release in CATALOG.matrix.releases if CATALOG.patch("MF0006", release)]


@pytest.mark.parametrize("release", PATCHED)
def test_training_that_mf0006_is_not_about_keeps_every_bit(release: str) -> None:
    """No overflow or one in both, constant scale, bf16, a chain of one, an optimizer by itself, equal scales loaded."""
    bits = {variant: [rank["bits"] for rank in controls(release, variant)] for variant in VARIANTS}
    assert bits["patched"] == bits["overlay"] == bits["vanilla"]
    assert all(len(set(rank.values())) == len(rank) == 14 for rank in bits["vanilla"])
