# SPDX-License-Identifier: Apache-2.0
"""Tells, through the store, which ranks came: before something is done together, or afterwards, when it is late.

``meet`` waits for all ranks of a group, and ends in the same way on all of them. ``missing_ranks`` costs nothing while
all goes well: a rank whose deadline passes says so, and listens for a moment for others that say the same. Those that
stay silent are *not known* to have issued the collective; one that issued it and has not come to its own deadline yet
is silent too, so deadlines should be the same on all ranks.

Not handled: a store that is gone or silent (its host died or stopped): then nothing can be told, and that is what is
said, in time (``store_thread``).
"""

from __future__ import annotations

import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from megatron_fixes.collectives.store_thread import ANSWER_S, ask
from megatron_fixes.collectives.threads import interpreter_ends

if TYPE_CHECKING:
    from megatron_fixes.collectives.registry import GroupRecord

LISTEN_S = 1.0
# A TCPStore needs 5 s more for a wait that ends about when its key comes (torch 2.13); it is not silent then.
LAST_WORD_S = 6.0
_PAUSE_S = 0.02
MET = "met"


class NotMetError(Exception):
    """Ranks did not meet; its text says who was missing.

    Attributes:
        missing: Global ranks that did not come, or else the one that had given up before all were there; None if the
            store did not answer.
    """

    def __init__(self, missing: tuple[int, ...] | None, said: str) -> None:
        super().__init__(said)
        self.missing = missing


def word_key(meeting: str, rank: int) -> str:
    """The key under which a rank comes to a meeting; its value is what the rank had to say."""
    return f"{meeting}/{rank}"


def meet(record: GroupRecord, meeting: str, within_s: float, word: str = "1") -> None:
    """Wait at the store until all ranks of a group have come.

    All ranks meet or none does: who sees all there, or gives up, says so by one compare-and-set, and the first that did
    so is right for everybody. The group's first rank alone looks for the others; they wait for what it says, so that
    the store is not asked by each rank for each.

    Args:
        record: The group.
        meeting: The same on all ranks, and used once.
        within_s: How long to wait.
        word: What this rank has to say, for the others to read.

    Raises:
        NotMetError: On all ranks that came, and those that come later.
    """
    try:
        decided, silent = ask(lambda: _meet(record, meeting, within_s, word), within_s + LAST_WORD_S)
    except RuntimeError:
        ends = "the store can't be asked any more, the interpreter ends"
        raise NotMetError(None, ends if interpreter_ends() else "the store did not answer") from None
    if decided == MET:
        return
    if silent or int(decided) == record.rank:
        raise NotMetError(silent, f"ranks {list(silent)} did not come")
    raise NotMetError((int(decided),), f"rank {decided} came and did not wait")


def _meet(record: GroupRecord, meeting: str, within_s: float, word: str) -> tuple[str, tuple[int, ...]]:
    """What was decided, and who had not come if it was not to meet."""
    store, verdict, first = record.store(), f"{meeting}/verdict", record.rank == record.ranks[0]
    keys = [word_key(meeting, rank) for rank in record.ranks]
    store.set(word_key(meeting, record.rank), word)
    try:
        store.wait(keys if first else [verdict], timedelta(seconds=within_s))
        mine = MET
    except RuntimeError:
        mine = str(record.rank)
    decided = store.compare_set(verdict, "", mine).decode()
    if decided == MET:
        return decided, ()
    return decided, tuple(rank for rank in record.ranks if not store.check([word_key(meeting, rank)]))


def words(record: GroupRecord, meeting: str) -> dict[int, str]:
    """What each rank of a group had to say at a meeting at which all have met.

    Raises:
        NotMetError: The store did not answer.
    """

    def read() -> dict[int, str]:
        store = record.store()
        return {rank: store.get(word_key(meeting, rank)).decode() for rank in record.ranks}

    try:
        return ask(read)
    except RuntimeError:
        raise NotMetError(None, "the store did not answer") from None


def forget(record: GroupRecord, meeting: str) -> None:
    """Remove what this rank has written to a meeting that all ranks have left, if the store answers."""

    def remove() -> None:
        store = record.store()
        store.delete_key(word_key(meeting, record.rank))
        if record.rank == record.ranks[0]:
            store.delete_key(f"{meeting}/verdict")

    with suppress(RuntimeError):
        ask(remove)


def missing_ranks(record: GroupRecord, sequence: int | str, *, listen_s: float = LISTEN_S) -> tuple[int, ...] | None:
    """Say that this rank waits for collective ``sequence``, and tell who has not been heard to.

    Args:
        record: The group.
        sequence: The collective's number among those of contexts, or another name that all ranks give it.
        listen_s: How long to wait for the others to say the same.

    Returns:
        Global ranks, ascending; None if the store did not answer.
    """
    try:
        return ask(lambda: _listen(record, f"waiting/{sequence}", listen_s), listen_s + ANSWER_S)
    except RuntimeError:
        return None


def _listen(record: GroupRecord, meeting: str, listen_s: float) -> tuple[int, ...]:
    # Apart, since a watcher's thread comes here as well, and the other connection may be blocked in a wait.
    store, silent = record.store(apart=True), set(record.ranks) - {record.rank}
    store.set(word_key(meeting, record.rank), "1")
    end = time.monotonic() + listen_s
    while silent:
        silent -= {rank for rank in silent if store.check([word_key(meeting, rank)])}
        if time.monotonic() >= end:
            break
        time.sleep(_PAUSE_S)
    return tuple(sorted(silent))
