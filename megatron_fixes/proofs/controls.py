# SPDX-License-Identifier: Apache-2.0
"""What must stay right: gradients in the configurations that no fix is about.

A control runs with every proof that touches gradient reduction and must be clean on the release as published,
patched and overlaid. It goes through one and two distributed-optimizer instances, with and without overlap,
three steps each (the first calibrates the hooks), dispatched by hooks and as the pipeline schedules do it, the
buffers zeroed by ``zero_grad_buffer`` and, without overlap, by hand.

Left out, since releases as published are wrong or refuse there: dispatch by the schedules with several
instances (that is MF0003), and zeroing by hand with overlap (from 0.18 on a reduction counts as finished until
``reset``).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state

from megatron_fixes.proofs.ddp import (
    backward,
    batch,
    compare,
    judge_gradients,
    mean_square,
    reference_gradients,
    transformer_config,
    wrap,
)
from megatron_fixes.proofs.proof import Case

if TYPE_CHECKING:
    from collections.abc import Iterator

HIDDEN, STEPS = 8, 3


def _model() -> torch.nn.Sequential:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN))


def _situations(instances: int) -> Iterator[tuple[bool, str, str]]:
    for overlap in (True, False):
        for dispatch in ("hooks", "schedule"):
            for zeroing in ("zero_grad_buffer", "by hand"):
                if not (dispatch == "schedule" and (instances > 1 or not overlap)) and not (
                    zeroing == "by hand" and overlap
                ):
                    yield overlap, dispatch, zeroing


def _zero(ddp: Any, zeroing: str) -> None:
    if zeroing == "by hand":
        for buffer in ddp.buffers:
            buffer.reset()
    else:
        ddp.zero_grad_buffer()


def _step(ddp: Any, dispatch: str, data: torch.Tensor) -> None:
    backward(ddp, partial(mean_square, data=data), scheduled=dispatch == "schedule")
    ddp.finish_grad_sync()


def _run(rank: int) -> dict[str, Any]:
    steps = {}
    for instances in (1, 2):
        parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
        peers = range(parallel_state.get_data_parallel_world_size())
        for overlap, dispatch, zeroing in _situations(instances):
            ddp = wrap(_model(), transformer_config(), instances=instances, bucket_size=1, overlap=overlap)
            for step in range(STEPS):
                _zero(ddp, zeroing)
                _step(ddp, dispatch, batch(rank, step, HIDDEN))
                losses = [partial(mean_square, data=batch(peer, step, HIDDEN)) for peer in peers]
                name = f"{instances} instances, overlap {overlap}, {dispatch}, {zeroing}, step {step}"
                steps[name] = compare(ddp, reference_gradients(ddp.module, losses))
        parallel_state.destroy_model_parallel()
    return {"steps": steps}


CONTROL = Case("control", "gloo", 4, _run, judge_gradients, control=True)
