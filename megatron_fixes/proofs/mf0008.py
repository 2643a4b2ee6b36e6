# SPDX-License-Identifier: Apache-2.0
"""Proof of MF0008: with multi-token prediction, a pipeline stage without experts reduces a shorter tensor.

Guards: what ``track_moe_metrics`` logs, called on every rank as ``training_log`` calls it, is on every pipeline
stage the mean of the losses that the routers had, and the stages reduce tensors of one shape.

2 ranks as 2 pipeline stages: the first has a dense layer, the second a layer with a real router that has run.
NCCL would wait for ever for the rest of the longer tensor. Here PyTorch's own check of collectives
(``TORCH_DISTRIBUTED_DEBUG=DETAIL``) compares the shapes before each one and raises on both ranks.

The control is the same without multi-token prediction.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import track_moe_metrics

from megatron_fixes.proofs.moe import HIDDEN, balancing_loss, moe_config, router
from megatron_fixes.proofs.proof import Case, Judgement, Proof

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron.core.transformer import TransformerConfig

LAYERS, MOE_LAYERS, TOKENS = 2, [0, 1], 6
NAME, TOLERANCE = "load_balancing_loss", 1e-5
MISMATCH = "Detected mismatch between collectives"


class _Writer:
    """Keeps what is logged, as a SummaryWriter would."""

    def __init__(self) -> None:
        self.scalars: dict[str, float] = {}

    def add_scalar(self, name: str, value: Any, iteration: int) -> None:
        self.scalars[name] = float(value)


def _log(config: TransformerConfig, prediction: dict[str, Any]) -> dict[str, float]:
    """Call it as ``training_log`` does."""
    writer = _Writer()
    track_moe_metrics(
        loss_scale=1.0,
        iteration=1,
        writer=writer,
        force_initialize=True,
        track_names=[NAME],
        num_layers=config.num_layers,
        moe_layer_freq=config.moe_layer_freq,
        **prediction,
    )
    return writer.scalars


def _run(rank: int, *, mtp_layers: int | None) -> dict[str, Any]:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    config = moe_config(
        num_layers=LAYERS,
        moe_layer_freq=MOE_LAYERS,
        moe_aux_loss_coeff=0.01,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
        mtp_num_layers=mtp_layers,
    )
    layer = router(config, layer_number=2)
    data = torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(1))
    if parallel_state.is_pipeline_last_stage():
        layer(data)
    # 0.12 does not count layers of multi-token prediction, and has no argument for them.
    counted = "mtp_num_layers" in inspect.signature(track_moe_metrics).parameters
    loss = balancing_loss(data.squeeze(1).double() @ layer.weight.detach().double().T).item()
    layers = sum(MOE_LAYERS) + (mtp_layers or 0) * counted
    evidence: dict[str, Any] = {"stage": rank, "expected": loss / layers}
    try:
        evidence["logged"] = _log(config, {"mtp_num_layers": mtp_layers} if counted else {})[NAME]
    except RuntimeError as error:
        if MISMATCH not in str(error):
            raise
        evidence["mismatch"] = str(error).splitlines()[0]
    return evidence


def judge(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if stages disagree over a collective, or log anything but the mean over all layers with experts."""
    if any("mismatch" in rank for rank in evidence):
        return Judgement("defect", "the pipeline stages reduce the auxiliary losses in tensors of different lengths")
    for rank in evidence:
        got, expected = rank["logged"], rank["expected"]
        if abs(got - expected) > TOLERANCE * expected:
            return Judgement("defect", f"stage {rank['stage']} logged {got}, expected {expected}")
    return Judgement("clean", "every pipeline stage logged the mean of the auxiliary losses")


PROOF = Proof(
    "MF0008",
    (
        Case("multi-token prediction", "gloo", 2, partial(_run, mtp_layers=1), judge),
        Case("control", "gloo", 2, partial(_run, mtp_layers=None), judge, control=True),
    ),
)
