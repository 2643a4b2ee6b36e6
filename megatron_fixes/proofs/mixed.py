# SPDX-License-Identifier: Apache-2.0
"""Real mixed-precision training of a dense and an expert layer on CPU, and what each step should have done.

The optimizer is the ``ChainedOptimizer`` that ``get_megatron_optimizer`` builds, plain or distributed, over a
``DistributedDataParallel`` module whose two layers stand side by side, so that either's gradient can overflow
without the other's. The reference is plain autograd in float64, computed on each rank by itself.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from megatron.core import fp8_utils, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron_fixes.proofs.ddp import reference_gradients, transformer_config

HIDDEN, BATCH, WINDOW = 16, 4, 3
SCALE = 2.0**12
# Gradients come out of fp16 (or bf16) arithmetic; the defect is a factor of two.
TOLERANCE = 0.03
LAYERS = ("dense", "expert")


@dataclass(frozen=True)
class Plan:
    """What a case trains with, and which layer overflows in which step.

    Attributes:
        overflows: For each step the layers whose gradient overflows.
        on_rank: The one rank where that happens.
        distributed: Distributed optimizer or not.
        expert_parallel: Expert-model-parallel size.
        hysteresis: Overflows before the scale is halved.
        constant: Constant loss scale instead of the dynamic one.
        dtype: Of the weights.
        layers: Those that the model has; with one, the chain has one optimizer.
    """

    overflows: tuple[tuple[str, ...], ...]
    on_rank: int = 0
    distributed: bool = False
    expert_parallel: int = 1
    hysteresis: int = 1
    constant: bool = False
    dtype: torch.dtype = torch.float16
    layers: tuple[str, ...] = LAYERS

    @property
    def name(self) -> str:
        """Says which of the two optimizers it is; part of the evidence's keys."""
        return "distributed optimizer" if self.distributed else "plain optimizer"


@cache
def quantize_nothing_without_transformer_engine() -> None:
    """Let a step of the distributed optimizer end where no parameter is fp8, in this process.

    A stand-in, in the 0.12 releases only: without TransformerEngine they refuse to quantize even an empty list of
    parameters, which later releases (and 0.12 with TransformerEngine) pass over. What is not empty is refused still.
    """
    quantize = getattr(fp8_utils, "_quantize_param_shard_impl", None)
    if quantize is None or fp8_utils.HAVE_TE:
        return

    def quantize_if_any(model_params: Any, *more: Any) -> None:
        if model_params:
            quantize(model_params, *more)

    fp8_utils._quantize_param_shard_impl = quantize_if_any


