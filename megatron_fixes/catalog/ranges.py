# SPDX-License-Identifier: Apache-2.0
"""Releases as compact ranges: ``0.14.0 - 0.16.1``, where every known release between the two ends belongs to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.version import Version

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


def compact(releases: Collection[str], known: Iterable[str]) -> str:
    """Write releases as ranges.

    Args:
        releases: To write; an empty text if there are none.
        known: All releases there are: a range breaks where one of them is missing.
    """
    runs: list[list[str]] = []
    inside = False
    for release in sorted(known, key=Version):
        if release in releases:
            if not inside:
                runs.append([])
            runs[-1].append(release)
        inside = release in releases
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} - {run[-1]}" for run in runs)
