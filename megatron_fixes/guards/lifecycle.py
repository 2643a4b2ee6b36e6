# SPDX-License-Identifier: Apache-2.0
"""The guard ``lifecycle``: what bucket groups have under way, in time or told, and steps that leave nothing behind.

* ``start_grad_sync``, ``start_param_sync``: what they issue is noted (``ledger``). Nothing is wrapped that Megatron
  calls once a parameter.
* ``finish_grad_sync``: called with nothing dispatched, that is told (``reduction-not-dispatched``). With one
  distributed-optimizer instance Megatron raises then; with several it goes on with gradients that nobody reduced.
* ``zero_grad_buffer``: what an abandoned step left is drained first, as MF0002 does, and left to it where it is in the
  code. What an abandoned first batch counted is forgotten (0.16 and later), or left to MF0004. The ranks must have
  abandoned the step after the same number of collectives on the group, and tell each other so through the store; else
  it raises, as the next collective would meet another one of a peer.

Not handled: a rank that dispatched nothing before it abandoned a step, or counted nothing in a first batch (its peers
raise); with several instances ranks are not compared in later ones.
"""

from __future__ import annotations

import atexit
import itertools
import sys
from typing import TYPE_CHECKING, Any

import torch

from megatron_fixes.collectives import registry
from megatron_fixes.collectives.arrivals import NotMetError, meet
from megatron_fixes.collectives.errors import CollectiveTimeoutError, GroupDestroyedError
from megatron_fixes.events import Event, emit
from megatron_fixes.guards.handles import BoundedHandle, StreamEnd, drain, keep
from megatron_fixes.guards.late import RESTART, TERMS
from megatron_fixes.guards.ledger import GRADIENTS, KINDS, LEDGER, PARAMETERS, Kind, process_group, process_groups
from megatron_fixes.guards.points import FIX_COUNTS, FIX_DRAINS
from megatron_fixes.guards.watcher import Watcher

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

AGREE_S = 60.0
_FIRST_BATCHES = itertools.count(1)
WATCHER = Watcher(LEDGER, TERMS)
_OURS = ("megatron_fixes.guards", "wrapt")


def _caller(frame: FrameType | None) -> FrameType:
    """The innermost frame that is Megatron's or the user's."""
    while frame is not None and frame.f_back is not None:
        if not frame.f_globals.get("__name__", "").startswith(_OURS):
            break
        frame = frame.f_back
    assert frame is not None
    return frame


def _note(bucket_group: Any, kind: Kind) -> None:
    if getattr(bucket_group, kind) is None:
        return
    noted = LEDGER.note(bucket_group, kind, _caller(sys._getframe(2)))
    if noted is None or TERMS.deadline_s is None:
        return
    if noted.on_device:
        keep(noted)
        WATCHER.start()
        return
    bounded = BoundedHandle(getattr(bucket_group, kind), noted, TERMS)
    setattr(bucket_group, kind, bounded)
    noted.hold(bounded)


def _note_stream(bucket_group: Any) -> None:
    """Note a reduction that leaves no handle, on the communication stream of several optimizer instances."""
    stream = getattr(bucket_group, "communication_stream", None)
    if stream is not None and bucket_group.buckets[0].grad_data.is_cuda:
        LEDGER.note_works(bucket_group, GRADIENTS, [StreamEnd(stream)], _caller(sys._getframe(2)))
        WATCHER.start()


def require_whole(bucket_group: Any, kind: Kind) -> None:
    """Refuse a collective on a group that a late one had aborted: NCCL would wait there for peers that left it.

    Raises:
        GroupDestroyedError: It was; what the step computed since then is of no use.
    """
    if TERMS.abort:
        for group in process_groups(bucket_group, kind):
            record = registry.record_of(group, to_destroy=True)
            if record.aborted:
                raise GroupDestroyedError(
                    f"got a {KINDS[kind]} on process group {record.name} of ranks {list(record.ranks)}, which was "
                    "aborted as a collective on it was late",
                    context=f"rank {record.rank}",
                    hint=RESTART,
                )


