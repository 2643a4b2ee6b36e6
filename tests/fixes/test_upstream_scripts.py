# SPDX-License-Identifier: Apache-2.0
"""The scripts for reports upstream show their defect on the newest release, and its absence with our patch.

Needs torch (CPU) and the newest megatron-core package, which is fetched once into the cache. A script that needs a GPU
says so and is not run here: its fix's proof has the case for the GPU.
"""

from __future__ import annotations

import pytest

from megatron_fixes import catalog
from megatron_fixes.proofs.__main__ import variant_tree

from ..loading import load_program

CATALOG = catalog.load()
NEWEST = list(CATALOG.matrix.releases)[-1]


REPORTS = load_program("scripts/render_reports.py")
OPEN = REPORTS.with_script(CATALOG)
RUNNABLE = [fix_id for fix_id in OPEN if REPORTS.NEEDS_GPU not in REPORTS.script_of(fix_id).read_text("utf-8")]


def test_every_script_belongs_to_an_open_defect() -> None:
    assert [path.stem.upper() for path in sorted(REPORTS.SCRIPTS.glob("mf*.py"))] == OPEN
    assert len(RUNNABLE) >= len(OPEN) - 1


@pytest.mark.parametrize("fix_id", RUNNABLE)
def test_the_script_shows_the_defect_before_and_its_absence_after(fix_id: str) -> None:
    code, said = REPORTS.observe(REPORTS.script_of(fix_id), REPORTS.fetch(NEWEST, CATALOG.matrix))
    assert (code, [line.partition(":")[0] for line in said]) == (1, ["observed", "expected"]), said
    with variant_tree(CATALOG, NEWEST, "patched", [fix_id]) as tree:
        code, said = REPORTS.observe(REPORTS.script_of(fix_id), tree)
    assert code == 0, said
