# SPDX-License-Identifier: Apache-2.0
"""Proof of MF0020: a model in ``TorchFullyShardedDataParallel`` can't finish its first training step.

Guards: a training step of the real schedule with the real ``finalize_model_grads`` ends, and leaves each of 2 ranks
its shard of the mean gradient, as plain autograd in float64 has it; with and without ``force_all_reduce``, which
means nothing to FSDP2.

FSDP2 is PyTorch's own, on gloo. Megatron-LM asks for a mesh of CUDA devices by name; here it gets one of CPU.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallelConfig,
    TorchFullyShardedDataParallel,
    finalize_model_grads,
    torch_fully_sharded_data_parallel,
)
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_fixes.proofs.ddp import RELATIVE_TOLERANCE, reference_gradients, transformer_config
from megatron_fixes.proofs.proof import Case, Judgement, Proof
from megatron_fixes.proofs.stages import CpuMesh, OnlyStage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HIDDEN, RANKS, MICROBATCHES = 8, 2, 2
REFUSED = "unexpected keyword argument 'force_all_reduce'"


class _Layer(OnlyStage):
    """A linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.linear = torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.linear(data)
        return output


def _data(rank: int, microbatch: int) -> torch.Tensor:
    return torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(100 * rank + microbatch))


def _loss(module: torch.nn.Module, data: torch.Tensor) -> torch.Tensor:
    return module(data.to(next(module.parameters()).dtype)).square().mean()


def _forward_step(data: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value = output.square().mean()
        return value, {"loss": value.detach()}

    return model(next(data)), loss


def _step(wrapped: Any, rank: int, force: dict[str, bool]) -> dict[str, Any]:
    """One training step; what the ranks' gradient shards differ by from the reference, or how it was refused."""
    wrapped.zero_grad()
    try:
        get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iter([_data(rank, microbatch) for microbatch in range(MICROBATCHES)]),
            model=wrapped,
            num_microbatches=MICROBATCHES,
            seq_length=4,
            micro_batch_size=1,
            forward_only=False,
            **force,
        )
    except TypeError as error:
        if REFUSED not in str(error):
            raise
        return {"refused": str(error)}
    losses = [partial(_loss, data=_data(peer, at)) for peer in range(RANKS) for at in range(MICROBATCHES)]
    expected = reference_gradients(_Layer(), losses)
    worst = 0.0
    for name, parameter in wrapped.module.named_parameters():
        want = expected[name].chunk(RANKS)[rank]
        got = parameter.grad.to_local().double()
        worst = max(worst, ((got - want).abs().max() / want.abs().max()).item())
    return {"error": worst}


def _run(rank: int) -> dict[str, Any]:
    vars(torch_fully_sharded_data_parallel)["DeviceMesh"] = CpuMesh
    parallel_state.initialize_model_parallel()
    config = transformer_config(finalize_model_grads_func=finalize_model_grads)
    wrapped = TorchFullyShardedDataParallel(config, DistributedDataParallelConfig(), _Layer())
    forces: list[dict[str, bool]] = [{}]
    if "force_all_reduce" in inspect.signature(get_forward_backward_func()).parameters:
        forces.append({"force_all_reduce": True})
    return {"steps": [_step(wrapped, rank, force) for force in forces]}


def judge(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if a step was refused on a rank, or left it a wrong gradient."""
    steps = [step for rank in evidence for step in rank["steps"]]
    if refused := [step["refused"] for step in steps if "refused" in step]:
        return Judgement("defect", f"a training step ended in a TypeError: {refused[0]}")
    if wrong := [step["error"] for step in steps if not step["error"] < RELATIVE_TOLERANCE]:
        return Judgement("defect", f"wrong mean gradients, by {wrong[0]:.1g} of the largest")
    return Judgement("clean", f"mean gradients right in {len(steps)} of {len(steps)} steps")


PROOF = Proof("MF0020", (Case("training step", "gloo", RANKS, _run, judge),))
