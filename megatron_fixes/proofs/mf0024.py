# SPDX-License-Identifier: Apache-2.0
"""Proof of MF0024: the gradient norm leaves out the attention sinks of all tensor-parallel ranks but the first.

Guards: the norm that the optimizer clips by is that of the whole model, in which each head's learnable
``softmax_offset`` counts once, and so does a parameter that every tensor-parallel rank has a copy of.

* ``norm`` (2 ranks, tensor parallel): the real ``DotProductAttention`` with a weight on its queries that all ranks
  share, wrapped by the real DistributedDataParallel; the norm is asked of what ``get_megatron_optimizer`` builds, plain
  and distributed.

The reference is attention over all heads in plain float64 autograd. A release that knows no ``softmax_type`` runs the
same without sinks. Left out: ``TEDotProductAttention``, which needs TransformerEngine.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from megatron_fixes.proofs.ddp import RELATIVE_TOLERANCE, transformer_config
from megatron_fixes.proofs.norms import OPTIMIZERS, gradient_norm
from megatron_fixes.proofs.proof import Case, Judgement, Proof

if TYPE_CHECKING:
    from collections.abc import Sequence

RANKS, HEADS, CHANNELS, LENGTH = 2, 4, 4, 5
SINKS = any(field.name == "softmax_type" for field in fields(TransformerConfig))


def _whole() -> dict[str, torch.Tensor]:
    """Queries, keys, values and weights of the loss, shape (LENGTH, 1, HEADS, CHANNELS), and both parameters."""
    generator = torch.Generator().manual_seed(1)
    shape = (LENGTH, 1, HEADS, CHANNELS)
    whole = {name: torch.randn(shape, generator=generator) for name in ("query", "key", "value", "loss")}
    return {**whole, "scale": torch.rand(CHANNELS, generator=generator), "sinks": torch.arange(float(HEADS))}


class _Model(torch.nn.Module):
    """Attention over this rank's heads, to queries scaled by a weight that all ranks have."""

    def __init__(self, config: TransformerConfig, own: slice) -> None:
        super().__init__()
        whole = _whole()
        self.scale = torch.nn.Parameter(whole.pop("scale"))
        self.attention = DotProductAttention(config, 1, AttnMaskType.causal, "self")
        sinks = whole.pop("sinks")[own]
        if SINKS:
            self.attention.softmax_offset.data.copy_(sinks)
        self.inputs = {name: tensor[:, :, own].contiguous() for name, tensor in whole.items()}

    def forward(self) -> torch.Tensor:
        """This rank's part of the loss, shape ``()``."""
        query = self.inputs["query"] * copy_to_tensor_model_parallel_region(self.scale)
        output = self.attention(query, self.inputs["key"], self.inputs["value"], None)
        return (output * self.inputs["loss"].flatten(2)).sum()  # type: ignore[no-any-return]


def _expected() -> dict[str, float]:
    """The square of each parameter's gradient: attention over all heads in float64, on one rank."""
    whole = {name: tensor.double() for name, tensor in _whole().items()}
    parameters = {name: whole[name].requires_grad_() for name in (["scale", "sinks"] if SINKS else ["scale"])}
    scores = torch.einsum("qbhc,kbhc->bhqk", whole["query"] * whole["scale"], whole["key"]) / math.sqrt(CHANNELS)
    scores = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -math.inf).exp()
    sinks = whole["sinks"].exp().view(1, HEADS, 1, 1) if SINKS else 0
    weights = scores / (scores.sum(-1, keepdim=True) + sinks)
    loss = (torch.einsum("bhqk,kbhc->qbhc", weights, whole["value"]) * whole["loss"]).sum()
    gradients = torch.autograd.grad(loss, list(parameters.values()))
    return {name: gradient.square().sum().item() for name, gradient in zip(parameters, gradients, strict=True)}


def _norm(rank: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    learnable: dict[str, Any] = {"softmax_type": "learnable"} if SINKS else {}
    config = transformer_config(
        hidden_size=HEADS * CHANNELS,
        num_attention_heads=HEADS,
        attention_dropout=0.0,
        tensor_model_parallel_size=RANKS,
        sequence_parallel=True,
        **learnable,
    )
    heads = HEADS // RANKS
    own = slice(rank * heads, (rank + 1) * heads)
    norms = {
        name: gradient_norm(_Model(config, own), config, distributed=distributed)
        for name, distributed in OPTIMIZERS.items()
    }
    return {"norms": norms, "expected": _expected()}


def judge(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if the norm of either optimizer, on any rank, is not the one over all parameters.

    Args:
        evidence: From each rank, in order: ``norms`` by optimizer, and the ``expected`` square by parameter.
    """
    norms = [(rank["expected"], name, norm) for rank in evidence for name, norm in rank["norms"].items()]
    for squares, name, norm in norms:
        expected = math.sqrt(sum(squares.values()))
        if not abs(norm - expected) <= RELATIVE_TOLERANCE * expected:
            return Judgement("defect", f"gradient norm {norm:.4f} with the {name} optimizer, expected {expected:.4f}")
    parameters = " and ".join(evidence[0]["expected"])
    return Judgement("clean", f"{len(norms)} of {len(norms)} gradient norms right, over {parameters}")


PROOF = Proof("MF0024", (Case("norm", "gloo", RANKS, _norm, judge),))
