# SPDX-License-Identifier: Apache-2.0
"""Proof of MF0015: the all-reduce of a tensor that is not contiguous is lost.

Guards: what ``reduce_from_tensor_model_parallel_region`` returns, and the gradient that
``copy_to_tensor_model_parallel_region`` passes back, is the sum over the tensor-parallel ranks, however the tensor
lies in memory; a contiguous one is still reduced in place, without a copy.

* ``regions`` (2 ranks): both through autograd, for tensors that are contiguous, transposed, expanded, and sliced.

The sum is worked out on each rank by itself from the whole numbers that every rank is given, so it is exact. The other
regions of ``mappings.py`` make their inputs contiguous or return what they communicated, on every release.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import mappings

from megatron_fixes.proofs.proof import Case, Judgement, Proof

if TYPE_CHECKING:
    from collections.abc import Sequence

RANKS, ROWS, COLUMNS = 2, 3, 4
LAYOUTS = ("contiguous", "transposed", "expanded", "sliced")


def _tensor(layout: str, rank: int) -> torch.Tensor:
    """A rank's float32 tensor of shape (ROWS, COLUMNS) in some layout, with small whole numbers."""
    shape = {"transposed": (COLUMNS, ROWS), "expanded": (ROWS, 1), "sliced": (ROWS, 2 * COLUMNS)}
    stored = torch.randint(-99, 99, shape.get(layout, (ROWS, COLUMNS)), generator=torch.Generator().manual_seed(rank))
    stored = stored.float()
    if layout == "transposed":
        return stored.t()
    return stored[:, ::2] if layout == "sliced" else stored.expand(ROWS, COLUMNS)


def _forward(tensor: torch.Tensor) -> torch.Tensor:
    reduced: torch.Tensor = mappings.reduce_from_tensor_model_parallel_region(tensor)
    return reduced


def _backward(gradient: torch.Tensor) -> torch.Tensor:
    leaf = torch.zeros(ROWS, COLUMNS, requires_grad=True)
    output = mappings.copy_to_tensor_model_parallel_region(leaf)
    (reduced,) = torch.autograd.grad(output, leaf, gradient)
    return reduced


def _regions(rank: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=RANKS)
    reports = {}
    for layout in LAYOUTS:
        expected = sum(_tensor(layout, peer) for peer in range(RANKS))
        for name, region in (("forward", _forward), ("backward", _backward)):
            tensor = _tensor(layout, rank)
            got = region(tensor)
            reports[f"{name}, {layout}"] = {
                "wrong": int((got != expected).sum()),
                "elements": tensor.numel(),
                "copied": layout == "contiguous" and got.data_ptr() != tensor.data_ptr(),
            }
    return {"reports": reports}


def judge(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if an element of any rank's result is not the sum, or if a contiguous tensor was copied.

    Args:
        evidence: From each rank, in order: ``reports``, by direction and layout.
    """
    names = list(evidence[0]["reports"])
    reports = [[rank["reports"][name] for rank in evidence] for name in names]
    if wrong := [name for name, ranks in zip(names, reports, strict=True) if any(r["wrong"] for r in ranks)]:
        elements = sum(report["wrong"] for ranks in reports for report in ranks)
        of = sum(report["elements"] for ranks in reports for report in ranks)
        return Judgement("defect", f"not the sum over the ranks: {'; '.join(wrong)} ({elements} of {of} elements)")
    if any(report["copied"] for ranks in reports for report in ranks):
        return Judgement("defect", "a contiguous tensor was not reduced in place")
    return Judgement("clean", f"the sum over the ranks in {len(names)} of {len(names)} reductions")


PROOF = Proof("MF0015", (Case("regions", "gloo", RANKS, _regions, judge),))
