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
from megatron_fixes.guards.ledger import KINDS, process_group

if TYPE_CHECKING:
    from megatron_fixes.guards.ledger import Outstanding


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


def record_of(outstanding: Outstanding) -> registry.GroupRecord | None:
    """The record of the process group that a collective runs on; None if that is gone."""
    bucket_group = outstanding.bucket_group
    group: Any = None if bucket_group is None else process_group(bucket_group, outstanding.kind)
    if group is None:
        return None
    try:
        return registry.record_of(group)
    except GroupDestroyedError:
        return None


def tell_late(outstanding: Outstanding, seconds: float, terms: Terms) -> CollectiveTimeoutError:
    """Emit ``collective-late``, once a collective, and abort its group if asked to; the error that says the same."""
    record = record_of(outstanding)
    first, outstanding.told = not outstanding.told, True
    missing = None if record is None else _missing(record, outstanding.sequence)
    name, ranks, rank = ("unknown", (), -1) if record is None else (record.name, record.ranks, record.rank)
    who = "it can't be told which" if missing is None else f"ranks {list(missing)}" if missing else "none"
    message = (
        f"{outstanding}, is not complete after {seconds:.1f} s on process group {name} of ranks {list(ranks)}; "
        f"not known to have issued it: {who}"
    )
    if first:
        fields = {
            "what": KINDS[outstanding.kind],
            "group": name,
            "ranks": ranks,
            "rank": rank,
            "bucket_elements": outstanding.sizes,
            "seconds": round(seconds, 3),
            "place": outstanding.place,
            "missing": missing if missing is not None else "unknown",
            "aborted": bool(terms.abort and record is not None),
        }
        emit(Event("collective-late", f"rank {rank}: {message}", fields))
    if terms.abort and record is not None:
        record.abort()
    hint = "Look at where the missing ranks are; zero_grad_buffer drains what a step has left."
    return CollectiveTimeoutError(f"got a {message}", missing=missing, context=f"rank {rank}", hint=hint)


def _missing(record: registry.GroupRecord, sequence: int | None) -> tuple[int, ...] | None:
    return None if sequence is None else missing_ranks(record, f"guards/{sequence}")