def start_grad_sync(wrapped: Any, bucket_group: Any, args: Any, kwargs: Any) -> Any:
    """Note what it issues."""
    require_whole(bucket_group, GRADIENTS)
    result = wrapped(*args, **kwargs)
    LEDGER.page(bucket_group).dispatched = True
    _note(bucket_group, GRADIENTS)
    if TERMS.deadline_s is not None and bucket_group.grad_reduce_handle is None:
        _note_stream(bucket_group)
    return result


def start_param_sync(wrapped: Any, bucket_group: Any, args: Any, kwargs: Any) -> Any:
    """Note what it issues."""
    require_whole(bucket_group, PARAMETERS)
    result = wrapped(*args, **kwargs)
    _note(bucket_group, PARAMETERS)
    return result


def finish_grad_sync(wrapped: Any, bucket_group: Any, args: Any, kwargs: Any) -> Any:
    """Tell if nothing was dispatched that it could finish."""
    page = LEDGER.page(bucket_group)
    if page.dispatched is not True and bucket_group.grad_reduce_handle is None:
        _tell_undispatched(page, bucket_group)
    result = wrapped(*args, **kwargs)
    page.dispatched, page.finished = False, True
    return result


def _tell_undispatched(page: Any, bucket_group: Any) -> None:
    config = bucket_group.ddp_config
    # In the first batch 0.16 and later dispatch here; since 0.18 a second call in a step does nothing.
    dispatches_here = not config.overlap_grad_reduce or getattr(bucket_group, "is_first_batch", False)
    if dispatches_here or getattr(bucket_group, "grad_reduce_finished", False) or "undispatched" in page.said:
        return
    several = config.num_distributed_optimizer_instances > 1
    if several and page.dispatched is None:
        # The guard was installed within this step.
        return
    page.said.add("undispatched")
    ready: Any = getattr(bucket_group, "params_with_grad", ()) or getattr(
        bucket_group, "per_param_grad_ready_counts", ()
    )
    sizes = tuple(bucket.grad_data.numel() for bucket in bucket_group.buckets)
    after = "its gradients go on as if they were reduced" if several else "Megatron raises now"
    message = (
        f"finish_grad_sync of a bucket group ({', '.join(map(str, sizes))} elements) whose reduction was not "
        f"dispatched: {len(ready)} of {len(bucket_group.params)} parameters have a gradient; {after}"
    )
    fields = {"bucket_elements": sizes, "ready": len(ready), "parameters": len(bucket_group.params)}
    emit(Event("reduction-not-dispatched", message, fields))


def zero_grad_buffer(wrapped: Any, ddp: Any, args: Any, kwargs: Any) -> Any:
    """Drain what an abandoned step left, unless the code does so itself."""
    for bucket_group in bucket_groups(ddp):
        require_whole(bucket_group, GRADIENTS)
    if not hasattr(ddp, FIX_DRAINS):
        drain_abandoned(ddp)
    forget_abandoned_counts(ddp)
    result = wrapped(*args, **kwargs)
    for bucket_group in bucket_groups(ddp):
        page = LEDGER.page(bucket_group)
        page.dispatched = page.finished = False
    return result


def bucket_groups(ddp: Any) -> Iterator[Any]:
    """All bucket groups of a DistributedDataParallel."""
    yield from ddp.bucket_groups
    yield from ddp.expert_parallel_bucket_groups


