# SPDX-License-Identifier: Apache-2.0
"""Proof of MF0022: a rank without gradients can't take part in a norm other than the 2-norm, and its peers wait.

Guards: ``get_grad_norm_fp32`` gives every rank the norm of all gradients, also the rank that has none. The
reference is the vector norm of all ranks' gradients side by side, in float64, computed on each rank by itself.

* ``largest gradient``: the infinity norm. ``sum of gradients``: the 1-norm, for all finite ones but the 2-norm.

A rank that fails says so, and then joins the reduction that its peer waits in, so that the peer ends: what is a
hang outside is an error of one rank here.

What must stay as it is: the control has the 2-norm where a rank has no gradients, and all norms where each has some.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

from megatron_fixes.proofs.proof import Case, Judgement, Proof

if TYPE_CHECKING:
    from collections.abc import Sequence

# One sum of a handful of fp32 terms.
TOLERANCE = 1e-5
Gradients = tuple[list[list[float]], ...]
# By rank: the gradients that it owns.
ONE_RANK_HAS_NONE: Gradients = ([[3.0, -4.0], [1.0]], [])
EACH_HAS_SOME: Gradients = ([[3.0, -4.0], [1.0]], [[-6.0]])


def _norm(rank: int, gradients: Gradients, norm_type: float) -> dict[str, Any]:
    everything = torch.tensor([value for own in gradients for gradient in own for value in gradient]).double()
    report = {"expected": torch.linalg.vector_norm(everything, norm_type).item(), "got": None, "error": None}
    try:
        report["got"] = float(get_grad_norm_fp32([torch.tensor(gradient) for gradient in gradients[rank]], norm_type))
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        report["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
        operation = torch.distributed.ReduceOp.MAX if math.isinf(norm_type) else torch.distributed.ReduceOp.SUM
        torch.distributed.all_reduce(torch.zeros(1), op=operation)
    return report


def _run(rank: int, *, asked: Sequence[tuple[Gradients, float]]) -> dict[str, Any]:
    return {"norms": [_norm(rank, gradients, norm_type) for gradients, norm_type in asked]}


def judge(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if a rank failed or got another norm than that of all gradients.

    Args:
        evidence: From each rank, in order: ``norms``, each with what was ``expected``, ``got``, and an ``error``.
    """
    norms = [(rank, norm) for rank, report in enumerate(evidence) for norm in report["norms"]]
    for rank, norm in norms:
        if norm["error"]:
            return Judgement("defect", f"rank {rank} fails and its peers wait: {norm['error']}")
    wrong = [norm for _, norm in norms if not abs(norm["got"] - norm["expected"]) <= TOLERANCE * norm["expected"]]
    if wrong:
        return Judgement("defect", f"norm {wrong[0]['got']:g}, expected {wrong[0]['expected']:g}")
    return Judgement("clean", f"{len(norms)} of {len(norms)} norms right")


RIGHT = [(ONE_RANK_HAS_NONE, 2.0), (EACH_HAS_SOME, math.inf), (EACH_HAS_SOME, 1.0), (EACH_HAS_SOME, 2.0)]

PROOF = Proof(
    "MF0022",
    (
        Case("largest gradient", "gloo", 2, partial(_run, asked=[(ONE_RANK_HAS_NONE, math.inf)]), judge),
        Case("sum of gradients", "gloo", 2, partial(_run, asked=[(ONE_RANK_HAS_NONE, 1.0)]), judge),
        Case("control", "gloo", 2, partial(_run, asked=RIGHT), judge, control=True),
    ),
)