class _Model(torch.nn.Module):
    """A dense and an expert layer side by side: neither's gradient depends on the other."""

    def __init__(self, plan: Plan, ep_rank: int) -> None:
        super().__init__()
        for number, layer in enumerate(plan.layers):
            torch.manual_seed(100 * number + (ep_rank if layer == "expert" else 50))
            module = torch.nn.Linear(HIDDEN, HIDDEN, bias=False).to(plan.dtype)
            module.weight.allreduce = layer != "expert"  # type: ignore[assignment]
            self.add_module(layer, module)

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Loss, shape ``()``; inputs by layer, shape ``(batch, hidden)``, any float dtype."""
        losses = []
        for layer, module in self.named_children():
            output = module(inputs[layer].to(next(module.parameters())))
            losses.append(output.to(torch.promote_types(output.dtype, torch.float32)).square().mean())
        return torch.stack(losses).sum()


class Run:
    """One model with its optimizer on this rank, and the steps that it takes."""

    def __init__(self, plan: Plan, rank: int) -> None:
        quantize_nothing_without_transformer_engine()
        self.plan, self.rank = plan, rank
        self.step_number = 0
        ep_rank = parallel_state.get_expert_model_parallel_rank()
        config = transformer_config(fp16=plan.dtype == torch.float16, bf16=plan.dtype == torch.bfloat16)
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=plan.distributed
        )
        self.ddp: Any = DistributedDataParallel(config, ddp_config, _Model(plan, ep_rank))
        self.chain: Any = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                weight_decay=0.0,
                clip_grad=0.0,
                fp16=plan.dtype == torch.float16,
                bf16=plan.dtype == torch.bfloat16,
                params_dtype=plan.dtype,
                use_distributed_optimizer=plan.distributed,
                loss_scale=SCALE if plan.constant else None,
                initial_loss_scale=SCALE,
                min_loss_scale=1.0,
                loss_scale_window=WINDOW,
                hysteresis=plan.hysteresis,
            ),
            [self.ddp],
        )
        self.optimizers = list(self.chain.chained_optimizers)

    def _data(self, rank: int, step: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        data = {layer: torch.randn(BATCH, HIDDEN, generator=generator).half() for layer in LAYERS}
        if rank == self.plan.on_rank and step < len(self.plan.overflows):
            for layer in self.plan.overflows[step]:
                data[layer] *= 500
        return data

    def _reference(self) -> dict[str, torch.Tensor]:
        """What each layer's gradient should be in this step: float64, computed on this rank alone."""
        world = parallel_state.get_data_parallel_world_size()

        def loss(model: torch.nn.Module, peer: int) -> torch.Tensor:
            result: torch.Tensor = model(**self._data(peer, self.step_number))
            return result

        everyone = [partial(loss, peer=peer) for peer in range(world)]
        dense = reference_gradients(self.ddp.module, everyone)
        # Only the ranks that hold the same expert send it data here; the sum is still divided by all.
        same = parallel_state.get_expert_data_parallel_group()
        peers = torch.distributed.get_process_group_ranks(same)
        expert = reference_gradients(self.ddp.module, [everyone[peer] for peer in peers])
        return {
            layer: dense[f"{layer}.weight"] if layer == "dense" else expert[f"{layer}.weight"] * (len(peers) / world)
            for layer in self.plan.layers
        }

    def _own(self, optimizer: Any) -> tuple[Any, slice, Any]:
        """The optimizer's parameter, the elements of it that this rank owns, and their fp32 main parameter."""
        if self.plan.distributed:
            models, mains = optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups
        else:
            models, mains = optimizer.float16_groups, optimizer.fp32_from_float16_groups
        ((parameter,),) = [group for group in models if group]
        ((main,),) = [group for group in mains if group]
        own = slice(0, parameter.numel())
        if self.plan.distributed:
            owned = optimizer._get_model_param_range_map(parameter)["param"]
            own = slice(owned.start, owned.end)
        return parameter, own, main

    def compare(self, expected: dict[str, torch.Tensor]) -> dict[str, Any]:
        """For each layer: wrong elements, elements, and the factor by which the gradient is off (least squares)."""
        names = {module.weight: name for name, module in self.ddp.module.named_children()}
        report = {}
        for optimizer in self.optimizers:
            parameter, own, main = self._own(optimizer)
            layer = names[parameter]
            want, got = expected[layer].reshape(-1)[own], main.grad.reshape(-1).double()
            wrong = ~((got - want).abs() <= TOLERANCE * expected[layer].abs().max())
            factor = ((got * want).sum() / want.square().sum()).item()
            report[layer] = {"wrong": int(wrong.sum()), "elements": got.numel(), "factor": round(factor, 2)}
        return report

    def scalers(self) -> list[list[float]]:
        """Scale, growth count and hysteresis count of each optimizer's scaler; empty without scalers."""
        found = [optimizer.grad_scaler for optimizer in self.optimizers if optimizer.grad_scaler]
        return [[s.scale.item(), getattr(s, "_growth_tracker", 0), getattr(s, "_hysteresis_tracker", 0)] for s in found]

    def backward(self) -> None:
        """Forward and backward over this rank's data, loss scaled by the chain, gradients reduced."""
        self.ddp.zero_grad_buffer()
        self.chain.zero_grad()
        loss = self.ddp(**self._data(self.rank, self.step_number))
        self.chain.scale_loss(loss).backward()
        self.ddp.finish_grad_sync()

    def step(self, optimizer: Any = None) -> dict[str, Any]:
        """One training step by the chain (or by one of its optimizers alone), and what came of it."""
        expected = self._reference()
        before = {name: p.detach().clone() for name, p in self.ddp.module.named_parameters()}
        self.backward()
        success, norm, _ = (optimizer or self.chain).step()
        moved = [not torch.equal(before[name], p) for name, p in self.ddp.module.named_parameters()]
        report = {"taken": bool(success), "moved": moved, "scalers": self.scalers()}
        if success and optimizer is None:
            report["gradients"] = self.compare(expected)
            report["norm"] = float(norm)
            report["expected_squares"] = {layer: g.square().sum().item() for layer, g in expected.items()}
        self.step_number += 1
        return report

    def digest(self) -> str:
        """SHA-256 of this rank's weights, main weights and scales."""
        digest = hashlib.sha256(repr(self.scalers()).encode())
        for parameter in self.ddp.module.parameters():
            digest.update(parameter.detach().float().numpy().tobytes())
        for optimizer in self.optimizers:
            main = self._own(optimizer)[2]
            digest.update(main.detach().numpy().tobytes())
        return digest.hexdigest()
