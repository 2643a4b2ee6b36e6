# SPDX-License-Identifier: Apache-2.0
"""Which release the code of a target is, told from the functions that fixes touch. Pure.

A release explains a function that stands in the target as it does there, with any set of our fixes in it or none. The
release that explains most functions is the one that the target looks like, if these are more than half of those that
either has; of a few functions, such as a sparse checkout's, nothing is inferred. Where several explain as many
functions, those count that also lack what the target lacks, then the release that the target claims, then the newest
that is not withdrawn.

It breaks ties and no more: what a fix is to a target is read from the fix's own functions (``verdict``), and a patch
must fit them exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from packaging.version import Version

from megatron_fixes.catalog.fingerprint import OUTSIDE
from megatron_fixes.catalog.known import ABSENT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from megatron_fixes.catalog.known import Known
    from megatron_fixes.catalog.matrix import Release
    from megatron_fixes.catalog.verdict import Seen


@dataclass(frozen=True)
class Likeness:
    """The release that explains most functions of a target.

    Attributes:
        release: That release; of several that explain as much, the one claimed or the newest.
        alike: All that explain as much, in order of version.
        functions: How many of the target's functions it explains.
        of: How many of the functions that fixes touch the target or the release has.
    """

    release: str
    alike: tuple[str, ...]
    functions: int
    of: int


def likeness(
    known: Known, releases: Mapping[str, Release], seen: Mapping[str, Seen], claimed: str | None
) -> Likeness | None:
    """Find the release that a target looks like; None if there is none.

    Args:
        known: The table of known functions.
        releases: Those of the matrix.
        seen: Every function that any fix touches, as the target has it.
        claimed: The release that the target says it is, or None.
    """
    here = dict.fromkeys(releases, 0)
    lacking = dict.fromkeys(releases, 0)
    missed = dict.fromkeys(releases, 0)
    present = 0
    for function, texts in known.functions.items():
        if function.split("::")[1].startswith(OUTSIDE):
            continue
        prints = seen[function].prints
        present += bool(prints)
        without = known.releases_of(function, ABSENT)
        if not prints:
            for release in without:
                lacking[release] += 1
            for release in {place.release for text in texts for place in text.places} - without:
                missed[release] += 1
        elif len(prints) == 1:
            for release in known.releases_of(function, prints[0].hash):
                here[release] += 1
    best = max(((here[release], lacking[release]) for release in releases), default=(0, 0))
    alike = tuple(sorted((r for r in releases if (here[r], lacking[r]) == best), key=Version))
    if not alike:
        return None
    standing = [release for release in alike if not releases[release].yanked] or alike
    release = claimed if claimed in alike else standing[-1]
    of = present + missed[release]
    return Likeness(release, alike, best[0], of) if 2 * best[0] > of else None
