# SPDX-License-Identifier: Apache-2.0
"""What the GPU table claims against what compilers did: pure, no compiler and no network.

A cell passes if it works and machine code came, or if it is unsupported and the compiler refused the target. Any other
failure (a header that isn't there, a mistake in the source) is ``broken`` and passes nowhere: it would pass for a
refusal otherwise. Each toolkit shows that the source itself is right by the cells that it does compile.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron_fixes.catalog.hardware import GpuCell, each_cell

if TYPE_CHECKING:
    from megatron_fixes.catalog.matrix import Matrix

ROOT = Path(__file__).resolve().parents[2]
# What a cell of each precision covers; the first kernel of the project's own takes this one's place.
SOURCES: dict[str, str] = dict.fromkeys(("bf16", "fp16", "fp8"), "ci/kernels/warp_sum.cu")

Seen = Literal["compiled", "refused", "broken"]
_REFUSAL = re.compile(r"invalid value for --gpu-architecture|requires \.target sm_\d+|not supported on \.target")


def digest(source: str) -> str:
    """SHA-256 of a source as it is now."""
    return hashlib.sha256((ROOT / source).read_bytes()).hexdigest()


def digests() -> dict[str, str]:
    """Every source with its hash."""
    return {source: digest(source) for source in sorted(set(SOURCES.values()))}


def seen(outcome: Mapping[str, Any]) -> Seen:
    """What a line of ``nvrtc.py`` says in one word."""
    if outcome["cubin_bytes"]:
        return "compiled"
    return "refused" if _REFUSAL.search(outcome["said"]) else "broken"


def judged(cell: GpuCell, outcome: Mapping[str, Any]) -> dict[str, Any]:
    """One cell of the record: claim, outcome, and whether they agree."""
    what = seen(outcome)
    return {
        "claim": cell.status,
        "outcome": what,
        "as_claimed": what == ("compiled" if cell.works else "refused"),
        **({"cubin_bytes": outcome["cubin_bytes"]} if outcome["cubin_bytes"] else {"said": outcome["said"]}),
        "sources": [SOURCES[outcome["precision"]]],
    }


def merged(old: Mapping[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """A record with its columns over an older record's, whose others are kept if they were made of the same sources."""
    if not old or old.get("sources") != new["sources"]:
        return new
    return {**new, "cuda": dict(sorted({**old["cuda"], **new["cuda"]}.items(), key=lambda item: version(item[0])))}


def version(cuda: str) -> tuple[int, ...]:
    """``12.4`` as numbers, to sort by."""
    return tuple(map(int, cuda.split(".")))


def wrong(column: Mapping[str, Any]) -> Iterable[str]:
    """A line for each cell of a column that is not as claimed."""
    for architecture, cells in column["cells"].items():
        for precision, cell in cells.items():
            if not cell["as_claimed"]:
                found = cell.get("said") or f"machine code of {cell['cubin_bytes']} bytes"
                yield f"{architecture} {precision}: claimed {cell['claim']}, the compiler: {found}"


def ran(records: Iterable[Mapping[str, Any]], architecture: str, cuda: str, precision: str, cell: GpuCell) -> bool:
    """Whether a record shows that the source as it is now ran there, on two ranks, with the CPU's result."""
    source = SOURCES[precision]
    for record in records:
        kernels = record.get("kernels", {"sources": {}, "cells": []})
        if kernels["sources"].get(source) != digest(source) or record["machine"]["date"] != cell.date:
            continue
        wanted = {"architecture": architecture, "cuda": cuda, "precision": precision, "ranks": 2, "outcome": "same"}
        if any(wanted.items() <= outcome.items() for outcome in kernels["cells"]):
            return True
    return False


def compiled(record: Mapping[str, Any], matrix: Matrix, architecture: str, cuda: str, precision: str) -> bool:
    """Whether a record shows that this CUDA version's compiler did with the present source what the cell says."""
    wheels, column = matrix.cuda[cuda], record["cuda"].get(cuda)
    if column is None or (column["nvrtc"], column["runtime"]) != (wheels.nvrtc, wheels.runtime):
        return False
    outcome = column["cells"].get(architecture, {}).get(precision)
    works = matrix.gpus[architecture][cuda][precision].works
    return (
        outcome is not None
        and outcome["outcome"] == ("compiled" if works else "refused")
        and outcome["sources"] == [SOURCES[precision]]
        and all(record["sources"].get(source) == digest(source) for source in outcome["sources"])
    )


def uncovered(matrix: Matrix, record: Mapping[str, Any], gpu_records: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each cell that no record covers: of a compiler for all, of a GPU for those that ``ran``."""
    found = []
    for architecture, cuda, precision, cell in each_cell(matrix.gpus):
        where = f"{architecture} x CUDA {cuda} x {precision}"
        if not compiled(record, matrix, architecture, cuda, precision):
            found.append(f"{where}: docs/records/matrix.json does not cover it with the present sources")
        if cell.status == "ran" and not ran(gpu_records, architecture, cuda, precision, cell):
            found.append(f"{where}: ran, but no record of a GPU in docs/records covers it with the present sources")
    return found