def drain_abandoned(ddp: Any) -> None:
    """Wait for gradient reductions that no ``finish_grad_sync`` waited for, and let go of their handles.

    Raises:
        CollectiveTimeoutError: Not all ranks abandoned a step there, or a reduction did not end in time; the handle is
            still outstanding, and nothing was zeroed.
    """
    drained = 0
    for bucket_group in bucket_groups(ddp):
        if bucket_group.grad_reduce_handle is not None:
            page = LEDGER.page(bucket_group)
            _agree(process_group(bucket_group, GRADIENTS))
            outstanding = page.outstanding.get(GRADIENTS)
            drain(bucket_group.grad_reduce_handle, outstanding, TERMS, TERMS.deadline_s)
            bucket_group.grad_reduce_handle = None
            drained += 1
        elif ddp.ddp_config.num_distributed_optimizer_instances > 1 and LEDGER.page(bucket_group).dispatched:
            # These leave no handle, and may still run on a stream of their own.
            if bucket_group.communication_stream is not None:
                torch.cuda.current_stream().wait_stream(bucket_group.communication_stream)
            drained += 1
    if drained:
        message = f"{drained} gradient reductions of a step that was abandoned were waited for before zero_grad_buffer"
        emit(Event("abandoned-step-drained", message, {"count": drained}))


def forget_abandoned_counts(ddp: Any) -> None:
    """Have the next batch count anew how often gradients get ready, where the first one was abandoned.

    0.16 and later take what the first batch counted for what every batch has, and refuse counts that lack a parameter.

    Raises:
        CollectiveTimeoutError: Not all ranks abandoned it; nothing was forgotten or zeroed.
    """
    counted = [bucket_group for bucket_group in bucket_groups(ddp) if _counted_in_vain(bucket_group)]
    if not counted:
        return
    # A first batch dispatches nothing before its end, so the number of collectives does not tell one from the next.
    number = next(_FIRST_BATCHES)
    for bucket_group in counted:
        _agree(process_group(bucket_group, GRADIENTS), f"first-batch-{number}/")
    for bucket_group in counted:
        bucket_group.per_param_grad_ready_counts = {}
    message = f"the first batch was abandoned: what {len(counted)} bucket groups counted in it is counted anew"
    emit(Event("abandoned-first-batch", message, {"count": len(counted)}))


def _counted_in_vain(bucket_group: Any) -> bool:
    first = getattr(bucket_group, "is_first_batch", False) and not hasattr(bucket_group, FIX_COUNTS)
    return first and bool(bucket_group.per_param_grad_ready_counts) and not LEDGER.page(bucket_group).finished


def _agree(group: Any, which: str = "") -> None:
    """Have every rank of a group say that it abandoned a step after as many collectives on it as this one.

    Args:
        group: Of the step's reductions.
        which: Tells steps apart that were abandoned after as many collectives.

    Raises:
        CollectiveTimeoutError: Some did not.
    """
    record = registry.record_of(group)
    issued = group._get_sequence_number_for_group()
    within_s = TERMS.deadline_s or AGREE_S
    try:
        meet(record, f"guards/abandoned/{which}{issued}", within_s)
    except NotMetError as error:
        missing = error.missing
        raise CollectiveTimeoutError(
            f"got a step abandoned after {issued} collectives on process group {record.name}, expected the same of "
            f"ranks {list(missing) if missing is not None else 'that the store can not tell'} within "
            f"{within_s:.1f} s: {error}; gradients can't be reduced any more",
            missing=missing,
            context=f"rank {record.rank}",
            hint="Restart the job, or make the process groups anew.",
        ) from None


def put_back() -> None:
    """Give Megatron its own handles back, and end the watcher."""
    WATCHER.stop()
    for outstanding in LEDGER.outstanding():
        bounded = outstanding.handle
        if isinstance(bounded, BoundedHandle) and not bounded.waiting:
            setattr(outstanding.bucket_group, outstanding.kind, bounded.inner)
    LEDGER.clear()


# Works are let go of while CUDA is still there.
atexit.register(put_back)
WRAPPERS = {
    ("lifecycle", "_ParamAndGradBucketGroup.start_grad_sync"): start_grad_sync,
    ("lifecycle", "_ParamAndGradBucketGroup.finish_grad_sync"): finish_grad_sync,
    ("lifecycle", "_ParamAndGradBucketGroup.start_param_sync"): start_param_sync,
    ("lifecycle", "DistributedDataParallel.zero_grad_buffer"): zero_grad_buffer,
}
