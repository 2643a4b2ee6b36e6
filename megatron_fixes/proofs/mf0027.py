# SPDX-License-Identifier: Apache-2.0
"""Proof of MF0027: without expert parallelism, gradients of experts are reduced over the dense data-parallel group.

Guards: where the experts' tensor-parallel size is not the dense one, the gradient of every parameter of a mixture of
experts, and the norm that the optimizer clips by, are those without parallelism: each rank's tokens count, and
different pieces of an expert are not added up.

* ``experts are whole`` (4 ranks): dense tensor parallelism of 2 with sequence parallelism, experts not split. Here the
  experts' weights lose the mark ``tensor_model_parallel``, as is reported of ``TEGroupedLinear`` (MF0016). The local
  layers of 0.12 stop in the forward pass; that counts as the defect.
* ``experts are split`` (4 ranks): experts split over 2 ranks, no dense tensor parallelism.
* Controls: both split over 2 ranks; neither split.

The real ``MoELayer`` of the local layers in real DDP goes through ``finalize_model_grads`` and what
``get_megatron_optimizer`` builds, plain and distributed. The reference is plain autograd in float64 over whole
sequences. Every expert gets every token, so that ranks never differ in what they send. Left out: experts of
TransformerEngine and grouped GEMM, which need those packages, and biases.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import megatron.core
import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron_fixes.proofs.ddp import RELATIVE_TOLERANCE, compare, reference_gradients, wrap
from megatron_fixes.proofs.moe import EXPERTS, HIDDEN, moe_config, moe_layer
from megatron_fixes.proofs.norms import OPTIMIZERS
from megatron_fixes.proofs.proof import Case, Judgement, Proof
from megatron_fixes.proofs.stages import OnlyStage

if TYPE_CHECKING:
    from collections.abc import Sequence

RANKS, TOKENS, FFN = 4, 8, 4


class _Model(OnlyStage):
    """A mixture of experts alone."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.scale = torch.nn.Parameter(torch.empty(HIDDEN))
        self.scale.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.moe = moe_layer(config)

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The loss over some tokens of a sequence, shape ``()``."""
        output, _ = self.moe(tokens * self.scale)
        loss: torch.Tensor = (output * weights).sum()
        return loss


class _Plain(torch.nn.Module):
    """The same without parallelism, in plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.scale = torch.nn.Parameter(torch.rand(HIDDEN, generator=generator))
        self.router = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, generator=generator))
        self.fc1 = torch.nn.Parameter(torch.randn(EXPERTS, FFN, HIDDEN, generator=generator))
        self.fc2 = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, FFN, generator=generator))

    def forward(self, tokens: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As ``_Model``."""
        tokens = tokens * self.scale
        chosen = (tokens @ self.router.t()).softmax(dim=-1)
        inner = torch.nn.functional.gelu(torch.einsum("sbh,efh->sbef", tokens, self.fc1))
        output = torch.einsum("sbef,ehf,sbe->sbh", inner, self.fc2, chosen)
        return (output * weights).sum()


def _sequence(dp_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens of a sequence and their weights in the loss, (TOKENS, 1, HIDDEN)."""
    generator = torch.Generator().manual_seed(100 + dp_rank)
    return torch.randn(TOKENS, 1, HIDDEN, generator=generator), torch.randn(TOKENS, 1, HIDDEN, generator=generator)


def _own(whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's part of something that has the shapes of ``_Plain``'s parameters, by the names of ``_Model``."""
    parts = parallel_state.get_expert_tensor_parallel_world_size()
    part = parallel_state.get_expert_tensor_parallel_rank()
    own = {"scale": whole["scale"], "moe.router.weight": whole["router"]}
    for expert in range(EXPERTS):
        name = f"moe.experts.local_experts.{expert}"
        own[f"{name}.linear_fc1.weight"] = whole["fc1"][expert].chunk(parts, dim=0)[part]
        own[f"{name}.linear_fc2.weight"] = whole["fc2"][expert].chunk(parts, dim=1)[part]
    return own


def _step(config: Any, plain: _Plain, expected: dict[str, torch.Tensor], *, distributed: bool) -> dict[str, Any]:
    """One backward pass: how far this rank's gradients are right, and the norm."""
    model = _Model(config)
    if config.expert_tensor_parallel_size == 1:
        for parameter in model.moe.experts.parameters():
            parameter.tensor_model_parallel = False
    weights = _own(dict(plain.named_parameters()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    ddp = wrap(model, config, instances=1, bucket_size=None, overlap=False, distributed_optimizer=distributed)
    optimizer: Any = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=distributed), [ddp]
    )
    tp_size, tp_rank = config.tensor_model_parallel_size, parallel_state.get_tensor_model_parallel_rank()
    sequence = _sequence(parallel_state.get_data_parallel_rank())
    try:
        loss = ddp(*(tensor.chunk(tp_size)[tp_rank] for tensor in sequence))
    except RuntimeError as error:
        if not megatron.core.__version__.startswith("0.12."):
            raise
        return {"failed": str(error).splitlines()[0]}
    loss.backward()
    finalize_model_grads([ddp])
    report = compare(ddp, _own(expected))
    optimizer.prepare_grads()
    norm = math.sqrt(sum(gradient.square().sum().item() for gradient in expected.values()))
    return {**report, "norm": float(optimizer.get_grad_norm()), "expected norm": norm}


def _run(rank: int, *, tp: int, etp: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, expert_tensor_parallel_size=etp)
    config = moe_config(
        expert_tensor_parallel_size=etp,
        ffn_hidden_size=FFN,
        moe_ffn_hidden_size=FFN,
        moe_aux_loss_coeff=0.0,
        moe_router_topk=EXPERTS,
        moe_token_dispatcher_type="alltoall",
        num_attention_heads=2,
        sequence_parallel=tp > 1,
        tensor_model_parallel_size=tp,
        use_cpu_initialization=True,
    )
    plain = _Plain()
    losses = [
        partial(lambda plain, dp_rank: plain(*(t.double() for t in _sequence(dp_rank))), dp_rank=dp_rank)
        for dp_rank in range(parallel_state.get_data_parallel_world_size())
    ]
    expected = reference_gradients(plain, losses)
    return {name: _step(config, plain, expected, distributed=distributed) for name, distributed in OPTIMIZERS.items()}


def judge(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if on any rank, with either optimizer, a gradient or the norm is not the one without parallelism."""
    reports = [report for rank in evidence for report in rank.values()]
    if failed := [report["failed"] for report in reports if "failed" in report]:
        return Judgement("defect", f"the forward pass fails in {len(failed)} of {len(reports)}: {failed[0]}")
    if wrong := [report for report in reports if report["wrong"]]:
        count, elements = sum(r["wrong"] for r in wrong), sum(r["elements"] for r in reports)
        worst = f"{wrong[0]['got']:.4f}, expected {wrong[0]['expected']:.4f}"
        return Judgement("defect", f"{count} of {elements} elements of gradients are wrong: {worst}")
    for report in reports:
        if not abs(report["norm"] - report["expected norm"]) <= RELATIVE_TOLERANCE * report["expected norm"]:
            return Judgement("defect", f"gradient norm {report['norm']:.4f}, expected {report['expected norm']:.4f}")
    return Judgement("clean", f"gradients and norms right, {len(reports)} of {len(reports)}")


PROOF = Proof(
    "MF0027",
    (
        Case("experts are whole", "gloo", RANKS, partial(_run, tp=2, etp=1), judge),
        Case("experts are split", "gloo", RANKS, partial(_run, tp=1, etp=2), judge),
        Case("both are split", "gloo", RANKS, partial(_run, tp=2, etp=2), judge, control=True),
        Case("neither is split", "gloo", RANKS, partial(_run, tp=1, etp=1), judge, control=True),
    ),
)
