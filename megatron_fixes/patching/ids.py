# SPDX-License-Identifier: Apache-2.0
"""Ids of fixes as a user gives them, checked against the matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_fixes.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from megatron_fixes.catalog.matrix import Matrix


def require_fixes(matrix: Matrix, fix_ids: Iterable[str]) -> None:
    """Refuse ids that are not known fixes.

    Raises:
        UsageError: Unknown; the hint lists what is known.
    """
    unknown = [fix_id or "an empty text" for fix_id in fix_ids if fix_id not in matrix.fixes]
    if unknown:
        raise UsageError(
            f"got {', '.join(unknown)}, expected ids of known fixes",
            hint=f"Name some of {', '.join(matrix.fixes)}; `megatron-fixes list` says what they are.",
        )
