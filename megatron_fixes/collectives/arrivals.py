# SPDX-License-Identifier: Apache-2.0
"""Tells, through the store, which ranks issued a collective: exactly in checked mode, by asking around otherwise.

Unchecked, nothing is written while all goes well. A rank whose deadline passes says so, and listens for a moment for
others that say the same: those that stay silent are *not known* to have issued it. A rank that issued it and has
not come to its own deadline yet is silent too, so deadlines should be the same on all ranks.

Not handled: a store that is gone (its host died): then nothing can be told, and that is what is said.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_fixes.collectives.registry import GroupRecord

LISTEN_S = 1.0
_PAUSE_S = 0.02


def missing_ranks(record: GroupRecord, sequence: int | str, *, listen_s: float = LISTEN_S) -> tuple[int, ...] | None:
    """Say that this rank waits for collective ``sequence``, and tell who has not been heard to.

    Args:
        record: The group.
        sequence: The collective's number among those of contexts, or another name that all ranks give it.
        listen_s: How long to wait for the others to say the same.

    Returns:
        Global ranks, ascending; None if the store did not answer.
    """
    key = f"waiting/{sequence}/{{}}"
    silent = set(record.ranks) - {record.rank}
    try:
        record.store.set(key.format(record.rank), "1")
        end = time.monotonic() + listen_s
        while silent:
            silent -= {rank for rank in silent if record.store.check([key.format(rank)])}
            if time.monotonic() >= end:
                break
            time.sleep(_PAUSE_S)
    except RuntimeError:
        return None
    return tuple(sorted(silent))
