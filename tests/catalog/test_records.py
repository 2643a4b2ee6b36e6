# SPDX-License-Identifier: Apache-2.0
"""A cell that says it was tested on a GPU has a record of that run, made with the patch as it is now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_fixes import catalog

# matrix.json beside them is of compilers, not of GPUs (test_hardware_records.py).
RECORDS = sorted((Path(__file__).parents[2] / "docs" / "records").glob("*-h200*.json"))
CATALOG = catalog.load()
CELLS = [
    (release, fix_id)
    for fix_id, fix in CATALOG.matrix.fixes.items()
    for release, cell in fix.cells.items()
    if "nccl-h200" in cell.tested
]


NEWEST = {fix_id: release for release, fix_id in CELLS}


def seen(release: str, fix_id: str) -> set[tuple[str, str]]:
    """Variants with their outcomes, from records that were made with the patch as it is now."""
    patch = CATALOG.patch(fix_id, release)
    assert patch is not None
    found = set()
    for path in RECORDS:
        record = json.loads(path.read_text("utf-8"))
        if not all("H200" in device for device in record["machine"]["devices"]):
            continue
        if record["patches"].get(f"{release} {fix_id}") != patch.body_sha256:
            continue
        for report in record["releases"]:
            if (report["release"], report["backend"]) == (release, "nccl"):
                found |= {(r["variant"], r["outcome"]) for r in report["results"] if r["id"] == fix_id}
        jobs = [job for job in record["torchrun"] if (job["release"], job["id"]) == (release, fix_id)]
        in_force = [job for job in jobs if all(fix_id in fixes for fixes in job.get("in_force", [[]]))]
        found |= {("torchrun", job["outcome"]) for job in in_force}
    return found


@pytest.mark.parametrize(("release", "fix_id"), CELLS)
def test_a_record_shows_the_defect_before_and_its_absence_after_however_the_fix_came(release: str, fix_id: str) -> None:
    expected = {("vanilla", "defect"), ("patched", "clean"), ("overlay", "clean")}
    if release == NEWEST[fix_id]:
        expected.add(("torchrun", "clean"))
    assert seen(release, fix_id) == expected


def test_there_is_a_cell_to_check() -> None:
    assert CELLS
