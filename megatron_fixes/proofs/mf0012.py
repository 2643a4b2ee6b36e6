# SPDX-License-Identifier: Apache-2.0
"""Proof of MF0012: one DDP's choice of reduce-scatter becomes that of every DDP in the process.

Guards: beside a DDP that is built with ``reduce_scatter_with_fp32_accumulation``, an existing DDP without it and a new
one reduce their gradients, in their own way; the DDP that asked for it is right too, and gets what it asked for.

``beside`` (2 ranks, overlapped reduction): real DDPs on one module each, compared with plain autograd. Releases before
0.16 have no such option; there the same steps are run without it.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from megatron_fixes.proofs.controls import CONTROL
from megatron_fixes.proofs.ddp import (
    batch,
    compare,
    judge_gradients,
    mean_square,
    reference_gradients,
    transformer_config,
)
from megatron_fixes.proofs.proof import Case, Judgement, Proof

if TYPE_CHECKING:
    from collections.abc import Sequence

HIDDEN = 8
OPTION = "reduce_scatter_with_fp32_accumulation"


def _build(**options: bool) -> Any:
    torch.manual_seed(12)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=True, **options
    )
    return DistributedDataParallel(transformer_config(), ddp_config, torch.nn.Linear(HIDDEN, HIDDEN))


def _step(ddp: Any, rank: int, step: int) -> dict[str, Any]:
    ddp.zero_grad_buffer()
    with ddp.no_sync():
        mean_square(ddp, batch(rank, step, HIDDEN)).backward()
    # As the pipeline schedules do it, so that what is under way can be looked at.
    ddp.start_grad_sync()
    handles = {type(group.grad_reduce_handle).__name__ for group in ddp.bucket_groups}
    try:
        ddp.finish_grad_sync()
    except (AssertionError, RuntimeError, ValueError) as error:
        return {"handles": sorted(handles), "error": f"{type(error).__name__}: {error}"}
    peers = range(parallel_state.get_data_parallel_world_size())
    expected = reference_gradients(ddp.module, [partial(mean_square, data=batch(peer, step, HIDDEN)) for peer in peers])
    return {**compare(ddp, expected), "handles": sorted(handles)}


def _beside(rank: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel()
    known = {field.name for field in dataclasses.fields(DistributedDataParallelConfig)}
    existing = _build()
    steps = {"existing, before": _step(existing, rank, 0)}
    asking = _build(**({OPTION: True} if OPTION in known else {}))
    steps["existing"] = _step(existing, rank, 1)
    steps["new"] = _step(_build(), rank, 2)
    steps["asking"] = _step(asking, rank, 3)
    return {"option": OPTION in known, "steps": steps}


def judge_beside(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if any DDP's gradients are wrong on any rank, or the one that asks for FP32 sums doesn't get them."""
    for rank, e in enumerate(evidence):
        for name, report in e["steps"].items():
            fp32_sums = any("FP32" in handle for handle in report["handles"])
            if fp32_sums != (e["option"] and name == "asking"):
                return Judgement("defect", f"{name}, rank {rank}: reduced through {', '.join(report['handles'])}")
            if "error" in report:
                return Judgement("defect", f"{name}, rank {rank}: {report['error']}")
            if report["wrong"]:
                got = f"{report['got']:.4g}, expected {report['expected']:.4g}"
                return Judgement("defect", f"{name}, rank {rank}: {report['wrong']} elements wrong, such as {got}")
    return judge_gradients(evidence)


PROOF = Proof("MF0012", (Case("beside", "gloo", 2, _beside, judge_beside), CONTROL))
