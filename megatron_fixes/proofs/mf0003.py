# SPDX-License-Identifier: Apache-2.0
"""Proof of MF0003: with several distributed-optimizer instances, a bucket group is reduced twice.

Guards: after one training step each rank's gradient shard equals the mean gradient over all data-parallel
ranks.

* ``ddp``: DDP alone, 4 ranks as 2 instances x 2 shards, dispatched as the pipeline schedules do it (backward
  under ``no_sync``, then ``start_grad_sync``), in five situations a step can start from.
* ``pipeline``: the real 1F1B schedule with the real ``finalize_model_grads``, 8 ranks as 2 stages x 4
  data-parallel.
* ``interleaved``: the same under the interleaved schedule, two model chunks a stage.

Shard size 1 hides the defect (averaging an average again changes nothing), hence 2 shards.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_fixes.proofs.controls import CONTROL
from megatron_fixes.proofs.ddp import (
    compare,
    judge_gradients,
    mean_square,
    reference_gradients,
    transformer_config,
    wrap,
)
from megatron_fixes.proofs.proof import Case, Proof

if TYPE_CHECKING:
    from collections.abc import Iterator

HIDDEN, BATCH, MICROBATCHES, STAGES = 8, 2, 4, 2
DDP_STEPS = ("first", "next", "after an abandoned step", "buffers zeroed by hand", "zeroed by hand again")


def _layer(number: int) -> torch.nn.Linear:
    torch.manual_seed(100 + number)
    return torch.nn.Linear(HIDDEN, HIDDEN)


def _data(dp_rank: int, microbatch: int = 0, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * dp_rank + microbatch)
    return torch.randn(BATCH, 1, HIDDEN, generator=generator)


def _ddp_alone(rank: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    ranks = parallel_state.get_data_parallel_world_size()
    ddp = wrap(_layer(0), transformer_config(), instances=2, bucket_size=None)

    def backward(step: int) -> None:
        with ddp.no_sync():
            mean_square(ddp, _data(rank, step=step)).backward()
        ddp.start_grad_sync()

    steps = {}
    for number, name in enumerate(DDP_STEPS):
        if "zeroed by hand" in name:
            for buffer in ddp.buffers:
                buffer.reset()
        elif name != "first":
            ddp.zero_grad_buffer()
        if name == "after an abandoned step":
            backward(step=100)
            ddp.zero_grad_buffer()
        backward(number)
        ddp.finish_grad_sync()
        losses = [partial(mean_square, data=_data(peer, step=number)) for peer in range(ranks)]
        steps[name] = compare(ddp, reference_gradients(ddp.module, losses))
    return {"steps": steps}


class _Chunk(torch.nn.Module):
    """One model chunk with what the schedules and ``finalize_model_grads`` ask of a model."""

    model_type = ModelType.encoder_or_decoder
    share_embeddings_and_output_weights = False

    def __init__(self, layer: int, layers: int, vp_stage: int | None) -> None:
        super().__init__()
        self.pre_process = layer == 0
        self.post_process = layer == layers - 1
        self.vp_stage = vp_stage
        self.layer = _layer(layer)
        self.input_tensor: torch.Tensor | None = None

    def set_input_tensor(self, tensor: Any) -> None:
        self.input_tensor = tensor[0] if isinstance(tensor, list) else tensor

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        value = data if self.pre_process else self.input_tensor
        assert value is not None
        output: torch.Tensor = self.layer(value)
        return output


def _forward_step(data: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value = output.square().mean()
        return value, {"loss": value.detach()}

    return model(next(data)), loss


def _pipeline(rank: int, *, chunks: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=STAGES,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        num_distributed_optimizer_instances=2,
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    dp_rank, dp_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    layers = STAGES * chunks
    config = transformer_config(
        num_layers=layers,
        hidden_size=HIDDEN,
        pipeline_dtype=torch.float32,
        pipeline_model_parallel_size=STAGES,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        # With two stages the next rank is the previous one too; batched sends would then cross (Megatron-LM's own
        # argument check asks for overlap or more than two stages).
        overlap_p2p_comm=chunks > 1,
        batch_p2p_comm=chunks == 1,
    )
    own_layers = [chunk * STAGES + stage for chunk in range(chunks)]
    model = [
        wrap(_Chunk(layer, layers, chunk if chunks > 1 else None), config, instances=2, bucket_size=None)
        for chunk, layer in enumerate(own_layers)
    ]
    no_syncs, grad_syncs = [ddp.no_sync for ddp in model], [ddp.start_grad_sync for ddp in model]
    config.no_sync_func = no_syncs if chunks > 1 else no_syncs[0]
    config.grad_sync_func = grad_syncs if chunks > 1 else grad_syncs[0]
    config.finalize_model_grads_func = finalize_model_grads
    steps = {}
    for step in range(2):
        for ddp in model:
            ddp.zero_grad_buffer()
        data = [_data(dp_rank, microbatch, step) for microbatch in range(MICROBATCHES)]
        get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=[iter(data) for _ in model] if chunks > 1 else iter(data),
            model=model,
            num_microbatches=MICROBATCHES,
            seq_length=BATCH,
            micro_batch_size=1,
            forward_only=False,
        )
        whole = torch.nn.Sequential(*(_layer(number) for number in range(layers)))
        losses = [
            partial(mean_square, data=_data(peer, microbatch, step))
            for peer in range(dp_size)
            for microbatch in range(MICROBATCHES)
        ]
        expected = reference_gradients(whole, losses)
        for ddp, layer in zip(model, own_layers, strict=True):
            own = {f"layer.{kind}": expected[f"{layer}.{kind}"] for kind in ("weight", "bias")}
            steps[f"step {step}" if chunks == 1 else f"step {step} chunk {model.index(ddp)}"] = compare(ddp, own)
    return {"stage": stage, "steps": steps}


PROOF = Proof(
    "MF0003",
    (
        Case("ddp", "gloo", 4, _ddp_alone, judge_gradients),
        Case("pipeline", "gloo", 8, partial(_pipeline, chunks=1), judge_gradients),
        Case("interleaved", "gloo", 8, partial(_pipeline, chunks=2), judge_gradients),
        CONTROL,
    ),
)
