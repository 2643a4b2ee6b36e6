# SPDX-License-Identifier: Apache-2.0
"""Every fix on every release: what is said without running anything is what running it shows.

``scan`` calls a fix needed if and only if its proof shows the defect on the release as published, and with the patch
or the overlay the defect is gone. ``nox -s table`` runs this alone. A class a release, since a worker of pytest-xdist
takes a class at a time (``--dist loadscope``) and one run of the proofs serves all tests of a release.

Needs torch (CPU) and the megatron-core packages, which are fetched once into the cache. Real Megatron-LM, real gloo
process groups.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from functools import cache
from typing import Any

import pytest

from megatron_fixes import catalog
from megatron_fixes.catalog.expectation import VARIANTS, expected_outcome
from megatron_fixes.patching.scan import scan
from megatron_fixes.patching.target import find_target
from megatron_fixes.proofs.releases import fetch

CATALOG = catalog.load()
FIXES = tuple(CATALOG.matrix.fixes)


@cache
def prove(release: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Run everything over one release, as the command line does."""
    command = [sys.executable, "-m", "megatron_fixes.proofs", "--release", release]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1600)
    assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    results = {(event["variant"], event["id"]): event for event in events if event["event"] == "result"}
    for (variant, fix_id), result in results.items():
        for name, case in result["evidence"].items():
            if "again_after" in case:
                warnings.warn(
                    f"{release} {variant} {fix_id}, {name}: run again after {case['again_after']}", stacklevel=1
                )
    return results


@cache
def static(release: str) -> dict[str, str]:
    """What ``scan`` says of one release as published: fix to verdict."""
    rows = scan(find_target(fetch(release, CATALOG.matrix)), CATALOG)
    return {row.finding.fix_id: row.finding.verdict for row in rows}


def controls(release: str, variant: str) -> list[dict[str, Any]]:
    """What each rank saw in the control of MF0006."""
    by_rank: list[dict[str, Any]] = prove(release)[variant, "MF0006"]["evidence"]["control"]["by_rank"]
    return by_rank


@pytest.mark.timeout(1800)
class OnRelease:
    """What is asked of each release; collected once a release, below."""

    release: str

    @pytest.mark.parametrize("fix_id", FIXES)
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_the_outcome_is_the_one_that_the_matrix_leads_one_to_expect(self, variant: str, fix_id: str) -> None:
        result = prove(self.release)[variant, fix_id]
        assert result["outcome"] == expected_outcome(CATALOG, fix_id, self.release, variant), result["evidence"]
        assert result["expected"] == result["outcome"]
        if variant == "overlay" and CATALOG.patch(fix_id, self.release):
            assert fix_id in result["evidence"]["overlay"]["in_force"]
        if result["outcome"] != "not-runnable":
            # Not one case out of several: each shows the defect by itself.
            cases = [case for case in result["evidence"].values() if "outcome" in case]
            assert {case["outcome"] for case in cases if "control" not in case} == {result["outcome"]}
            assert {case["outcome"] for case in cases if "control" in case} <= {"clean"}

    @pytest.mark.parametrize("fix_id", FIXES)
    def test_scan_calls_a_fix_needed_if_and_only_if_the_release_shows_the_defect(self, fix_id: str) -> None:
        assert (static(self.release)[fix_id] == "needed") == (
            prove(self.release)["vanilla", fix_id]["outcome"] == "defect"
        )

    def test_training_that_mf0006_is_not_about_keeps_every_bit(self) -> None:
        """No or equal overflows, constant scale, bf16, a chain of one, an optimizer by itself, equal scales loaded."""
        if not CATALOG.patch("MF0006", self.release):
            return
        bits = {variant: [rank["bits"] for rank in controls(self.release, variant)] for variant in VARIANTS}
        assert bits["patched"] == bits["overlay"] == bits["vanilla"]
        assert all(len(set(rank.values())) == len(rank) == 14 for rank in bits["vanilla"])


for _release in CATALOG.matrix.releases:
    _name = f"TestOn_{_release.replace('.', '_')}"
    globals()[_name] = type(_name, (OnRelease,), {"release": _release})
