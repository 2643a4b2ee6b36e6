# SPDX-License-Identifier: Apache-2.0
"""Proof of MF0019: Megatron-FSDP reduces gradients in the order of a set, which is another one in each process.

Guards: after a backward pass, each of 2 ranks has its shard of the summed gradients, as plain autograd in float64 has
them, whatever the order in which a set of parameters comes.

A set of parameters is ordered by addresses in memory. Here each rank has an order of its own: sets that the FSDP
module makes come forwards on one rank and backwards on the other. What comes in that order are parameters that no
hook has handled when the backward pass ends, such as embeddings, whose input takes no gradient. All tables here have
one size, so reduce-scatters of different tables meet and mix them; with tables of different sizes NCCL can hang.

The FSDP wrapper is the real one, constructed as a whole: ``mcore_fsdp_adapter``, and ``custom_fsdp`` before 0.14. On
gloo it takes a mesh of CPU devices, and ``calculate_per_token_loss``, since gloo can't scale while it sums.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from torch.distributed import device_mesh
from torch.overrides import TorchFunctionMode

from megatron_fixes.proofs.ddp import RELATIVE_TOLERANCE, reference_gradients, transformer_config
from megatron_fixes.proofs.proof import Case, Judgement, Proof
from megatron_fixes.proofs.stages import CpuMesh

try:
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.distributed.fsdp.src.megatron_fsdp import megatron_fsdp as hooks
except ImportError:
    from megatron.core.distributed.custom_fsdp import fully_sharded_data_parallel as hooks

    mcore_fsdp_adapter = None

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CPU = torch.device("cpu")
RANKS, TABLES, ROWS, COLUMNS = 2, 3, 4, 8


class _Tables(torch.nn.Module):
    """Embeddings of one size, each with a part of its own in the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tables = torch.nn.ModuleList(torch.nn.Embedding(ROWS, COLUMNS) for _ in range(TABLES))
        self.last = torch.nn.Linear(COLUMNS, COLUMNS)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        parts = [number * table(index) for number, table in enumerate(self.tables, 1)]
        output: torch.Tensor = self.last(torch.stack(parts).sum(dim=0))
        return output


def _loss(module: torch.nn.Module, rank: int) -> torch.Tensor:
    return (rank + 1) * module(torch.tensor([rank, ROWS - 1])).square().mean()


class _Set(set[Any]):
    """A set of parameters in an order that it could have."""

    backwards = False

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=lambda item: item.at, reverse=self.backwards))


class _NumbersMeanCpu(TorchFunctionMode):
    """Maps a device that is given by number to ``cpu``, for code that makes "cuda:0" of ``current_device``."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return func(*args, **{**kwargs, "device": CPU} if isinstance(kwargs.get("device"), int) else kwargs)


def _wrapper() -> Any:
    """The release's own wrapper class, with sets of an order that we choose."""
    vars(hooks)["set"] = _Set
    if mcore_fsdp_adapter is None:
        return hooks.FullyShardedDataParallel
    vars(mcore_fsdp_adapter)["DeviceMesh"] = CpuMesh
    # 0.14 and 0.15 read this from PyTorch, which has it no longer; for a mesh that is nobody's child it was empty.
    vars(getattr(device_mesh, "_mesh_resources", CpuMesh())).setdefault("child_to_root_mapping", {})
    return mcore_fsdp_adapter.FullyShardedDataParallel


def _wrap(module: torch.nn.Module) -> Any:
    for at, parameter in enumerate(module.parameters()):
        vars(parameter)["at"] = at
    ddp_config = DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim_grads", overlap_grad_reduce=True, bucket_size=1
    )
    wrapper = _wrapper()
    device = {"device": CPU} if "device" in inspect.signature(wrapper).parameters else {}
    return wrapper(transformer_config(calculate_per_token_loss=True), ddp_config, module, **device)


def _run(rank: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel()
    _Set.backwards = rank == 1
    vars(torch.cuda)["current_device"] = lambda: 0
    with _NumbersMeanCpu():
        module = _Tables()
        names = {at: name for at, (name, _) in enumerate(module.named_parameters())}
        wrapped = _wrap(module)
        _loss(wrapped, rank).backward()
        wrapped.finish_grad_sync()
    expected = reference_gradients(_Tables(), [partial(_loss, rank=peer) for peer in range(RANKS)])
    wrong = []
    for group in wrapped.param_and_grad_buffer.parameter_groups:
        for item, parameter in enumerate(group.params):
            name = names[parameter.at]
            start, end = group.main_grad_buffer._get_item_slice_in_shard(item)
            # The reference is the mean; per-token losses are summed.
            want = RANKS * expected[name].reshape(-1)
            error = (group.main_grad_buffer.get_item(item).double() - want[start:end]).abs()
            if not bool((error <= RELATIVE_TOLERANCE * want.abs().max()).all()):
                wrong.append(name)
    return {"wrong": wrong, "parameters": len(names)}


def judge(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if any rank has a wrong gradient in its shard."""
    wrong = sorted({name for rank in evidence for name in rank["wrong"]})
    if wrong:
        return Judgement("defect", f"gradients of different parameters were summed: {', '.join(wrong)}")
    return Judgement("clean", f"summed gradients right for {evidence[0]['parameters']} parameters in both orders")


PROOF = Proof("MF0019", (Case("orders differ", "gloo", RANKS, _run, judge),))
