# SPDX-License-Identifier: Apache-2.0
"""The gradient norm that a real Megatron-LM optimizer clips by, after one real backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron_fixes.proofs.ddp import wrap

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer import TransformerConfig

# The optimizers to ask, and whether each is the distributed one.
OPTIMIZERS = {"plain": False, "distributed": True}


def gradient_norm(model: torch.nn.Module, config: TransformerConfig, *, distributed: bool) -> float:
    """Wrap a model, run its loss backward, and ask what ``get_megatron_optimizer`` builds for the norm.

    Args:
        model: Called without arguments it returns this rank's loss, shape ``()``; modified by DDP.
        config: As from ``ddp.transformer_config``.
        distributed: Whether it is the distributed optimizer.
    """
    ddp = wrap(model, config, instances=1, bucket_size=None, overlap=False, distributed_optimizer=distributed)
    optimizer: Any = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, use_distributed_optimizer=distributed), [ddp]
    )
    ddp().backward()
    ddp.finish_grad_sync()
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm())
