# SPDX-License-Identifier: Apache-2.0
"""A real ``HybridDeviceOptimizer`` with SGD, and the judgement over what the recorder saw of its steps.

Host and device are told apart by ``host_memory``; what only a GPU can show is in the proofs' own NCCL cases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from megatron_fixes.proofs.proof import Judgement

if TYPE_CHECKING:
    from collections.abc import Sequence

RECORDED_STEPS, SIZE = 2, 4


def sgd(parameters: list[torch.nn.Parameter], *, offload_fraction: float, overlap: bool, **options: Any) -> Any:
    """SGD with a learning rate of 1 over parameters of which a fraction is offloaded.

    Args:
        parameters: Kept, and written to by its steps.
        offload_fraction: From 0, all stay on the device, to 1.
        overlap: Whether copies overlap, on streams of their own.
        options: More of ``HybridDeviceOptimizer``.
    """
    return HybridDeviceOptimizer(
        parameters,
        offload_fraction=offload_fraction,
        cpu_optimizer_cls=torch.optim.SGD,
        gpu_optimizer_cls=torch.optim.SGD,
        overlap_cpu_optimizer_d2h_h2d=overlap,
        lr=1.0,
        **options,
    )


def evidence_of_races(shown: tuple[list[str], int], control: tuple[list[str], int]) -> dict[str, Any]:
    """What a rank tells of two recordings, each races and the number of wrong elements."""
    return {
        "races": len(shown[0]),
        "example": shown[0][:1],
        "wrong": shown[1] + control[1],
        "races_in_control": len(control[0]),
    }


def judge_races(evidence: Sequence[dict[str, Any]], *, control: str, missing: str) -> Judgement:
    """Defect if any rank has a race, or a wrong parameter; nothing is shown if the control has a race.

    Args:
        evidence: From each rank, as from ``evidence_of_races``.
        control: What the control was, such as ``without overlap``.
        missing: What a wrong parameter means.
    """
    if races := sum(e["races_in_control"] for e in evidence):
        return Judgement("not-runnable", f"the recorder reports {races} races {control}, expected none")
    # Work runs at once here, so an order that is missing spoils nothing; a copy or a step that is missing does.
    if wrong := sum(e["wrong"] for e in evidence):
        return Judgement("defect", f"{wrong} elements with wrong values: {missing}")
    if races := sum(e["races"] for e in evidence):
        first = next(e["example"][0] for e in evidence if e["races"])
        return Judgement("defect", f"{races} races in {RECORDED_STEPS} steps, such as: {first}")
    return Judgement("clean", f"0 races in {RECORDED_STEPS} steps")
