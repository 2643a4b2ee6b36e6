# SPDX-License-Identifier: Apache-2.0
"""Whether training can't work on this machine, as far as a few files tell it, when Megatron is imported.

The rules are those of ``apply``. NVML is not asked: it takes longer than the overlay may, in every process of a job. So
a GPU that the matrix does not name by name is not judged here (docs/decisions/0009). Where no driver is loaded, one
look at a file is all there is.
"""

from __future__ import annotations

import os

from megatron_fixes.overlay.decision import Refusal

PROC = "/proc/driver/nvidia"
_MATRIX = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "catalog", "matrix.json")


def refusals() -> list[Refusal]:
    """What can't work here, none on most machines.

    Raises:
        OSError, SyntaxError, ValueError, KeyError: A file of torch or of this distribution is none that we know.
    """
    if not os.path.exists(os.path.join(PROC, "version")):
        return []
    from pathlib import Path

    from megatron_fixes.machine import glance

    if not glance.may_not_work(Path(PROC), Path(_MATRIX)):
        return []
    from megatron_fixes.catalog.matrix import load_matrix
    from megatron_fixes.machine import reading, rules

    found = rules.judge(reading.from_files(proc=Path(PROC)), load_matrix(Path(_MATRIX)))
    return [
        Refusal("machine", f"training can't work on this machine: {finding.line}", finding.todo)
        for finding in found
        if finding.stops
    ]
