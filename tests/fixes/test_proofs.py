# SPDX-License-Identifier: Apache-2.0
"""Every fix on every release: the defect shows where the matrix says so, and is gone with the patch.

Needs torch (CPU) and the megatron-core packages, which are fetched once into the cache. Real DistributedDataParallel
and pipeline schedules, real gloo process groups.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
from unidiff import PatchSet

from megatron_fixes import catalog
from megatron_fixes.catalog.expectation import VARIANTS, expected_outcome
from megatron_fixes.patching.hunks import apply_patch
from megatron_fixes.proofs.__main__ import run_parent, variant_tree

CATALOG = catalog.load()
FIXES = tuple(CATALOG.matrix.fixes)
PATCHES = [patch for series in CATALOG.series.values() for patch in series.patches]
CELLS = [(release, variant, fix) for release in CATALOG.matrix.releases for variant in VARIANTS for fix in FIXES]


@cache
def prove(release: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Run everything over one release, as the command line does."""
    command = [sys.executable, "-m", "megatron_fixes.proofs", "--release", release]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    return {(event["variant"], event["id"]): event for event in events if event["event"] == "result"}


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


@pytest.mark.parametrize("line", [line for line, series in CATALOG.series.items() if len(series.patches) > 1])
def test_each_closed_subset_mends_what_is_in_it_and_nothing_else(line: str) -> None:
    release = CATALOG.matrix.lines()[line][-1]
    series = CATALOG.series[line]
    for subset in list(series.closed_subsets())[1:-1]:
        ids = [patch.fix_id for patch in subset]
        with variant_tree(CATALOG, release, "patched", ids) as tree:
            outcomes = {result["id"]: result["outcome"] for result in run_parent(tree, "gloo", series.ids())}
        assert outcomes == {fix_id: "clean" if fix_id in ids else "defect" for fix_id in series.ids()}


HUNKS = [
    pytest.param(patch, number, at, id=f"{patch.name.split('-')[0]}-file{number + 1}-hunk{at + 1}")
    for patch in PATCHES
    for number, file in enumerate(PatchSet(patch.text))
    for at in range(len(file))
]


@pytest.mark.parametrize(("patch", "number", "at"), HUNKS)
def test_without_any_one_hunk_the_proof_does_not_pass(patch: catalog.PatchFile, number: int, at: int) -> None:
    release = patch.header.applies_to[-1]
    file = PatchSet(patch.text)[number]
    left_out = file[at]
    head = f"diff --git {file.source_file} {file.target_file}\n--- {file.source_file}\n+++ {file.target_file}\n"
    rest = head + "".join(str(hunk) for hunk in file if hunk is not left_out)
    requires = patch.header.requires
    with variant_tree(CATALOG, release, "patched" if requires else "vanilla", requires) as base:
        original = (base / file.path).read_bytes()
    with variant_tree(CATALOG, release, "patched", [patch.fix_id]) as tree:
        (tree / file.path).write_bytes(apply_patch(rest, {file.path: original}, source="all hunks but one")[file.path])
        (result,) = run_parent(tree, "gloo", [patch.fix_id])
    assert result["outcome"] in ("defect", "not-runnable")
    if result["outcome"] == "not-runnable":
        # The code broke without the hunk, over a name that it brings; it is not that the proof found no ground to
        # stand on.
        added = "".join(line.value for line in left_out if line.is_added)
        brought = set(re.findall(r"\w+", added)) - set(re.findall(r"\w+", original.decode()))
        complained = set(re.findall(r"'(\w+)'", json.dumps(result["evidence"])))
        assert brought & complained, result["evidence"]


BUFFER = "megatron/core/distributed/param_and_grad_buffer.py"
STREAM_WAIT = "self.communication_stream.wait_stream(torch.cuda.current_stream())"
FLAG = "self.grad_reduce_dispatched = self.ddp_config.overlap_grad_reduce"
START = "        if self.is_first_batch and (\n"
# Fix, file, what is right in it, what is wrong.
MISTAKES = {
    "waits for itself": (
        "MF0001",
        BUFFER,
        STREAM_WAIT,
        "self.communication_stream.wait_stream(self.communication_stream)",
    ),
    "waits only before": (
        "MF0001",
        BUFFER,
        "torch.cuda.current_stream().wait_stream(self.communication_stream)",
        "pass",
    ),
    "waits the wrong way": (
        "MF0001",
        BUFFER,
        STREAM_WAIT,
        "torch.cuda.current_stream().wait_stream(self.communication_stream)",
    ),
    "never reduces": (
        "MF0001",
        BUFFER,
        START,
        "        if self.inter_distributed_optimizer_instance_group:\n            return\n" + START,
    ),
    "remembers without overlap too": ("MF0003", BUFFER, FLAG, "self.grad_reduce_dispatched = True"),
    "remembers nothing": ("MF0003", BUFFER, FLAG, "self.grad_reduce_dispatched = False"),
    "never reduces with one instance": (
        "MF0003",
        BUFFER,
        START,
        "        if self.ddp_config.num_distributed_optimizer_instances == 1:\n            return\n" + START,
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_patch_with_a_mistake_in_it_does_not_pass(mistake: str) -> None:
    fix_id, file, right, wrong = MISTAKES[mistake]
    with variant_tree(CATALOG, "0.16.1", "patched") as tree:
        path = tree / file
        text = path.read_text("utf-8")
        assert text.count(right) == 1
        path.write_text(text.replace(right, wrong), "utf-8")
        (result,) = run_parent(tree, "gloo", [fix_id])
    assert result["outcome"] in ("defect", "not-runnable"), result["evidence"]
