# SPDX-License-Identifier: Apache-2.0
"""Proof of MF0013: the offloading optimizer updates a parameter without a gradient with that of an earlier step.

Guards: after every step of a ``HybridDeviceOptimizer`` each parameter is what plain ``torch.optim`` in float64 makes
of it; one that has no gradient in a step stays where it is, and goes on as before when it has one again.

The gradients come from autograd, over parameters that a step uses or not, as with experts or frozen parts.

* ``master on the device``: low-precision parameters with a float32 master beside them, nothing offloaded.
* ``copy on the CPU``: everything offloaded, one inner optimizer for all parameters or (overlapped) one for each.

A parameter of which the inner optimizer updates the very tensor can't be hit: its gradient is the model's own.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from megatron_fixes.proofs.host_memory import HostMemory
from megatron_fixes.proofs.proof import Case, Judgement, Proof

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZE = 4
# Which of the parameters each step uses.
USED = ("abc", "a", "ab", "ac", "ab", "bc", "c", "abc")
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.5, "weight_decay": 0.1}),
}
# One rounding to bfloat16, of a number that float32 and float64 may put on either side of a tie.
TOLERANCE = 2.0**-7


def _parameters(dtype: torch.dtype) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(13)
    return {name: torch.nn.Parameter(torch.randn(SIZE, generator=generator).to(dtype)) for name in "abc"}


def _backward(parameters: dict[str, Any], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    terms = []
    for name, parameter in parameters.items():
        # Exact in bfloat16, so that float64 sees the same gradient.
        factor = torch.randint(-8, 8, (SIZE,), generator=generator) / 4 + 0.125
        if name in USED[step]:
            terms.append((parameter * factor.to(parameter.dtype)).sum())
    sum(terms).backward()  # type: ignore[union-attr]


def _run(dtype: torch.dtype, optimizer: str, offload_fraction: float, overlap: bool) -> list[dict[str, Any]]:
    cls, options = OPTIMIZERS[optimizer]
    own, plain = _parameters(dtype), _parameters(dtype)
    plain = {name: torch.nn.Parameter(parameter.detach().double()) for name, parameter in plain.items()}
    reference = cls(list(plain.values()), **options)
    with HostMemory():
        hybrid = HybridDeviceOptimizer(
            list(own.values()),
            offload_fraction=offload_fraction,
            cpu_optimizer_cls=cls,
            gpu_optimizer_cls=cls,
            param_update_in_fp32=True,
            overlap_cpu_optimizer_d2h_h2d=overlap,
            **options,
        )
        steps = []
        for step, used in enumerate(USED):
            before = {name: parameter.detach().clone() for name, parameter in own.items()}
            for parameters, stepped in ((own, hybrid), (plain, reference)):
                stepped.zero_grad()
                _backward(parameters, step)
                stepped.step()
            wrong, moved = [], []
            for name, parameter in own.items():
                expected = plain[name].detach()
                error = (parameter.detach().double() - expected).abs()
                if not bool((error <= TOLERANCE * expected.abs().clamp(min=1)).all()):
                    wrong.append(name)
                if name not in used and not torch.equal(parameter.detach(), before[name]):
                    moved.append(name)
            steps.append({"wrong": wrong, "moved_without_gradient": moved})
    return steps


def _train(rank: int, *, dtypes: Sequence[torch.dtype], offload_fraction: float) -> dict[str, Any]:
    return {
        f"{dtype}, {optimizer}, {'overlapped' if overlap else 'in turn'}": _run(
            dtype, optimizer, offload_fraction, overlap
        )
        for dtype, optimizer, overlap in itertools.product(dtypes, OPTIMIZERS, (False, True))
    }


def judge(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if any step of any rank left a parameter where the reference doesn't, or moved one without a gradient.

    Args:
        evidence: From each rank, run to steps; each has the names ``wrong`` and ``moved_without_gradient``.
    """
    steps = [step for rank in evidence for run in rank.values() for step in run]
    bad = sum(bool(step["wrong"] or step["moved_without_gradient"]) for step in steps)
    if not bad:
        return Judgement("clean", f"all parameters right in {len(steps)} of {len(steps)} steps")
    moved = sum(bool(step["moved_without_gradient"]) for step in steps)
    return Judgement(
        "defect", f"wrong parameters in {bad} of {len(steps)} steps; in {moved} one moved that had no gradient"
    )


PROOF = Proof(
    "MF0013",
    (
        Case(
            "master on the device",
            "gloo",
            1,
            partial(_train, dtypes=(torch.bfloat16,), offload_fraction=0.0),
            judge,
        ),
        Case(
            "copy on the CPU",
            "gloo",
            1,
            partial(_train, dtypes=(torch.float32, torch.bfloat16), offload_fraction=1.0),
            judge,
        ),
    ),
)
