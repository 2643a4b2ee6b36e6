# SPDX-License-Identifier: Apache-2.0
"""A real Megatron-LM mixture of experts or its router alone, and an independent reference of the router's losses.

The reference is plain PyTorch in float64 over whole sequences: no process group, no Megatron code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from megatron_fixes.proofs.ddp import transformer_config

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

HIDDEN, EXPERTS, TOPK = 8, 4, 2

# Where TransformerEngine is absent, the routers of 0.13 to 0.16 ask for this name and miss it; None, which later
# releases give it then, has them multiply matrices with PyTorch.
vars(moe_utils).setdefault("te_general_gemm", None)


def moe_config(**changes: Any) -> TransformerConfig:
    """The smallest config that a router accepts; fp32, top 2 of 4 experts."""
    moe = {"num_moe_experts": EXPERTS, "moe_router_topk": TOPK, "moe_router_load_balancing_type": "aux_loss"}
    return transformer_config(**{"hidden_size": HIDDEN, "add_bias_linear": False, **moe, **changes})


def router(config: TransformerConfig, layer_number: int) -> Any:
    """A real router on the process groups that the release takes by default, the same weights on every rank.

    Args:
        config: As from ``moe_config``.
        layer_number: Counts from 1 over the whole model.
    """
    groups = {}
    for keyword, default in (
        ("model_comm_pgs", "get_default_model_comm_pgs"),
        ("pg_collection", "get_default_pg_collection"),
    ):
        if hasattr(moe_utils, default):
            groups[keyword] = getattr(moe_utils, default)()
    made: Any = TopKRouter(config, **groups)
    made.set_layer_number(layer_number)
    weight = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(50 + layer_number))
    with torch.no_grad():
        made.weight.copy_(weight)
    return made


def moe_layer(config: TransformerConfig) -> Any:
    """A real ``MoELayer`` with a router and experts of the local layers, one after the other, on the default groups.

    Args:
        config: As from ``moe_config``.
    """
    spec: Any = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    made: Any = build_module(spec, config=config) if isinstance(spec, ModuleSpec) else spec(config=config)
    made.set_layer_number(1)
    return made


def balancing_loss(logits: torch.Tensor) -> torch.Tensor:
    """The auxiliary load-balancing loss without its coefficient.

    Experts times the sum over experts of (mean probability) times (fraction of the assignments).

    Args:
        logits: float64, (tokens, experts), of all tokens that are balanced together; read.

    Returns:
        float64, shape ``()``; differentiable.
    """
    assigned = torch.zeros_like(logits).scatter(1, logits.topk(TOPK, dim=1).indices, 1.0)
    return EXPERTS * (logits.softmax(dim=1).mean(dim=0) * assigned.mean(dim=0) / TOPK).sum()


def z_loss(logits: torch.Tensor) -> torch.Tensor:
    """The router's z-loss without its coefficient: mean square of the log of the partition sum.

    Args:
        logits: float64, (tokens, experts); read.

    Returns:
        float64, shape ``()``; differentiable.
    """
    return logits.logsumexp(dim=1).square().mean()
