# SPDX-License-Identifier: Apache-2.0
"""Proof of MF0025: the offloading optimizer steps on the GPU before the gradients are there.

Guards: where a part of the parameters stays on the GPU, their update reads gradients after these were converted to the
dtype of the masters, which ``HybridDeviceOptimizer.step`` does on the stream of its copies to the host.

* ``recorder`` (CPU, gloo): the happens-before recorder over real steps with bfloat16 gradients. Looked at are the
  conversions alone: reads of offloaded parameters are MF0014's. Also with everything offloaded, where no update runs
  on the GPU, so that a recorder that cries wolf is caught.
* ``early-steps`` (one GPU, NCCL): the stream of the copies is kept busy, as it is when copies of other gradients are
  still under way, and each master is compared with plain SGD. Gradients are pinned on the host, since a copy to
  memory that is not pinned blocks the host and hides the defect, and they differ from step to step, since the buffer
  that is read too early often holds those of the step before.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from megatron_fixes.proofs.host_memory import HostMemory
from megatron_fixes.proofs.offloading import RECORDED_STEPS, SIZE, evidence_of_races, judge_races, sgd
from megatron_fixes.proofs.proof import Case, Judgement, Proof
from megatron_fixes.proofs.recorder import recording

if TYPE_CHECKING:
    from collections.abc import Sequence

CONVERSION = "aten::_to_copy"
# The first steps allocate, which may block the host.
GPU_ELEMENTS, GPU_STEPS, WARM_UP = 4 * 2**20, 9, 3
# Some 0.1 s at the clocks of any current GPU, where enqueuing a whole step takes a few milliseconds.
DELAY_CYCLES = 200_000_000


def _optimizer(parameters: list[torch.nn.Parameter], offload_fraction: float) -> Any:
    return sgd(
        parameters, offload_fraction=offload_fraction, overlap=True, param_update_in_fp32=True, pin_cpu_grads=True
    )


def _gradient(step: int) -> float:
    """Another one in each step; exact in bfloat16."""
    return float(step * 7 % 61 + 1)


def _record_steps(offload_fraction: float) -> tuple[list[str], int]:
    """Take steps; list the races over converted gradients, and count the elements that came out wrong."""
    with HostMemory(), recording() as recorder:
        parameters = [torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.bfloat16)) for _ in range(2)]
        optimizer = _optimizer(parameters, offload_fraction)
        for step in range(RECORDED_STEPS):
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, _gradient(step))
            optimizer.step()
    expected = -sum(map(_gradient, range(RECORDED_STEPS)))
    wrong = sum(int((parameter.detach() != expected).sum()) for parameter in parameters)
    return [str(race) for race in recorder.races if CONVERSION in str(race)], wrong


def _record(rank: int) -> dict[str, Any]:
    return evidence_of_races(_record_steps(0.5), _record_steps(1.0))


judge_record = partial(judge_races, control="with everything offloaded", missing="an update is missing")


def _early_steps(rank: int) -> dict[str, Any]:
    parameters = [torch.nn.Parameter(torch.zeros(GPU_ELEMENTS, dtype=torch.bfloat16, device="cuda")) for _ in range(2)]
    optimizer = _optimizer(parameters, 0.5)
    (resident,) = [p for p in parameters if p not in optimizer.gpu_params_map_cpu_copy]
    master = optimizer.param_to_fp32_param[resident]
    wrong = []
    for step in range(GPU_STEPS):
        expected = master.detach() - _gradient(step)
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, _gradient(step))
        torch.cuda.synchronize()
        if step >= WARM_UP:
            with torch.cuda.stream(optimizer._d2h_stream):
                torch.cuda._sleep(DELAY_CYCLES)
        optimizer.step()
        torch.cuda.synchronize()
        if step >= WARM_UP:
            wrong.append(int((master.detach() != expected).sum()))
        master.data.copy_(expected)
    return {"wrong": wrong}


def judge_steps(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if any master differs from plain SGD; ``wrong`` has the elements of each step that do."""
    steps = [wrong for e in evidence for wrong in e["wrong"]]
    bad = [wrong for wrong in steps if wrong]
    if not bad:
        return Judgement("clean", f"masters right in {len(steps)} of {len(steps)} steps")
    share = 100 * max(bad) / GPU_ELEMENTS
    return Judgement(
        "defect", f"wrong masters in {len(bad)} of {len(steps)} steps; up to {share:.1f} % of the elements"
    )


PROOF = Proof(
    "MF0025",
    (
        Case("recorder", "gloo", 1, _record, judge_record),
        Case("early-steps", "nccl", 1, _early_steps, judge_steps, timeout_s=120.0),
    ),
)
