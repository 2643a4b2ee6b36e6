# SPDX-License-Identifier: Apache-2.0
"""Cuts a series into groups of fixes that can't meet: no file in common, and none requires one of another group.

What a file looks like depends only on the fixes of its group. So whatever is asked of every closed subset (how the
functions look, whether every order gives the same bytes) is asked group by group: 2^5 + 2^5 questions instead of 2^10.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_fixes.catalog.series import Series
from megatron_fixes.patching.unified import touched_paths

if TYPE_CHECKING:
    from megatron_fixes.catalog.series import PatchFile


def independent_groups(series: Series) -> tuple[Series, ...]:
    """The groups of a series, each in series order, in the order of their first fix."""
    groups: list[tuple[set[str], set[str]]] = []
    for patch in series.patches:
        ids, paths = {patch.fix_id}, set(touched_paths(patch.text, source=patch.name))
        for other in [group for group in groups if group[1] & paths or group[0] & set(patch.header.requires)]:
            groups.remove(other)
            ids, paths = ids | other[0], paths | other[1]
        groups.append((ids, paths))

    def members(ids: set[str]) -> tuple[PatchFile, ...]:
        return tuple(patch for patch in series.patches if patch.fix_id in ids)

    found = [Series(series.line, members(ids)) for ids, _ in groups]
    return tuple(sorted(found, key=lambda group: series.patches.index(group.patches[0])))
