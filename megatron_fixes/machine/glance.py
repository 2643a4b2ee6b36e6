# SPDX-License-Identifier: Apache-2.0
"""Whether this machine is worth a closer look: a few milliseconds of plain files, at every start of a job.

It looks for what stops ``apply`` and answers yes where in doubt of that; ``rules`` then decides, by the same numbers of
the matrix. To be cheap it reads the generated JSON as such, without the catalogue's machinery: nothing is validated.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from megatron_fixes.machine import driver_files, torch_files
from megatron_fixes.machine.code import code_for, named_capability
from megatron_fixes.machine.places import place

if TYPE_CHECKING:
    from pathlib import Path


def may_not_work(proc: Path, matrix: Path) -> bool:
    """Hold the driver's files and torch's against the matrix.

    Args:
        proc: Where the driver's files are.
        matrix: The matrix as JSON.

    Raises:
        OSError, SyntaxError, ValueError, KeyError: A file can't be read, or is something else.
    """
    folder = place("torch")
    cuda = torch_files.versions(folder).get("cuda") if folder else None
    if folder is None or cuda is None:
        return False
    tables: dict[str, Any] = json.loads(matrix.read_bytes())
    major = cuda.partition(".")[0]
    minimums = [
        column["minimum_driver"] for name, column in tables.get("cuda", {}).items() if name.partition(".")[0] == major
    ]
    driver = driver_files.version(proc)
    if driver and minimums and _numbers(driver) < _numbers(minimums[-1]):
        return True
    rows = {architecture: row["gpus"] for architecture, row in tables.get("architectures", {}).items()}
    kinds = {named_capability(name, rows) for name in driver_files.models(proc)}
    if not kinds or None in kinds:
        return False
    lists = torch_files.lists(folder)
    return len(lists) == 1 and all(code_for(names, kind) is None for names in lists for kind in kinds if kind)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))
