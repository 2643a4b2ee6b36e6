# SPDX-License-Identifier: Apache-2.0
"""The first collective of a group: ranks meet at the store before it, where it would block the host with no deadline.

NCCL connects in the first collective, inside the call, and blocks the host until all ranks have come to theirs. So no
deadline of a wait can help there: a rank that never comes is a hang, in torch and with us. Ranks that have met come.

Not handled: a rank that dies or stops after it has met, before NCCL is connected; back ends that hide whether they are
(``TORCH_DISTRIBUTED_DEBUG=DETAIL`` wraps them); and a group whose first collective some ranks issue without a context,
or without a deadline: they are taken for absent.
Source: ProcessGroupNCCL makes its communicator by ncclCommInitRankConfig, which is blocking unless told otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_fixes.collectives.arrivals import NotMetError, meet
from megatron_fixes.collectives.errors import CollectiveTimeoutError

if TYPE_CHECKING:
    import torch

    from megatron_fixes.collectives.registry import GroupRecord

MEET_S = 60.0


def blocks_to_connect(group: Any, tensor: torch.Tensor) -> bool:
    """Whether a collective of this tensor would block the host until all ranks have issued theirs.

    Args:
        group: The process group.
        tensor: Any dtype, shape and device; not read.
    """
    if not tensor.is_cuda:
        return False
    connected = getattr(group._get_backend(tensor.device), "_is_initialized", None)
    return connected is not None and not connected()


def meet_before(record: GroupRecord, what: str, place: str, within_s: float) -> None:
    """Wait until all ranks have come to the first collective of a group.

    Args:
        record: The group.
        what: What this rank is about to issue, and
        place: where, both for the message alone.
        within_s: How long to wait for the others.

    Raises:
        CollectiveTimeoutError: Some did not come, on all ranks that did. Nothing was issued; all may try again.
    """
    number = record.meetings
    record.meetings += 1
    try:
        meet(record, f"connect/{number}", within_s)
    except NotMetError as error:
        raise CollectiveTimeoutError(
            f"got not all of ranks {list(record.ranks)} of process group {record.name} within {within_s:g} s, expected "
            f"them at its first collective, {what}: {error}; nothing was issued",
            missing=error.missing,
            context=f"rank {record.rank}, {place}",
            hint="Look at where the missing ranks are.",
        ) from None
