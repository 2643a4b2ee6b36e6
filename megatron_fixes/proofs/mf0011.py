# SPDX-License-Identifier: Apache-2.0
"""Proof of MF0011: with several distributed-optimizer instances, a bucket that was never reduced is finished silently.

Guards: with overlap, a batch either ends with right gradients or is refused by an error that names the bucket's state;
a batch in which each bucket was dispatched is never refused.

* ``unused``: 4 ranks as 2 instances x 2 shards, one bucket and two; sequences of batches through one DDP. Refused
  must be a batch that leaves a layer unused on every rank, twice in a row and after an abandoned one, and a batch whose
  passes all run under ``no_sync`` with no dispatch after them. Between them are batches that are right: dispatched by
  hooks, by hooks after a pass under ``no_sync``, and as the pipeline schedules do it, over buffers zeroed by
  ``zero_grad_buffer`` and by hand.
* ``unused-on-one-rank``: 2 ranks as 2 instances. The other rank waits for the one that refuses until that one is gone;
  its error is as good as any.

The first two batches of a sequence are right ones: from 0.16 on the first counts gradients and is dispatched at its
end, and that it then asserts if a layer was unused is another defect (MF0004).

Where buffers are zeroed by hand and nothing is dispatched, DDP with one instance refuses the batch up to 0.17 and takes
it since (a second ``finish_grad_sync`` does nothing before ``reset``). What it does is asked first, and expected here.

Not asked: a bucket that no rank used at all. Its gradients are zero, reduced or not; it is refused, as with one
instance, since a rank can't know what its peers used.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from megatron.core import parallel_state

from megatron_fixes.proofs.controls import CONTROL
from megatron_fixes.proofs.ddp import backward, batch, compare, reference_gradients, transformer_config, wrap
from megatron_fixes.proofs.proof import Case, Judgement, Proof

if TYPE_CHECKING:
    from collections.abc import Sequence

HIDDEN = 8
# The middle layer shares its bucket with the last one; the first has one of its own.
TWO_BUCKETS = HIDDEN * HIDDEN + HIDDEN + 1
NAMED = "params have grad available"
EVERYONE = (0, 1, 2, 3)


@dataclass(frozen=True)
class Batch:
    """One optimizer step's worth of backward passes.

    Attributes:
        dispatch: By the hooks of the last pass, as the pipeline schedules do it, or not at all (all under ``no_sync``).
        skipping: Ranks on which the middle layer takes no part.
        passes: Backward passes; all but the last under ``no_sync``.
        abandoned: Never finished, though its reduction was dispatched.
        by_hand: Its buffers were zeroed without ``zero_grad_buffer``.
        finishes: Calls of ``finish_grad_sync``; a second one only where DDP with one instance lets it pass.
    """

    dispatch: Literal["hooks", "schedule", "nobody"] = "hooks"
    skipping: tuple[int, ...] = ()
    passes: int = 1
    abandoned: bool = False
    by_hand: bool = False
    finishes: int = 1

    def undispatched_on(self, rank: int) -> bool:
        """Whether a bucket of the rank is not dispatched, so that an error is due."""
        return self.dispatch == "nobody" or (self.dispatch == "hooks" and rank in self.skipping)


Sequences = dict[str, tuple[Batch, ...]]

GOOD, ABANDONED, UNUSED = Batch(), Batch(abandoned=True), Batch(skipping=EVERYONE)
BY_HAND = Batch("schedule", by_hand=True)
SEQUENCES: Sequences = {
    "a layer unused": (GOOD, GOOD, UNUSED, UNUSED, GOOD, Batch(passes=2), Batch("schedule", skipping=EVERYONE)),
    "a layer unused after an abandoned batch": (GOOD, GOOD, ABANDONED, UNUSED, ABANDONED, GOOD),
    "no dispatch": (GOOD, GOOD, Batch("nobody"), Batch(finishes=2), GOOD),
    "zeroed by hand": (GOOD, Batch("schedule"), BY_HAND, BY_HAND, Batch("nobody", by_hand=True), BY_HAND, GOOD),
}
ON_ONE_RANK: Sequences = {"a layer unused": (GOOD, GOOD, Batch(skipping=(1,)))}


class _Model(torch.nn.Module):
    """Three layers, of which the middle one can be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first, self.middle, self.last = (torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, data: torch.Tensor, skip_middle: bool) -> torch.Tensor:
        value = self.first(data)
        output: torch.Tensor = self.last(value if skip_middle else self.middle(value))
        return output


def _loss(module: torch.nn.Module, rank: int, number: int, part: int, wanted: Batch) -> torch.Tensor:
    data = batch(rank, 10 * number + part, HIDDEN).to(next(module.parameters()))
    loss: torch.Tensor = module(data, rank in wanted.skipping).square().mean()
    return loss


