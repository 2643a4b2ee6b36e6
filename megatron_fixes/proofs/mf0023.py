# SPDX-License-Identifier: Apache-2.0
"""Proof of MF0023: with per-token loss, a router's auxiliary losses weigh less under tensor and context parallelism.

Guards: the gradient that the load-balancing loss and the z-loss give to the router after a training step is the one
that they give without parallelism: of the mean over data-parallel ranks and microbatches, each loss over a whole
sequence. The reference is plain autograd in float64 over whole sequences; the main loss is zero.

A real router in real DDP goes through the real schedule and ``finalize_model_grads`` with ``calculate_per_token_loss``,
on 2 ranks: as tensor parallelism with sequence parallelism, as context parallelism, and, the control, as data
parallelism. How the tokens are counted is up to the loss function: the own ones of a rank; for 0.12, which sums the
counts over data-parallel ranks only, those of the whole sequence, as its training script does.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import megatron.core
import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_fixes.proofs.ddp import compare, reference_gradients, wrap
from megatron_fixes.proofs.moe import HIDDEN, balancing_loss, moe_config, router, z_loss
from megatron_fixes.proofs.proof import Case, Judgement, Proof
from megatron_fixes.proofs.stages import OnlyStage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

TOKENS, MICROBATCHES = 8, 2
AUXILIARY, Z = 0.5, 0.25


class _Routed(OnlyStage):
    """A router alone."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.router = router(config, layer_number=1)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        probabilities, _ = self.router(data)
        output: torch.Tensor = probabilities.sum()
        return output


def _sequence(dp_rank: int, microbatch: int) -> torch.Tensor:
    """A whole sequence, (tokens, 1, hidden)."""
    return torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(100 * dp_rank + microbatch))


def _losses(plain: torch.nn.Module, sequence: torch.Tensor) -> torch.Tensor:
    logits = plain(sequence.squeeze(1).double())
    return AUXILIARY * balancing_loss(logits) + Z * z_loss(logits)


def _forward_step(data: Iterator[torch.Tensor], model: torch.nn.Module, *, tokens: int) -> tuple[torch.Tensor, Any]:
    def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        return output * 0.0, torch.tensor(tokens, dtype=torch.int), {"loss": output.detach()}

    return model(next(data)), loss


def _run(rank: int, *, tp: int, cp: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    dp_rank, dp_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    config = moe_config(
        calculate_per_token_loss=True,
        context_parallel_size=cp,
        finalize_model_grads_func=finalize_model_grads,
        moe_aux_loss_coeff=AUXILIARY,
        moe_z_loss_coeff=Z,
        num_attention_heads=2,
        sequence_parallel=tp > 1,
        tensor_model_parallel_size=tp,
    )
    ddp = wrap(_Routed(config), config, instances=1, bucket_size=None, overlap=False, distributed_optimizer=False)
    own = [_sequence(dp_rank, microbatch) for microbatch in range(MICROBATCHES)]
    if tp * cp > 1:
        own = [sequence.chunk(tp * cp)[rank] for sequence in own]
    counted = TOKENS if megatron.core.__version__.startswith("0.12.") else TOKENS // cp
    get_forward_backward_func()(
        forward_step_func=partial(_forward_step, tokens=counted),
        data_iterator=iter(own),
        model=ddp,
        num_microbatches=MICROBATCHES,
        seq_length=TOKENS,
        micro_batch_size=1,
        forward_only=False,
    )
    weight = ddp.module.router.weight
    plain = torch.nn.Linear(HIDDEN, weight.shape[0], bias=False)
    plain.weight.data.copy_(weight.data)
    sequences = [_sequence(peer, microbatch) for peer in range(dp_size) for microbatch in range(MICROBATCHES)]
    expected = reference_gradients(plain, [partial(_losses, sequence=sequence) for sequence in sequences])
    return compare(ddp, {"router.weight": expected["weight"]})


def judge(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if any rank's gradient differs from the one without parallelism."""
    if wrong := [rank for rank in evidence if rank["wrong"]]:
        ratio = wrong[0]["got"] / wrong[0]["expected"]
        return Judgement("defect", f"the router's gradient is {ratio:.3g} times the one without parallelism")
    return Judgement("clean", "the router's gradient is the one without parallelism")


PROOF = Proof(
    "MF0023",
    (
        Case("tensor parallelism", "gloo", 2, partial(_run, tp=2, cp=1), judge),
        Case("context parallelism", "gloo", 2, partial(_run, tp=1, cp=2), judge),
        Case("control", "gloo", 2, partial(_run, tp=1, cp=1), judge, control=True),
    ),
)
