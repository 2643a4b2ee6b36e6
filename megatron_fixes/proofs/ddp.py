# SPDX-License-Identifier: Apache-2.0
"""Real Megatron-LM DistributedDataParallel on small modules, and the comparison with an independent reference.

The reference is plain autograd in float64 over the data of *all* data-parallel ranks, computed on each rank by
itself: no process group, no Megatron code. What is compared is what the optimizer reads: the rank's own shard of
each gradient bucket, or the whole of it without a distributed optimizer.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig

from megatron_fixes.proofs.proof import Judgement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

# fp32 sums of a handful of terms against float64: far above rounding, far below any defect shown here.
RELATIVE_TOLERANCE = 1e-4


def transformer_config(**changes: Any) -> TransformerConfig:
    """The smallest config that DDP and the schedules accept; fp32."""
    return TransformerConfig(**{"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, **changes})


def wrap(
    module: torch.nn.Module,
    config: TransformerConfig,
    *,
    instances: int,
    bucket_size: int | None,
    overlap: bool = True,
    distributed_optimizer: bool = True,
    **options: bool,
) -> Any:
    """Real DDP.

    Args:
        module: Parameters fp32; kept and modified by DDP (parameters move into its buffer).
        config: As from ``transformer_config``.
        instances: Distributed-optimizer instances; the data-parallel size is a multiple of it.
        bucket_size: Elements after which a bucket closes; None for one bucket.
        overlap: Whether the gradient reduction overlaps the backward pass.
        distributed_optimizer: Gradients are reduce-scattered for one; else they are all-reduced.
        options: Other fields of the DDP config.
    """
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        use_distributed_optimizer=distributed_optimizer,
        num_distributed_optimizer_instances=instances,
        bucket_size=bucket_size,
        **options,
    )
    return DistributedDataParallel(config, ddp_config, module)


def batch(rank: int, step: int, hidden: int) -> torch.Tensor:
    """The data of a rank in a step: float32, (4, hidden), on the CPU; the same whoever asks."""
    return torch.randn(4, hidden, generator=torch.Generator().manual_seed(1000 * step + rank))


def mean_square(module: torch.nn.Module, data: torch.Tensor) -> torch.Tensor:
    """The mean square of a module's output, shape ``()``; ``data`` is taken to its device and dtype."""
    loss: torch.Tensor = module(data.to(next(module.parameters()))).square().mean()
    return loss


class Abandon(Exception):
    """Raised by ``Bomb`` in backward; the training loop catches it."""


class Bomb(torch.autograd.Function):
    """Identity whose backward raises ``Abandon`` while ``armed``."""

    armed = False

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        """Pass the value on; any dtype, shape and device."""
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Pass the gradient on, or raise."""
        if Bomb.armed:
            raise Abandon
        return gradients[0]


def backward(ddp: Any, loss: Callable[[torch.nn.Module], torch.Tensor], *, scheduled: bool) -> None:
    """Run one backward pass and have the gradients reduced, by the hooks or as the pipeline schedules do it.

    Args:
        ddp: As from ``wrap``.
        loss: Takes it and returns a scalar, shape ``()``.
        scheduled: The pass runs under ``no_sync``, and ``start_grad_sync`` comes after it.
    """
    if scheduled:
        with ddp.no_sync():
            loss(ddp).backward()
        ddp.start_grad_sync()
    else:
        loss(ddp).backward()


def reference_gradients(
    module: torch.nn.Module, losses: Iterable[Callable[[torch.nn.Module], torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Mean gradient over several losses by plain autograd in float64.

    Args:
        module: Read only; copied before DDP touches it or after, the values are the same.
        losses: Each takes the float64 copy and returns a float64 scalar, shape ``()``.

    Returns:
        Parameter name to gradient, float64, the parameter's shape, on the module's device.
    """
    plain = copy.deepcopy(module).double()
    for parameter in plain.parameters():
        parameter.grad = None
    total = 0
    for loss in losses:
        loss(plain).backward()
        total += 1
    return {name: torch.zeros_like(p) if p.grad is None else p.grad / total for name, p in plain.named_parameters()}


def compare(ddp: Any, expected: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Compare this rank's own shard of every gradient bucket with the reference.

    Args:
        ddp: As from ``wrap``, after ``finish_grad_sync``; its gradient buffers are read.
        expected: As from ``reference_gradients``, for the wrapped module's parameter names.

    Returns:
        ``wrong`` and ``elements`` (counts), and for the worst element ``got`` and ``expected`` (floats).
    """
    names = {parameter: name for name, parameter in ddp.module.named_parameters()}
    report: dict[str, Any] = {"wrong": 0, "elements": 0, "got": None, "expected": None}
    worst_error = -1.0
    for group in ddp.bucket_groups + ddp.expert_parallel_bucket_groups:
        shards, shard = 1, 0
        if ddp.ddp_config.use_distributed_optimizer:
            shards = group.intra_distributed_optimizer_instance_size
            shard = group.intra_distributed_optimizer_instance_rank
        for bucket in group.buckets:
            flat = bucket.grad_data.view(-1)
            want = torch.zeros_like(flat, dtype=torch.float64)
            used = torch.zeros_like(flat, dtype=torch.bool)
            for parameter in bucket.params_list:
                start = parameter.main_grad.storage_offset() - flat.storage_offset()
                end = start + parameter.numel()
                want[start:end] = expected[names[parameter]].reshape(-1)
                used[start:end] = True
            length = flat.numel() // shards
            own = slice(shard * length, (shard + 1) * length)
            got, want, used = flat[own].double(), want[own], used[own]
            error = ((got - want).abs() * used).nan_to_num(nan=torch.inf)
            allowed = RELATIVE_TOLERANCE * max(want.abs().max().item(), 1e-6)
            report["wrong"] += int((error > allowed).sum())
            report["elements"] += int(used.sum())
            if used.any() and error.max().item() > worst_error:
                at = int(error.argmax())
                worst_error = error.max().item()
                report["got"], report["expected"] = got[at].item(), want[at].item()
    return report


def _wrong_elements(evidence: Sequence[Mapping[str, Any]], step: str) -> tuple[int, int]:
    steps = [rank["steps"][step] for rank in evidence]
    return sum(s["wrong"] for s in steps), sum(s["elements"] for s in steps)


def judge_gradients(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if any step left a wrong element in any rank's shard.

    Args:
        evidence: From each rank, in order: ``steps``, name to a report of ``compare``, and ``stage`` if it has one.
    """
    counts = [_wrong_elements(evidence, step) for step in evidence[0]["steps"]]
    bad = [wrong for wrong, _ in counts if wrong]
    if not bad:
        return Judgement("clean", f"mean gradients right in {len(counts)} of {len(counts)} steps")
    stages = sorted({e["stage"] for e in evidence if "stage" in e and any(s["wrong"] for s in e["steps"].values())})
    where = f" on pipeline stage {' and '.join(map(str, stages))}" if stages else ""
    elements = f"{sum(bad)} of {sum(total for _, total in counts)} elements"
    return Judgement("defect", f"wrong mean gradients in {len(bad)} of {len(counts)} steps{where} ({elements})")