def _zero(ddp: Any, *, by_hand: bool) -> None:
    if by_hand:
        for buffer in ddp.buffers:
            buffer.reset()
    else:
        ddp.zero_grad_buffer()


def _passes(ddp: Any, rank: int, number: int, wanted: Batch) -> None:
    losses = [partial(_loss, rank=rank, number=number, part=part, wanted=wanted) for part in range(wanted.passes)]
    with ddp.no_sync():
        for loss in losses if wanted.dispatch == "nobody" else losses[:-1]:
            loss(ddp).backward()
    if wanted.dispatch != "nobody":
        backward(ddp, losses[-1], scheduled=wanted.dispatch == "schedule")


def _batch(ddp: Any, rank: int, number: int, wanted: Batch, *, finish_again: bool) -> dict[str, Any]:
    """Run one batch; report a comparison, or the error that refused it, or nothing."""
    if finish_again and wanted.by_hand and wanted.dispatch == "nobody":
        return {}
    _zero(ddp, by_hand=wanted.by_hand)
    try:
        _passes(ddp, rank, number, wanted)
        if wanted.abandoned:
            return {}
        for _ in range(wanted.finishes if finish_again else 1):
            ddp.finish_grad_sync()
    except (AssertionError, RuntimeError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}

    def loss(module: torch.nn.Module, peer: int) -> torch.Tensor:
        return torch.stack([_loss(module, peer, number, part, wanted) for part in range(wanted.passes)]).sum()

    peers = range(parallel_state.get_data_parallel_world_size())
    return compare(ddp, reference_gradients(ddp.module, [partial(loss, peer=peer) for peer in peers]))


def _finish_may_come_again(rank: int) -> bool:
    """Whether DDP with one instance takes a second ``finish_grad_sync`` in a batch (but the first)."""
    parallel_state.initialize_model_parallel()
    ddp = wrap(_Model(), transformer_config(), instances=1, bucket_size=None)
    for number in range(2):
        _batch(ddp, rank, number, GOOD, finish_again=False)
    try:
        ddp.finish_grad_sync()
    except AssertionError:
        return False
    finally:
        parallel_state.destroy_model_parallel()
    return True


def _run(rank: int, *, sequences: Sequences, bucket_sizes: Sequence[int | None]) -> dict[str, Any]:
    finish_again = _finish_may_come_again(rank)
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    reports: dict[str, Any] = {name: {} for name in sequences}
    for name, batches in sequences.items():
        for bucket_size in bucket_sizes:
            ddp = wrap(_Model(), transformer_config(), instances=2, bucket_size=bucket_size)
            reports[name][f"{len(ddp.bucket_groups)} bucket(s)"] = [
                _batch(ddp, rank, number, wanted, finish_again=finish_again) for number, wanted in enumerate(batches)
            ]
    return reports


def _fault(wanted: Batch, report: dict[str, Any], rank: int) -> str | None:
    """What is wrong with how a batch ended on a rank, if anything."""
    if report.get("wrong"):
        return f"{report['wrong']} of {report['elements']} elements wrong, no error"
    if "refused" not in report:
        return None
    if wanted.undispatched_on(rank):
        return None if NAMED in report["refused"] else f"not named by {report['refused']}"
    # Where a peer has refused the batch, this rank ends as it may.
    return None if wanted.skipping and wanted.dispatch == "hooks" else f"refused by {report['refused']}"


def judge_batches(evidence: Sequence[dict[str, dict[str, Any]]], *, sequences: Sequences) -> Judgement:
    """Defect if a batch of any sequence is silently wrong, or refused where no error is due, on any rank."""
    ended = [
        (f"{name}, {setup}: batch {number + 1} of {len(reports)} on rank {rank}", wanted, report, rank)
        for rank, e in enumerate(evidence)
        for name, setups in e.items()
        for setup, reports in setups.items()
        for number, (wanted, report) in enumerate(zip(sequences[name], reports, strict=True))
    ]
    for place, wanted, report, rank in ended:
        if fault := _fault(wanted, report, rank):
            return Judgement("defect", f"{place}: {fault}")
    refused = sum("refused" in report for _, _, report, _ in ended)
    return Judgement("clean", f"{len(ended)} batches, {refused} of them refused by an error that is due, none wrong")


def _case(name: str, sequences: Sequences, ranks: int, bucket_sizes: Sequence[int | None]) -> Case:
    run = partial(_run, sequences=sequences, bucket_sizes=bucket_sizes)
    return Case(name, "gloo", ranks, run, partial(judge_batches, sequences=sequences))


PROOF = Proof(
    "MF0011",
    (
        _case("unused", SEQUENCES, 4, (None, TWO_BUCKETS)),
        _case("unused-on-one-rank", ON_ONE_RANK, 2, (None,)),
        CONTROL,
    ),
)
