# SPDX-License-Identifier: Apache-2.0
"""Proof of MF0004: what the first batch taught is held against every later one.

Guards: batches of any number of backward passes either end with right gradients or are refused by an error before
the optimizer can use them; a batch that is like one that went well is never refused, and its reduction overlaps the
backward pass.

Each case has sequences of batches through one DDP, with one bucket and with one for each parameter:

* ``first-batch``: the first batch is abandoned in its first or second pass, or leaves a parameter unused. Also a batch
  over buffers that were not zeroed, which with several instances no release refuses. All of them also with FP32
  sums, where from 0.18 on a bucket's reduction is finished as soon as the next one's is dispatched.
* ``unused-on-one-rank``: one rank leaves a parameter unused in the first batch, the one whose hook fires first or the
  one whose hook fires last; with one and two distributed-optimizer instances. Collectives must pair with those of its
  peers in that batch and in those that follow, and in the third one hooks must dispatch them.
* ``unused-on-one-rank-in-one-bucket``: the same with one bucket, which the other rank has counted; then two passes.
* ``unused-after-recount``: after a batch that was refused, one rank leaves a parameter unused. It must end in an error.
* ``fewer-passes``: two passes, then one; with one and two distributed-optimizer instances.
* ``fewer-on-one-rank``: one rank runs out of data. Its collectives must pair with those of its peers, whose hooks
  dispatch in an order that is not that of the buckets.
* ``fewer-when-partly-counted``: the same, while a bucket is not counted yet since the other rank leaves it unused.
* ``more-passes``: two passes, then three; the same. Refused is enough here: when the third gradient comes, the
  reduction of the first two is under way. Then three passes again.
* ``dispatched-twice``: two passes that each end with ``DDP.start_grad_sync``, as a pipeline schedule that is called
  twice a batch does it.

Releases that take one pass a batch only (before 0.16) refuse more from the first batch on; that is not this defect.
They don't count, so a batch that leaves a parameter unused on one rank can't change later ones, and is left out there.
After a batch that was refused or abandoned, reductions under way are waited for here (see MF0002).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig

from megatron_fixes.proofs.controls import CONTROL
from megatron_fixes.proofs.ddp import (
    Abandon,
    Bomb,
    backward,
    compare,
    reference_gradients,
    transformer_config,
    wrap,
)
from megatron_fixes.proofs.proof import Case, Judgement, Proof

if TYPE_CHECKING:
    from collections.abc import Sequence

HIDDEN = 8
EACH, ONE_BUCKET = "a bucket each parameter", "one bucket"
BUCKETS: dict[str, dict[str, Any]] = {
    EACH: {"bucket_size": 1},
    ONE_BUCKET: {"bucket_size": None},
    "FP32 sums": {"bucket_size": 1, "reduce_scatter_with_fp32_accumulation": True},
}


@dataclass(frozen=True)
class Batch:
    """One optimizer step's worth of backward passes.

    Attributes:
        passes: Forward-backward passes, each with gradient synchronisation on.
        abandoned: Left by an exception in the middle of the last pass.
        unused: The layer that takes no part in it, if any.
        unused_rank: The rank on which it takes no part; None for all of them.
        dispatched: Each pass runs under ``no_sync`` and ends with ``start_grad_sync``.
        short_rank: A rank that runs one pass less than the others.
        diagnostic: A backward pass under ``no_sync`` follows when it is finished; its gradients are thrown away.
        unzeroed: The gradients of the batch before, reduced already, are still in the buffers.
        refusable: An error is as good as right gradients.
        overlaps: The reduction must be under way before ``finish_grad_sync``.
    """

    passes: int = 1
    abandoned: bool = False
    unused: str = ""
    unused_rank: int | None = None
    dispatched: bool = False
    short_rank: int | None = None
    diagnostic: bool = False
    unzeroed: bool = False
    refusable: bool = False
    overlaps: bool = False

    def passes_of(self, rank: int) -> int:
        """How many passes a rank runs."""
        return self.passes - (rank == self.short_rank)

    def unused_of(self, rank: int) -> str:
        """The layer that a rank leaves unused, if any."""
        return self.unused if self.unused_rank in (None, rank) else ""


Sequences = dict[str, tuple[Batch, ...]]

ONE, TWO, THREE = Batch(1), Batch(2), Batch(3)
FIRST_BATCH: Sequences = {
    "not zeroed": (TWO, ONE, Batch(1, unzeroed=True, refusable=True)),
    "abandoned": (Batch(1, abandoned=True), ONE, Batch(1, overlaps=True)),
    "abandoned in the second pass": (Batch(2, abandoned=True), TWO, Batch(2, overlaps=True)),
    "a parameter unused": (Batch(1, unused="first", refusable=True), ONE, Batch(1, overlaps=True)),
}
UNUSED_ON_ONE_RANK: Sequences = {
    f"{name} unused": (Batch(1, unused=name, unused_rank=1), ONE, Batch(1, overlaps=True)) for name in ("last", "first")
}
UNUSED_IN_ONE_BUCKET: Sequences = {
    "last unused": (Batch(1, unused="last", unused_rank=1), TWO, Batch(2, overlaps=True)),
}
UNUSED_AFTER_RECOUNT: Sequences = {
    "first unused": (ONE, Batch(2, refusable=True), Batch(1, unused="first", unused_rank=1, refusable=True)),
}
FEWER_PASSES: Sequences = {
    "fewer": (TWO, Batch(2, overlaps=True), ONE, Batch(2, overlaps=True)),
    "a diagnostic pass after each": (*[Batch(2, diagnostic=True)] * 2, Batch(1, diagnostic=True), TWO),
}
FEWER_ON_ONE_RANK: Sequences = {"fewer on one rank": (TWO, Batch(2, overlaps=True), Batch(2, short_rank=1))}
FEWER_WHEN_PARTLY_COUNTED: Sequences = {
    "fewer on one rank, first unused on the other": (
        Batch(2, unused="first", unused_rank=0),
        Batch(2, unused="first", unused_rank=0, short_rank=1),
        ONE,
    ),
}
MORE_PASSES: Sequences = {
    "more": (TWO, Batch(2, overlaps=True), Batch(3, refusable=True), THREE, Batch(3, overlaps=True), TWO),
}
DISPATCHED_TWICE: Sequences = {"twice": (Batch(2, dispatched=True, refusable=True),)}


class _Model(torch.nn.Module):
    """Three layers with the bomb after the first; they are not used in the order in which they are registered."""

    ORDER = ("first", "middle", "last")

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.middle, self.last, self.first = (torch.nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))

    def forward(self, data: torch.Tensor, unused: str) -> torch.Tensor:
        for name in self.ORDER:
            if name != unused:
                data = getattr(self, name)(data)
            if name == "first":
                data = Bomb.apply(data)
        return data


def _data(rank: int, number: int, part: int) -> torch.Tensor:
    return torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(10_000 * number + 100 * part + rank))


def _loss(module: torch.nn.Module, data: torch.Tensor, unused: str) -> torch.Tensor:
    loss: torch.Tensor = module(data.to(next(module.parameters())), unused).square().mean()
    return loss


def _passes(ddp: Any, rank: int, number: int, batch: Batch) -> None:
    for part in range(batch.passes_of(rank)):
        Bomb.armed = batch.abandoned and part == batch.passes - 1
        loss = partial(_loss, data=_data(rank, number, part), unused=batch.unused_of(rank))
        backward(ddp, loss, scheduled=batch.dispatched)


def _expected(ddp: Any, number: int, batch: Batch) -> dict[str, torch.Tensor]:
    """The sum over passes, averaged over ranks."""
    peers = range(parallel_state.get_data_parallel_world_size())
    passes = [
        (_data(peer, number, part), batch.unused_of(peer)) for peer in peers for part in range(batch.passes_of(peer))
    ]

    def loss(module: torch.nn.Module) -> torch.Tensor:
        return torch.stack([_loss(module, *each) for each in passes]).sum() / len(peers)

    return reference_gradients(ddp.module, [loss])


def _drain(ddp: Any) -> None:
    for group in ddp.bucket_groups:
        if group.grad_reduce_handle is not None:
            # A peer that refused the batch may be gone.
            with suppress(RuntimeError):
                group.grad_reduce_handle.wait()
            group.grad_reduce_handle = None


def _dispatched(group: Any) -> bool:
    return group.grad_reduce_handle is not None or getattr(group, "grad_reduce_finished", False)


def _batch(ddp: Any, rank: int, number: int, batch: Batch) -> dict[str, Any]:
    """Run one batch; report a comparison, or the error that refused it."""
    if batch.unused_rank is not None and not hasattr(ddp.bucket_groups[0], "is_first_batch"):
        return {"left_out": "nothing is counted"}
    try:
        if not batch.unzeroed:
            ddp.zero_grad_buffer()
        _passes(ddp, rank, number, batch)
        # With several instances there is no handle to tell by.
        handles = ddp.ddp_config.num_distributed_optimizer_instances == 1
        under_way = not handles or all(map(_dispatched, ddp.bucket_groups))
        ddp.finish_grad_sync()
    except Abandon:
        _drain(ddp)
        return {}
    except (AssertionError, RuntimeError) as error:
        _drain(ddp)
        return {"refused": f"{type(error).__name__}: {error}"}
    finally:
        Bomb.armed = False

    report = {**compare(ddp, _expected(ddp, number, batch)), "under_way": under_way}
    if batch.diagnostic:
        with ddp.no_sync():
            _loss(ddp, _data(rank, number, batch.passes), batch.unused_of(rank)).backward()
    return report


def _run(rank: int, *, sequences: Sequences, instances: Sequence[int], buckets: Sequence[str]) -> dict[str, Any]:
    reports: dict[str, Any] = {name: {} for name in sequences}
    known = {field.name for field in fields(DistributedDataParallelConfig)}
    for count in instances:
        parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=count)
        # FP32 sums come last: one DDP with them takes all others along (see MF0012).
        for setup in buckets:
            options = {name: value for name, value in BUCKETS[setup].items() if name in known}
            for name, batches in sequences.items():
                ddp = wrap(_Model(), transformer_config(), instances=count, **options)
                reports[name][f"{count} instances, {setup}"] = [
                    _batch(ddp, rank, number, batch) for number, batch in enumerate(batches)
                ]
        parallel_state.destroy_model_parallel()
    return reports


def _fault(batch: Batch, report: dict[str, Any], *, one_pass_only: bool) -> str | None:
    """What is wrong with how a batch ended, if anything."""
    if batch.abandoned or "left_out" in report:
        return None
    if "refused" in report:
        allowed = batch.refusable or (one_pass_only and batch.passes > 1)
        return None if allowed else f"refused by {report['refused']}"
    if report["wrong"]:
        return f"{report['wrong']} of {report['elements']} elements wrong, no error"
    return "reduced at its end only" if batch.overlaps and not report["under_way"] else None


def judge_batches(evidence: Sequence[dict[str, dict[str, Any]]], *, sequences: Sequences) -> Judgement:
    """Defect if a batch of any sequence ended otherwise than its ``Batch`` allows, in any set-up, on any rank."""
    ended = [
        (name, setup, rank, reports)
        for rank, e in enumerate(evidence)
        for name, setups in e.items()
        for setup, reports in setups.items()
    ]
    refused = 0
    for name, setup, rank, reports in ended:
        one_pass_only = bool({"refused", "left_out"} & reports[0].keys()) and not sequences[name][0].refusable
        for number, (batch, report) in enumerate(zip(sequences[name], reports, strict=True)):
            if fault := _fault(batch, report, one_pass_only=one_pass_only):
                place = f"{name}, {setup}: batch {number + 1} of {len(reports)} on rank {rank}"
                return Judgement("defect", f"{place}: {fault}")
            refused += "refused" in report
    batches = sum("left_out" not in report for *_, reports in ended for report in reports)
    return Judgement("clean", f"{batches} batches, {refused} of them refused by an error that is due, none wrong")


def _case(
    name: str,
    sequences: Sequences,
    ranks: int,
    instances: Sequence[int] = (1,),
    buckets: Sequence[str] = (EACH, ONE_BUCKET),
) -> Case:
    run = partial(_run, sequences=sequences, instances=instances, buckets=buckets)
    return Case(name, "gloo", ranks, run, partial(judge_batches, sequences=sequences))


PROOF = Proof(
    "MF0004",
    (
        _case("first-batch", FIRST_BATCH, 2, buckets=tuple(BUCKETS)),
        _case("unused-on-one-rank", UNUSED_ON_ONE_RANK, 4, instances=(1, 2), buckets=(EACH,)),
        _case("unused-on-one-rank-in-one-bucket", UNUSED_IN_ONE_BUCKET, 2, buckets=(ONE_BUCKET,)),
        _case("unused-after-recount", UNUSED_AFTER_RECOUNT, 2, buckets=(EACH,)),
        _case("fewer-passes", FEWER_PASSES, 4, instances=(1, 2)),
        _case("fewer-on-one-rank", FEWER_ON_ONE_RANK, 2, buckets=(EACH,)),
        _case("fewer-when-partly-counted", FEWER_WHEN_PARTLY_COUNTED, 2, buckets=(EACH,)),
        _case("more-passes", MORE_PASSES, 4, instances=(1, 2)),
        _case("dispatched-twice", DISPATCHED_TWICE, 2),
        CONTROL,
    ),
)
