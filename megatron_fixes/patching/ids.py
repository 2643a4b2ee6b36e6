# SPDX-License-Identifier: Apache-2.0
"""Fixes as a user names them: by id, by slug, or by both as in the name of a patch. Checked against the matrix."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from megatron_fixes.errors import UsageError, nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from megatron_fixes.catalog.matrix import Matrix

_ID = re.compile(r"MF\d{4}", re.IGNORECASE)


def id_of(name: str, slugs: Mapping[str, str]) -> str:
    """The id of a fix that is named in any of these ways; a name that is none stays as it is.

    Args:
        name: As it was typed.
        slugs: Ids to slugs.
    """
    word = name.strip().lower().removesuffix(".patch")
    for fix_id, slug in slugs.items():
        if word in (fix_id.lower(), slug, f"{fix_id.lower()}-{slug}"):
            return fix_id
    return name


def did_you_mean(name: str, slugs: Mapping[str, str], *others: str) -> str:
    """A question that names the nearest id, slug, or other word; empty if none is near.

    A whole id is no misspelt one: numbers are left out, and the next one is another fix.
    """
    if _ID.fullmatch(name.strip()):
        return ""
    near = nearest(name, (*others, *slugs, *slugs.values()))
    return f"did you mean {near}?" if near else ""


def known_fixes(matrix: Matrix, names: Iterable[str]) -> tuple[str, ...]:
    """The ids of fixes that are named, each once.

    Raises:
        UsageError: Unknown; the hint has the nearest name, or else lists what is known.
    """
    slugs = {fix_id: fix.slug for fix_id, fix in matrix.fixes.items()}
    found = {id_of(name, slugs): name for name in names}
    unknown = [name for fix_id, name in found.items() if fix_id not in slugs]
    if unknown:
        none = f"there is no {unknown[0].strip()}; " if _ID.fullmatch(unknown[0].strip()) else ""
        near = did_you_mean(unknown[0], slugs) or f"{none}name some of {', '.join(slugs)}."
        raise UsageError(
            f"got {', '.join(name or 'an empty text' for name in unknown)}, expected ids or slugs of known fixes",
            hint=f"{near[:1].upper()}{near[1:]} See `megatron-fixes list`.",
        )
    return tuple(found)
