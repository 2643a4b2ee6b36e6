# SPDX-License-Identifier: Apache-2.0
"""The guard ``teardown``: ``destroy_model_parallel`` after what is under way, and told what it leaves behind.

Before: all that is under way (``lifecycle`` notes it) is waited for, within the deadline or 30 s; a handle
stays where it is, so that Megatron can still finish what it began. Afterwards: the process groups that
``parallel_state`` held before, and that c10d still has, are counted and named (``process-groups-left``). They are not
destroyed here: that has to happen on all ranks at once, once all are done with the groups, and is what MF0005 does.

Not handled: groups that ``parallel_state`` does not hold, and what an ``AllReduceContext`` has under way on them.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_fixes.collectives.context import DRAIN_S
from megatron_fixes.errors import MegatronFixesError
from megatron_fixes.events import Event, emit
from megatron_fixes.guards.attach import innermost
from megatron_fixes.guards.handles import drain
from megatron_fixes.guards.late import TERMS, group_is_gone
from megatron_fixes.guards.ledger import LEDGER
from megatron_fixes.guards.points import FIX_DESTROYS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# parallel_state goes on naming some of the groups after it has forgotten the rest.
_told: weakref.WeakSet[Any] = weakref.WeakSet()


def destroy_model_parallel(wrapped: Any, _: Any, args: Any, kwargs: Any) -> Any:
    """Drain, destroy, and tell what is left."""
    state = getattr(innermost(wrapped), "__globals__", {})
    before = list(dict.fromkeys(groups_in(state)))
    _drain()
    result = wrapped(*args, **kwargs)
    left = [group for group in before if group in c10d._world.pg_map and group not in _told]
    if left:
        _told.update(left)
        names = tuple(f"{getattr(group, 'group_desc', '') or 'group'} {group.group_name}" for group in left)
        mended = " in spite of MF0005" if FIX_DESTROYS in state else "; MF0005 destroys them"
        message = f"destroy_model_parallel left {len(left)} process groups behind{mended}: {', '.join(names)}"
        emit(Event("process-groups-left", message, {"count": len(left), "groups": names}))
    return result


def _drain() -> None:
    for outstanding in LEDGER.under_way():
        if group_is_gone(outstanding):
            # It was aborted as something on it was late; that was told.
            continue
        try:
            drain(outstanding.handle, outstanding, TERMS, TERMS.deadline_s or DRAIN_S)
        except (MegatronFixesError, RuntimeError) as error:
            message = f"{outstanding}, could not be waited for before the teardown: {error}"
            emit(Event("collective-not-drained", message, {"place": outstanding.place}))


def groups_in(state: Mapping[str, Any]) -> Iterator[Any]:
    """The living process groups that a module's globals name, also in lists and as values of dictionaries."""
    for value in state.values():
        several = isinstance(value, (list, tuple, dict))
        for group in value.values() if isinstance(value, dict) else value if several else (value,):
            if isinstance(group, dist.ProcessGroup) and group is not dist.group.WORLD and group in c10d._world.pg_map:
                yield group


WRAPPERS = {("teardown", "destroy_model_parallel"): destroy_model_parallel}
