# SPDX-License-Identifier: Apache-2.0
"""``check_ranks``: all ranks of a group run the same fixes on the same release. The overlay's one edge to torch.

It stands beside the room, not in it, so that the room stays free of torch and can be imported at interpreter start.
What is compared, and how a difference is told, is in ``overlay.agreement``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from megatron_fixes.config import overlay_settings
from megatron_fixes.errors import RanksDisagreeError, UsageError
from megatron_fixes.overlay import status
from megatron_fixes.overlay.agreement import Account, account_of, disagreement

if TYPE_CHECKING:
    from megatron_fixes.overlay.report import Status


def check_ranks(group: dist.ProcessGroup | None = None) -> Status:
    """Compare what the ranks of a group have in force; every rank of the group must call it.

    Call it after Megatron is imported: what is not imported is not in force yet.

    Args:
        group: A process group; None for all ranks. With NCCL the current device must be this rank's own.

    Returns:
        This rank's status, which in what counts is every rank's.

    Raises:
        UsageError: ``torch.distributed`` is not initialized.
        RanksDisagreeError: They differ, or MEGATRON_FIXES asks for the overlay on a rank where it is off; raised on
            every rank, naming the ranks by their rank in the group.

    Order:
        Collective over the group; the host blocks until every rank has called it.
    """
    if not dist.is_initialized():
        raise UsageError(
            "got no process group, expected torch.distributed to be initialized",
            hint="Call check_ranks after init_process_group.",
        )
    mine = status()
    asked = overlay_settings().fixes
    off = bool(asked.value) and not mine.on
    gathered: list[tuple[Account, bool]] = [(account_of(mine), off)] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (account_of(mine), off), group=group)
    accounts = [account for account, _ in gathered]
    if nowhere := [rank for rank, (_, off) in enumerate(gathered) if off]:
        raise RanksDisagreeError(
            f"got the overlay off on ranks {nowhere}, where MEGATRON_FIXES asks for it",
            hint="See `megatron-fixes doctor` there, or import megatron_fixes.auto first.",
        )
    if text := disagreement(accounts):
        raise RanksDisagreeError(
            f"got ranks that run different code, expected one: {text}",
            hint="Set the same MEGATRON_FIXES, megatron-core and megatron-fixes on every node.",
        )
    return mine
