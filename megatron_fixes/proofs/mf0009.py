# SPDX-License-Identifier: Apache-2.0
"""Proof of MF0009: some process groups don't have the timeout that initialize_model_parallel was given.

Guards: after ``initialize_model_parallel(distributed_timeout_minutes=…)`` every process group that it made has that
timeout, as the group's backend itself tells. One layout makes every kind of group that the release knows.

Left out: groups that a caller makes by ``create_all_gather_groups``, to which the caller gives the timeout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_fixes.proofs.layouts import RICH, initialize
from megatron_fixes.proofs.proof import Case, Judgement, Proof

if TYPE_CHECKING:
    from collections.abc import Sequence

# Neither torch's default for NCCL (10 minutes) nor for gloo (30), nor Megatron's own (30).
TIMEOUT_MINUTES = 7


def _timeout_s(group: Any) -> float:
    seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds


def _initialize(rank: int) -> dict[str, Any]:
    groups = dist.distributed_c10d._world.pg_map
    before = set(groups)
    initialize({**RICH, "create_all_gather_group": True, "distributed_timeout_minutes": TIMEOUT_MINUTES})
    return {"groups": [[group.group_desc, _timeout_s(group)] for group in groups if group not in before]}


def judge(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if a group on any rank has another timeout than the one that was asked for.

    Args:
        evidence: From each rank: ``groups``, a list of pairs of description and timeout in seconds.
    """
    groups = [group for seen in evidence for group in seen["groups"]]
    wrong: dict[str, float] = {name: seconds for name, seconds in groups if seconds != 60 * TIMEOUT_MINUTES}
    if wrong:
        told = ", ".join(f"{name} {seconds / 60:g} min" for name, seconds in sorted(wrong.items()))
        return Judgement("defect", f"asked for {TIMEOUT_MINUTES} min: {told}")
    if min(len(seen["groups"]) for seen in evidence) == 0:
        return Judgement("not-runnable", "no group was made")
    kinds = len({name for name, _ in groups})
    return Judgement("clean", f"{len(groups)} groups of {kinds} kinds have the timeout of {TIMEOUT_MINUTES} min")


PROOF = Proof("MF0009", (Case("timeouts", "gloo", 4, _initialize, judge),))
