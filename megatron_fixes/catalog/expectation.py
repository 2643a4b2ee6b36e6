# SPDX-License-Identifier: Apache-2.0
"""How a proof can be run and end, and which outcome the matrix leads one to expect. Pure.

Variants: ``vanilla`` is the release as published; ``patched`` is a copy with the line's whole series put in by the
same plan and transaction as ``megatron-fixes apply``; ``overlay`` is the release as published, patched at import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from megatron_fixes.catalog import Catalog

Outcome = Literal["defect", "clean", "not-runnable", "timeout"]
VARIANTS = ("vanilla", "patched", "overlay")


def expected_outcome(catalog: Catalog, fix_id: str, release: str, variant: str) -> Outcome:
    """What a proof should find; ``not-runnable`` where it can't run here, or a fix is needed and there is no patch."""
    cell = catalog.matrix.fixes[fix_id].cells[release]
    if cell.tested == ("untested",):
        return "not-runnable"
    if cell.verdict != "needed":
        return "clean"
    if variant == "vanilla":
        return "defect"
    return "clean" if catalog.patch(fix_id, release) else "not-runnable"
