# SPDX-License-Identifier: Apache-2.0
"""The meetings of one teardown: at each group its ranks tell each other that they are ready to destroy it.

As ``arrivals.meet``: all meet or none does, by one compare-and-set. Besides, a rank that has given a group up says so
at once, so that nobody waits for it; and who did not come to one group is not waited for again at the next ones, so a
teardown with a dead rank takes about as long as one wait, whatever the number of groups.

Not handled: a rank that is later than a wait and a look; at groups that it finds left it is told so.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from megatron_fixes.collectives.arrivals import LAST_WORD_S, MET, word_key
from megatron_fixes.collectives.store_thread import ask

if TYPE_CHECKING:
    from megatron_fixes.collectives.registry import GroupRecord

# Ranks that are only a little later than a wait for them are seen to come to the groups after it.
LOOK_S = 0.5
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.02
_MEETING = "ready"
_VERDICT = f"{_MEETING}/verdict"
_GAVE_UP = "gave up "


class Partings:
    """See the module's docstring.

    Args:
        within_s: How long to wait for ranks at a group, in seconds.
    """

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._absent: set[int] = set()
        self._look_until = 0.0
        self._silent = False

    def agree(self, record: GroupRecord) -> list[str]:
        """Tell the other ranks of a group that this one is ready, and wait for them; what to say if not all are."""
        by_when = f"to destroy it within {self._within_s:g} s"
        silent = [f"the store did not answer {by_when}"]
        if self._silent:
            return silent
        try:
            decided, missing = ask(lambda: self._come(record), self._within_s + LAST_WORD_S)
        except RuntimeError:
            self._silent = True
            return silent
        if decided.startswith(_GAVE_UP):
            return [f"ranks [{decided.removeprefix(_GAVE_UP)}] gave it up"]
        self._absent -= set(record.ranks)
        if decided == MET:
            return []
        if not missing:
            return [f"rank {decided} came and did not wait {by_when}"]
        self._absent |= set(missing)
        self._look_until = self._look_until or time.monotonic() + LOOK_S
        return [f"ranks {list(missing)} did not come {by_when}"]

    def tell_given_up(self, record: GroupRecord) -> None:
        """Tell the other ranks of a group that this one has given it up."""

        def tell() -> None:
            store = record.store()
            # In this order: who sees this rank there finds it decided.
            store.compare_set(_VERDICT, "", f"{_GAVE_UP}{record.rank}")
            store.set(word_key(_MEETING, record.rank), "1")

        if self._silent or record.listed() is None:
            return
        try:
            ask(tell, LAST_WORD_S)
        except RuntimeError:
            self._silent = True

    def _come(self, record: GroupRecord) -> tuple[str, tuple[int, ...]]:
        """What was decided, and who had not come if somebody did not wait."""

        def missing() -> tuple[int, ...]:
            return tuple(rank for rank in record.ranks if not store.check([word_key(_MEETING, rank)]))

        store = record.store()
        store.set(word_key(_MEETING, record.rank), "1")
        absent = () if self._all_there(record, store) else missing()
        mine = str(record.rank) if absent else MET
        decided = store.compare_set(_VERDICT, "", mine).decode()
        if decided == MET or decided.startswith(_GAVE_UP):
            return decided, ()
        return decided, absent if decided == mine else missing()

    def _all_there(self, record: GroupRecord, store: Any) -> bool:
        """Wait until all have come, or it is decided, or only those are missing that were waited for before."""
        due = [word_key(_MEETING, rank) for rank in record.ranks if rank not in self._absent]
        waited_for = len(due) < len(record.ranks)
        if record.rank != record.ranks[0] and not waited_for:
            try:
                store.wait([_VERDICT], timedelta(seconds=self._within_s))
            except RuntimeError:
                return False
            return True
        # Asked at intervals, since a wait for all ranks would not end when one of them gives the group up.
        every = [word_key(_MEETING, rank) for rank in record.ranks]
        end, pause = time.monotonic() + self._within_s, SHORTEST_PAUSE_S
        while not store.check(every):
            now = time.monotonic()
            if now >= end or store.check([_VERDICT]) or (waited_for and now >= self._look_until and store.check(due)):
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE_S)
        return True
