# SPDX-License-Identifier: Apache-2.0
"""Checked mode: ranks tell each other through the store what they are about to issue, before they issue it.

NCCL does not compare sizes: two ranks that summed 2^20 and 2^19 floats got no error and wrong numbers. Here the ranks
of a group compare operation, dtypes, shapes and order (the sequence number), and all of them raise, each naming both
sides. Costs each rank a meeting at the store and a read of all ranks' lines a collective, before it is issued.

Not handled: a rank that uses the group without a context; it looks as if it did not come.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from megatron_fixes.collectives.arrivals import NotMetError, forget, meet, words
from megatron_fixes.collectives.errors import CollectiveMismatchError, CollectiveTimeoutError

if TYPE_CHECKING:
    from megatron_fixes.collectives.registry import GroupRecord

COMPARE_S = 60.0
_APART = "\n"


def compare(record: GroupRecord, signature: str, place: str, within_s: float) -> None:
    """Wait until all ranks of the group have said what they issue next, and compare.

    Args:
        record: The group.
        signature: What this rank is about to issue.
        place: Where, for the message alone.
        within_s: How long to wait for the others.

    Raises:
        CollectiveMismatchError: They differ. Nothing was issued; the others raise the same.
        CollectiveTimeoutError: Some said nothing in time. Nothing was issued.
    """
    number = record.compared
    # Counted apart from collectives: after a mismatch nothing was issued, and the next comparison must not meet its
    # lines.
    record.compared += 1
    meeting = f"issued/{number}"
    try:
        meet(record, meeting, within_s, f"{signature}{_APART}{place}")
        said = {rank: word.split(_APART) for rank, word in words(record, meeting).items()}
    except NotMetError as error:
        raise CollectiveTimeoutError(
            f"got no word of all ranks of process group {record.name} within {within_s:g} s, expected {signature} as "
            f"its collective {record.count}: {error}; nothing was issued",
            missing=error.missing,
            context=f"rank {record.rank}, {place}",
            hint="Look at where the missing ranks are.",
        ) from None
    # Whoever has come this far has seen all of the collective before.
    forget(record, f"issued/{number - 1}")
    sides: dict[str, list[int]] = defaultdict(list)
    for rank, (what, _) in said.items():
        sides[what].append(rank)
    if len(sides) > 1:
        told = "; ".join(f"ranks {ranks}: {what} at {said[ranks[0]][1]}" for what, ranks in sides.items())
        raise CollectiveMismatchError(
            f"got different collectives as number {record.count} of process group {record.name}, expected one: {told}; "
            "nothing was issued",
            context=f"rank {record.rank}",
            hint="Issue the same collectives in the same order on all ranks of the group.",
        )
