# SPDX-License-Identifier: Apache-2.0
"""Destroys process groups in good order: drained, agreed on, children before parents, each once, whatever fails.

Every rank of a group calls for it. Order is that of c10d's own list backwards: groups are made in the same order on all
ranks that share them, so any two ranks destroy those that they share in the same order; the default group goes last.
Before a group is destroyed its ranks tell each other through the store that they are ready, within a deadline
(``partings``): a gloo group that one rank destroys while a peer is still connecting it ends in an error on the peer.

NCCL destroys a group only once all that is under way on it has ended and its ranks on the node have come, and frees
memory on the way, for which CUDA may wait until nothing runs on the device. So all groups are drained before the first
one is destroyed; one on which something is still under way, or to which ranks did not come, is aborted instead.
Source: https://github.com/pytorch/pytorch/pull/141510, https://github.com/NVIDIA/nccl/pull/564.

While the interpreter is torn down (destructors of what still lives at its exit), contexts are drained and told, and the
groups are left to c10d and the end of the process: their ranks can't agree any more, and torch's own destroy may crash.

Not handled: works that were issued without a context. gloo ends them as it likes; with NCCL ``destroy`` may wait for
them without an end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_fixes.collectives.errors import TeardownError
from megatron_fixes.collectives.partings import Partings
from megatron_fixes.collectives.registry import GroupRecord, adrift, record_of
from megatron_fixes.collectives.threads import interpreter_ends
from megatron_fixes.collectives.waiting import require_time
from megatron_fixes.errors import MegatronFixesError
from megatron_fixes.events import Event, emit

if TYPE_CHECKING:
    from collections.abc import Sequence

AGREE_S = 10.0


@dataclass(frozen=True)
class Teardown:
    """What became of a teardown.

    Attributes:
        destroyed: Names of groups, in the order in which they went.
        adrift: Collectives that nobody holds and that are still under way: group, operation, place of issue.
    """

    destroyed: tuple[str, ...]
    adrift: tuple[str, ...]


def destroy(group: Any = None, *, agree_s: float = AGREE_S) -> Teardown:
    """Drain the contexts of a group, agree with its ranks, and destroy it; with the default group, all groups.

    Args:
        group: A process group; None is the default one, and so all.
        agree_s: How long to wait for the other ranks, in seconds.

    Raises:
        GroupDestroyedError: It is gone already.
        TeardownError: Something went wrong on the way; the group is destroyed all the same, unless its abort does not
            end (with NCCL, for want of its other ranks).
        UsageError: ``agree_s`` is no time.
    """
    require_time("agree_s", agree_s)
    record = record_of(group, to_destroy=True)
    if group is None or record.listed() is dist.group.WORLD:
        return destroy_all(agree_s=agree_s)
    return _destroy([record], agree_s)


def destroy_all(*, agree_s: float = AGREE_S) -> Teardown:
    """Destroy every process group of this process, the default one last. Nothing happens if there is none.

    Args:
        agree_s: How long to wait for the other ranks of each group, in seconds.

    Raises:
        TeardownError: Something went wrong on the way; all groups are destroyed all the same, but for one whose abort
            does not end (with NCCL, for want of its other ranks), and then the default one; and while the
            interpreter is torn down, when all are left.
        UsageError: ``agree_s`` is no time.
    """
    require_time("agree_s", agree_s)
    if not dist.is_initialized():
        return Teardown((), ())
    others = [group for group in c10d._world.pg_map if group is not dist.group.WORLD]
    every = [*reversed(others), dist.group.WORLD]
    return _destroy([record_of(group, to_destroy=True) for group in every], agree_s)


def _destroy(records: Sequence[GroupRecord], agree_s: float) -> Teardown:
    errors: dict[str, str] = {}
    destroyed = []
    end, partings = time.monotonic() + agree_s, Partings(agree_s)
    drained = [_drain(record, agree_s, end) for record in records]
    if interpreter_ends():
        why = "left to the end of the process, since the interpreter ends: its ranks can't agree any more"
        raise TeardownError(
            {record.name: "; ".join([*told, why]) for record, told in zip(records, drained, strict=True)}
        )
    for record, told in zip(records, drained, strict=True):
        said = list(told)
        group = None if record.aborted else record.group()
        if group is not None:
            absent = partings.agree(record)
            said += absent
            # gloo waits too, in the group's destructor, for what is under way.
            if record.sweep() or (absent and _waits_for_all(group)):
                record.abort()
        elif record.aborted:
            partings.tell_given_up(record)
        said += _end(record, records, agree_s)
        destroyed.append(record.name)
        if said:
            errors[record.name] = "; ".join(said)
    if left := adrift():
        _tell(left)
    if errors:
        raise TeardownError(errors)
    return Teardown(tuple(destroyed), left)


def _tell(left: Sequence[str]) -> None:
    message = f"collectives that nobody holds are still under way, {len(left)}: {'; '.join(left)}"
    emit(Event("collectives-adrift", message, {"count": len(left), "collectives": tuple(left)}))


def _drain(record: GroupRecord, within_s: float, end: float) -> list[str]:
    said = []
    for context in list(record.contexts):
        try:
            context.close()
        except MegatronFixesError as error:
            said.append(str(error))
    # What was dropped is under way all the same: gloo never ends it once the group is destroyed.
    while (left := record.sweep()) and not record.aborted:
        if time.monotonic() >= end:
            return [*said, f"{left} dropped collectives were not complete after {within_s:g} s"]
        time.sleep(0.002)
    return said


def _waits_for_all(group: Any) -> bool:
    """Whether to destroy a group means to wait for its other ranks and for all that is under way on it."""
    return "nccl" in dist.get_backend_config(group)


def _end(record: GroupRecord, every: Sequence[GroupRecord], within_s: float) -> list[str]:
    group = record.listed()
    if group is None:
        return []
    # c10d ends all groups with the default one, and waits for the abort of each.
    ends = every if group is dist.group.WORLD else [record]
    if stuck := [one.name for one in ends if one.aborting(within_s)]:
        return [f"not destroyed, since the abort of {', '.join(stuck)} has not ended after {within_s:g} s"]
    began = time.monotonic()
    try:
        dist.destroy_process_group(group)
    except (RuntimeError, ValueError, AssertionError) as error:
        return [f"{type(error).__name__} after {time.monotonic() - began:.1f} s: {error}"]
    return []
