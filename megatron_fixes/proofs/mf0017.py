# SPDX-License-Identifier: Apache-2.0
"""Proof of MF0017: with several distributed-optimizer instances the gradient norm counts every gradient several times.

Guards: the norm and the number of zeros that a step tells, and what clipping by that norm leaves of the gradients,
are those of the model's gradient, whatever the number of instances.

* ``statistics of a step`` (4 ranks, 2 instances of 2 shards each): real DistributedDataParallel over a float32 and a
  bfloat16 weight, and what ``get_megatron_optimizer`` builds; a step that clips, then one that must not.

The loss is linear in the weights with small whole numbers for coefficients, so that the gradient is exact in every
type; the reference is the mean of the coefficients over all ranks, in float64, without any process group.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron_fixes.proofs.ddp import RELATIVE_TOLERANCE, transformer_config, wrap
from megatron_fixes.proofs.mixed import quantize_nothing_without_transformer_engine
from megatron_fixes.proofs.proof import Case, Judgement, Proof

if TYPE_CHECKING:
    from collections.abc import Sequence

RANKS, INSTANCES, SIZE = 4, 2, 128
WEIGHTS = {"wide": torch.float32, "narrow": torch.bfloat16}
# Of the norm: well below it, and between it and the one that counts two instances.
CLIP_AT = {"clipped": 0.25, "not clipped": 1.2}


def _coefficients(rank: int) -> dict[str, torch.Tensor]:
    """By weight, float64 of shape (SIZE,), whole numbers from -4 to 4; every fourth is zero on all ranks."""
    generator = torch.Generator().manual_seed(rank)
    drawn = {name: torch.randint(-4, 5, (SIZE,), generator=generator).double() for name in WEIGHTS}
    for coefficients in drawn.values():
        coefficients[::4] = 0
    return drawn


def _gradient() -> torch.Tensor:
    """What all ranks together should have: the mean over their data, float64 of shape (weights * SIZE,)."""
    return torch.stack([torch.cat([*_coefficients(rank).values()]) for rank in range(RANKS)]).mean(0)


class _Model(torch.nn.Module):
    """One weight of each type."""

    def __init__(self) -> None:
        super().__init__()
        for name, dtype in WEIGHTS.items():
            self.register_parameter(name, torch.nn.Parameter(torch.ones(SIZE, dtype=dtype)))

    def forward(self, rank: int) -> torch.Tensor:
        """That rank's loss, shape ``()``."""
        terms = [(getattr(self, name) * c.to(WEIGHTS[name])).float().sum() for name, c in _coefficients(rank).items()]
        return torch.stack(terms).sum()


def _step(rank: int, clip: float) -> dict[str, Any]:
    """One training step, and what it told: norm, zeros, and the squares of this rank's gradients after clipping."""
    ddp = wrap(_Model(), transformer_config(bf16=True), instances=INSTANCES, bucket_size=None, overlap=False)
    optimizer: Any = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            clip_grad=clip,
            log_num_zeros_in_grad=True,
        ),
        [ddp],
    )
    ddp(rank).backward()
    ddp.finish_grad_sync()
    _, norm, zeros = optimizer.step()
    used = [parameter for one in optimizer.chained_optimizers for parameter in one.get_parameters()]
    squares = sum(parameter.grad.double().square().sum().item() for parameter in used)
    return {"norm": float(norm), "zeros": float(zeros), "squares": squares}


def _statistics(rank: int) -> dict[str, Any]:
    quantize_nothing_without_transformer_engine()
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=INSTANCES)
    gradient = _gradient()
    norm, zeros = gradient.norm().item(), int((gradient == 0).sum())
    steps = {}
    for name, share in CLIP_AT.items():
        left = min(share, 1.0) * norm
        expected = {"norm": norm, "zeros": zeros, "squares": left**2}
        steps[name] = {"got": _step(rank, share * norm), "expected": expected}
    return {"steps": steps}


def judge(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if a step told any rank another norm or number of zeros, or left other gradients, than it should.

    Args:
        evidence: From each rank, in order: ``steps``, by name, with ``norm``, ``zeros`` and ``squares`` as got (the
            squares of this rank's own shard) and as expected (those of the whole model).
    """
    wrong = {}
    for name, step in evidence[0]["steps"].items():
        expected = step["expected"]
        ranks = [rank["steps"][name]["got"] for rank in evidence]
        got = {key: [rank[key] for rank in ranks] for key in ("norm", "zeros")}
        # The shards of all instances: each instance has the whole gradient.
        got["left"] = [math.sqrt(sum(rank["squares"] for rank in ranks) / INSTANCES)]
        right = {"norm": expected["norm"], "zeros": expected["zeros"], "left": math.sqrt(expected["squares"])}
        for key, values in got.items():
            if not all(abs(value - right[key]) <= RELATIVE_TOLERANCE * right[key] for value in values):
                told = sorted({round(value, 4) for value in values})
                wrong[f"{name}, {key}"] = f"{' and '.join(map(str, told))} instead of {right[key]:.4f}"
    if wrong:
        return Judgement("defect", "; ".join(f"{name}: {what}" for name, what in wrong.items()))
    return Judgement("clean", f"norm, zeros and clipped gradients right in {len(evidence[0]['steps'])} steps")


PROOF = Proof("MF0017", (Case("statistics of a step", "gloo", RANKS, _statistics, judge),))
