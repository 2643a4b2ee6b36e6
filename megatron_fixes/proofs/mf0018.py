# SPDX-License-Identifier: Apache-2.0
"""Proof of MF0018: a micro-batch without a single valid token makes every gradient NaN.

Guards: with a loss function that returns a sum, its number of tokens and what to report, the gradients of a batch are
those of the mean over micro-batches of the mean over tokens, and a micro-batch without tokens adds nothing to them.
With ``calculate_per_token_loss`` nothing is divided.

* ``batch`` (1 rank): through the real schedule without pipelining, three micro-batches of which one, none or each has
  no token that counts; each batch with the loss divided by the schedule, and summed.

The reference is plain autograd in float64. Every schedule divides in the one function that this one goes through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_fixes.proofs.ddp import RELATIVE_TOLERANCE, transformer_config
from megatron_fixes.proofs.proof import Case, Judgement, Proof

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

HIDDEN, TOKENS = 8, 4
# How many tokens of each micro-batch count.
BATCHES = {"one without tokens": (3, 0, 1), "all with tokens": (4, 2, 1), "none with tokens": (0, 0, 0)}


def _data(microbatch: int, counting: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, float32 of shape (TOKENS, HIDDEN), and the mask of those that count, shape (TOKENS,)."""
    tokens = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(microbatch))
    return tokens, (torch.arange(TOKENS) < counting).float()


def _model() -> torch.nn.Linear:
    torch.manual_seed(1)
    return torch.nn.Linear(HIDDEN, HIDDEN)


def _losses(output: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return (output.square().mean(-1) * mask).sum()


def _forward_step(data: Iterator[tuple[torch.Tensor, torch.Tensor]], model: torch.nn.Module) -> tuple[Any, Any]:
    tokens, mask = next(data)

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        value = _losses(output, mask)
        return value, mask.sum().int(), {"loss": value.detach().clone()}

    return model(tokens), loss


def _trained(counts: Sequence[int], *, per_token: bool) -> torch.nn.Module:
    """A model with the gradients that the schedule leaves."""
    model: Any = _model()
    model.config = transformer_config(hidden_size=HIDDEN, calculate_per_token_loss=per_token)
    model.model_type = ModelType.encoder_or_decoder
    model.set_input_tensor = lambda _: None
    get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=iter([_data(microbatch, counting) for microbatch, counting in enumerate(counts)]),
        model=[model],
        num_microbatches=len(counts),
        seq_length=TOKENS,
        micro_batch_size=1,
        forward_only=False,
    )
    return model  # type: ignore[no-any-return]


def _reference(counts: Sequence[int], *, per_token: bool) -> torch.nn.Module:
    plain = _model().double()
    for microbatch, counting in enumerate(counts):
        tokens, mask = _data(microbatch, counting)
        total = _losses(plain(tokens.double()), mask.double())
        (total if per_token else total / max(counting, 1) / len(counts)).backward()
    return plain


def _batch(rank: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel()
    steps = {}
    for per_token in (False, True):
        for name, counts in BATCHES.items():
            trained, plain = _trained(counts, per_token=per_token), _reference(counts, per_token=per_token)
            wrong = nan = elements = 0
            for parameter, expected in zip(trained.parameters(), plain.parameters(), strict=True):
                assert parameter.grad is not None and expected.grad is not None
                allowed = RELATIVE_TOLERANCE * expected.grad.abs().max()
                wrong += int((~((parameter.grad - expected.grad).abs() <= allowed)).sum())
                nan += int(parameter.grad.isnan().sum())
                elements += parameter.numel()
            steps[f"{name}{', summed' if per_token else ''}"] = {"wrong": wrong, "nan": nan, "elements": elements}
    return {"steps": steps}


def judge(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if an element of a gradient is not the reference's.

    Args:
        evidence: From each rank, in order: ``steps``, name to counts of elements.
    """
    steps = [(name, step) for rank in evidence for name, step in rank["steps"].items()]
    if not (bad := [(name, step) for name, step in steps if step["wrong"]]):
        return Judgement("clean", f"right gradients in {len(steps)} of {len(steps)} batches")
    wrong, nan, elements = (sum(step[key] for _, step in bad) for key in ("wrong", "nan", "elements"))
    where = "; ".join(name for name, _ in bad)
    return Judgement("defect", f"wrong gradients: {where} ({wrong} of {elements} elements, {nan} of them NaN)")


PROOF = Proof("MF0018", (Case("batch", "gloo", 1, _batch, judge),))
