# SPDX-License-Identifier: Apache-2.0
"""Says that a collective is late: which, on which group, for how long, who is missing; and aborts if asked to.

Who is missing is what ``collectives.arrivals`` can tell: ranks that have not said, within a second, that they wait for
the same collective. So it takes the guard on all ranks with one deadline; a rank that has issued it and is not at its
own deadline yet looks as if it had not. What a collective is called there is c10d's count on its group.

Not handled: a store that does not answer; then the ranks are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_fixes.collectives import registry
from megatron_fixes.collectives.arrivals import missing_ranks
from megatron_fixes.collectives.errors import CollectiveTimeoutError, GroupDestroyedError
from megatron_fixes.events import Event, emit
from megatron_fixes.guards.ledger import KINDS, process_groups

if TYPE_CHECKING:
    from megatron_fixes.guards.ledger import Outstanding


RESTART = "Look at where the missing ranks are, and restart from a checkpoint: what the step computed is of no use."


@dataclass
class Terms:
    """What was asked for; changed by a later ``install``.

    Attributes:
        deadline_s: Seconds, or None for watching only.
        abort: Whether the group of a late collective is aborted.
    """

    deadline_s: float | None = None
    abort: bool = False


TERMS = Terms()


def groups_of(outstanding: Outstanding) -> list[Any]:
    """The process groups that a collective runs on; none if it is not known which."""
    bucket_group = outstanding.bucket_group
    return [] if bucket_group is None else process_groups(bucket_group, outstanding.kind)


def records_of(outstanding: Outstanding) -> list[registry.GroupRecord]:
    """Their records.

    Raises:
        GroupDestroyedError: One of the groups was destroyed or aborted.
    """
    return [registry.record_of(group) for group in groups_of(outstanding)]


def group_is_gone(outstanding: Outstanding) -> bool:
    """Whether a process group of a collective was destroyed or aborted; then its works are not to be asked."""
    try:
        records_of(outstanding)
    except GroupDestroyedError:
        return True
    return False


def tell_late(outstanding: Outstanding, seconds: float, terms: Terms) -> CollectiveTimeoutError:
    """Emit ``collective-late``, once a collective, and abort its groups if asked to; the error that says the same."""
    try:
        records = records_of(outstanding)
    except GroupDestroyedError:
        records = []
    first, outstanding.told = not outstanding.told, True
    missing = _missing(records, outstanding.sequences)
    ranks = tuple(sorted({rank for record in records for rank in record.ranks}))
    rank = records[0].rank if records else -1
    where = " and ".join(f"process group {record.name} of ranks {list(record.ranks)}" for record in records)
    who = "it can't be told which" if missing is None else f"ranks {list(missing)}" if missing else "none"
    message = (
        f"{outstanding}, not complete after {seconds:.1f} s on {where or 'a process group that is not known'}; "
        f"not known to have issued it: {who}"
    )
    aborted = bool(terms.abort and records)
    if aborted:
        message += "; aborted"
    if first:
        fields = {
            "what": KINDS[outstanding.kind],
            "group": ", ".join(record.name for record in records) or "unknown",
            "ranks": ranks,
            "rank": rank,
            "bucket_elements": outstanding.sizes,
            "seconds": round(seconds, 3),
            "place": outstanding.place,
            "missing": missing if missing is not None else "unknown",
            "aborted": aborted,
        }
        emit(Event("collective-late", f"rank {rank}: {message}", fields))
    if aborted:
        for record in records:
            record.abort()
    hint = RESTART if aborted else "Look at where the missing ranks are; zero_grad_buffer drains what a step has left."
    return CollectiveTimeoutError(f"got a {message}", missing=missing, context=f"rank {rank}", hint=hint)


def _missing(records: list[registry.GroupRecord], sequences: tuple[int, ...]) -> tuple[int, ...] | None:
    if not records or len(records) != len(sequences):
        return None
    found: set[int] = set()
    for record, sequence in zip(records, sequences, strict=True):
        absent = missing_ranks(record, f"guards/{sequence}")
        if absent is None:
            return None
        found.update(absent)
    return tuple(sorted(found))
