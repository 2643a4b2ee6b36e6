# SPDX-License-Identifier: Apache-2.0
"""Proof of MF0016: the gradient norm takes experts for duplicates by their dense tensor-parallel rank.

Guards: with expert parallelism, the norm that the optimizer clips by counts each expert's parameters once, whatever
the experts' tensor-parallel size is, and a dense parameter that all tensor-parallel ranks have once too.

* ``norm`` (4 ranks): a real ``RowParallelLinear`` of an expert beside a dense weight, wrapped by the real
  DistributedDataParallel; the norm is asked of what ``get_megatron_optimizer`` builds, plain and distributed. Four
  experts that are on one rank each, with dense tensor parallelism of 2; two experts split over two ranks each, with 1.

The bias of the expert's layer carries no ``tensor_model_parallel``. It stands for the weights of ``TEGroupedLinear``,
of which the same is reported, and which needs TransformerEngine: releases from 0.12.1 to 0.14.0 refuse a mixture of
experts with biases, though not the layer. The reference is worked out from the losses by hand, in float64.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import RowParallelLinear

from megatron_fixes.proofs.ddp import RELATIVE_TOLERANCE, transformer_config
from megatron_fixes.proofs.norms import OPTIMIZERS, gradient_norm
from megatron_fixes.proofs.proof import Case, Judgement, Proof

if TYPE_CHECKING:
    from collections.abc import Sequence

RANKS, HIDDEN, TOKENS = 4, 4, 3
# Dense tensor-parallel, expert-parallel and expert-tensor-parallel size; no data parallelism for experts.
LAYOUTS = {"whole experts": (2, 4, 1), "split experts": (1, 2, 2)}


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _inputs(expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An expert's tokens and their weights in the loss, both float32 of shape (TOKENS, HIDDEN)."""
    return _random(TOKENS, HIDDEN, seed=10 + expert), _random(TOKENS, HIDDEN, seed=20 + expert)


class _Model(torch.nn.Module):
    """An expert's layer, and a dense weight that all tensor-parallel ranks have."""

    def __init__(self, expert_parallel: int) -> None:
        super().__init__()
        config = transformer_config(
            hidden_size=HIDDEN,
            use_cpu_initialization=True,
            add_bias_linear=False,
            num_moe_experts=expert_parallel,
            expert_model_parallel_size=expert_parallel,
        )
        self.config = config
        self.dense = torch.nn.Parameter(torch.ones(HIDDEN))
        self.expert = RowParallelLinear(
            HIDDEN,
            HIDDEN,
            config=config,
            init_method=torch.nn.init.ones_,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=True,
        )

    def forward(self) -> torch.Tensor:
        """This rank's part of the loss, shape ``()``."""
        tokens, weights = _inputs(parallel_state.get_expert_model_parallel_rank())
        split = parallel_state.get_expert_tensor_parallel_rank()
        output, bias = self.expert(tokens.chunk(HIDDEN // self.expert.weight.shape[1], dim=1)[split].contiguous())
        dense = self.dense * _random(HIDDEN, seed=parallel_state.get_data_parallel_rank())
        return ((output + bias) * weights).sum() + dense.sum()  # type: ignore[no-any-return]


def _expected(expert_parallel: int, data_parallel: int) -> float:
    """The norm over all parameters: what DDP leaves is the sum over the data, divided by the data-parallel size."""
    gradients = [sum(_random(HIDDEN, seed=rank).double() for rank in range(data_parallel))]
    for expert in range(expert_parallel):
        tokens, weights = (tensor.double() for tensor in _inputs(expert))
        gradients += [weights.t() @ tokens, weights.sum(0)]
    return math.sqrt(sum(torch.as_tensor(gradient).square().sum().item() for gradient in gradients)) / data_parallel


def _norm(rank: int) -> dict[str, Any]:
    norms = {}
    for layout, (tensor, expert, expert_tensor) in LAYOUTS.items():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=expert_tensor,
        )
        for name, distributed in OPTIMIZERS.items():
            model = _Model(expert)
            norms[f"{layout}, {name} optimizer"] = {
                "got": gradient_norm(model, model.config, distributed=distributed),
                "expected": _expected(expert, RANKS // tensor),
            }
        torch.distributed.barrier()
        parallel_state.destroy_model_parallel()
    return {"norms": norms}


def judge(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if the norm of any layout and optimizer, on any rank, is not the one over all parameters.

    Args:
        evidence: From each rank, in order: ``norms``, by layout and optimizer, as got and as expected.
    """
    names = list(evidence[0]["norms"])
    wrong = {}
    for rank in evidence:
        for name, norm in rank["norms"].items():
            if not abs(norm["got"] - norm["expected"]) <= RELATIVE_TOLERANCE * norm["expected"]:
                wrong[name] = f"{name}: {norm['got']:.4f}, expected {norm['expected']:.4f}"
    if wrong:
        return Judgement("defect", f"wrong gradient norms: {'; '.join(wrong.values())}")
    return Judgement("clean", f"{len(names)} of {len(names)} gradient norms right")


PROOF = Proof("MF0016", (Case("norm", "gloo", RANKS, _norm, judge),))
