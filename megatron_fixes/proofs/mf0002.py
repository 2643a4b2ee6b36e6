# SPDX-License-Identifier: Apache-2.0
"""Proof of MF0002: what an abandoned step left under way meets the next step.

Guards: after a step that all ranks abandon in backward, ``zero_grad_buffer`` is enough for the next steps to be
right; where the ranks didn't abandon it at the same point, it raises within its bound and names who is missing.

* ``hooks``: a layer raises in backward after one bucket was dispatched by its hook; dense and expert parameters,
  with and without distributed optimizer. One rank comes late.
* ``schedule``: the step is abandoned after ``DDP.start_grad_sync``, which is how the pipeline schedules dispatch.
* ``one-rank-alone``, ``different-points``: one rank abandons the step, or both do but not after the same bucket.
  There is no way on from there; the defect is to go on all the same.
* ``recorder``: zeroing races with the reduction, also where no handle is left (several distributed-optimizer
  instances); the happens-before recorder sees it, and sees no race when the step is finished.
* ``two-gpus``: recovery in both ways, then one rank alone, on two GPUs with NCCL.
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_fixes.proofs.controls import CONTROL
from megatron_fixes.proofs.ddp import (
    Abandon,
    Bomb,
    backward,
    batch,
    compare,
    mean_square,
    reference_gradients,
    transformer_config,
    wrap,
)
from megatron_fixes.proofs.proof import Case, Judgement, Proof
from megatron_fixes.proofs.recorder import recording

if TYPE_CHECKING:
    from collections.abc import Sequence

HIDDEN, STEPS, ABANDONED = 8, 4, 1
LATE_S, BOUND_S, PATIENCE_S = 0.1, 0.5, 10.0


class _Model(torch.nn.Module):
    """Two layers with the bomb between them: the last one's gradient is there, and dispatched, when it goes off."""

    def __init__(self, *, expert: bool = False) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN)
        for parameter in self.parameters() if expert else ():
            parameter.allreduce = False  # type: ignore[attr-defined]

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(Bomb.apply(self.first(data)))
        return output


def _backward(ddp: Any, data: torch.Tensor, dispatch: str) -> None:
    backward(ddp, partial(mean_square, data=data), scheduled=dispatch == "schedule")


def _abandon(ddp: Any, data: torch.Tensor, dispatch: str, *, armed: bool = True) -> None:
    """Leave a step without ``finish_grad_sync``; not armed, after the whole backward pass."""
    Bomb.armed = armed and dispatch == "hooks"
    try:
        _backward(ddp, data, dispatch)
    except Abandon:
        pass
    finally:
        Bomb.armed = False


def _steps(ddp: Any, rank: int, dispatch: str) -> dict[str, Any]:
    """Run steps of which one is abandoned; report each: a comparison, or the error that ended it."""
    peers = range(parallel_state.get_data_parallel_world_size())
    reports = {}
    for step in range(STEPS):
        if step == ABANDONED:
            ddp.zero_grad_buffer()
            _abandon(ddp, batch(rank, 100, HIDDEN), dispatch)
            time.sleep(LATE_S * rank)
        try:
            ddp.zero_grad_buffer()
            _backward(ddp, batch(rank, step, HIDDEN), dispatch)
            ddp.finish_grad_sync()
        except (AssertionError, RuntimeError) as error:
            reports[f"step {step}"] = {"error": f"{type(error).__name__}: {error}"}
            break
        losses = [partial(mean_square, data=batch(peer, step, HIDDEN)) for peer in peers]
        reports[f"step {step}"] = compare(ddp, reference_gradients(ddp.module, losses))
    return reports


def _recovery(rank: int, *, situations: Sequence[str]) -> dict[str, Any]:
    parallel_state.initialize_model_parallel()
    reports = {}
    for name in situations:
        ddp = wrap(
            _Model(expert=name == "expert").to(_device()),
            transformer_config(),
            instances=1,
            bucket_size=1,
            distributed_optimizer=name != "no distributed optimizer",
        )
        reports[name] = _steps(ddp, rank, "schedule" if name == "schedule" else "hooks")
    return {"situations": reports}


def _device() -> Any:
    return torch.cuda.current_device()


def judge_recovery(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if in any situation a step after the abandoned one was wrong, or raised, on any rank."""
    bad = []
    for situation in evidence[0]["situations"]:
        for rank, steps in enumerate(e["situations"][situation] for e in evidence):
            for step, report in steps.items():
                if "error" in report:
                    bad.append(f"{situation}, {step}, rank {rank}: {report['error']}")
                elif report["wrong"]:
                    bad.append(f"{situation}, {step}, rank {rank}: {report['wrong']} of {report['elements']} wrong")
    if bad:
        return Judgement("defect", f"no way on after an abandoned step: {bad[0]}")
    return Judgement("clean", f"gradients right after an abandoned step ({', '.join(evidence[0]['situations'])})")


def _apart(rank: int, *, both: bool) -> dict[str, Any]:
    """Rank 0 abandons a step after one bucket. Its peer has dispatched all, and abandons the step too if ``both``."""
    parallel_state.initialize_model_parallel()
    ddp = wrap(_Model().to(_device()), transformer_config(), instances=1, bucket_size=1)
    ddp.abandoned_step_timeout_s = BOUND_S
    for step in range(2):
        ddp.zero_grad_buffer()
        _backward(ddp, batch(rank, step, HIDDEN), "hooks")
        ddp.finish_grad_sync()
    ddp.zero_grad_buffer()
    _abandon(ddp, batch(rank, 100, HIDDEN), "hooks", armed=rank == 0)
    report: dict[str, Any] = {}
    if rank == 0 or both:
        started = time.monotonic()
        try:
            ddp.zero_grad_buffer()
        except (AssertionError, RuntimeError) as error:
            report["error"] = f"{type(error).__name__}: {error}"
        report["seconds"] = round(time.monotonic() - started, 2)
    # Nobody leaves, and so closes connections, before all have seen what they see.
    store: Any = dist.distributed_c10d._get_default_store()
    store.set(f"seen/{rank}", "1")
    store.wait([f"seen/{peer}" for peer in range(dist.get_world_size())])
    return report


def judge_apart(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect unless each rank that zeroed the buffers was stopped in time, by an error that names its peer."""
    for rank, report in enumerate(evidence):
        if "seconds" in report:
            if "error" not in report:
                return Judgement("defect", f"rank {rank} goes on as if its peer had abandoned the step with it")
            if f"[{1 - rank}]" not in report["error"] or report["seconds"] > PATIENCE_S:
                return Judgement("defect", f"rank {rank} after {report['seconds']} s: {report['error']}")
    return Judgement("clean", f"stopped after {evidence[0]['seconds']} s: {evidence[0]['error']}")


def _record(rank: int) -> dict[str, Any]:
    races: dict[str, list[str]] = {"finished": [], "abandoned": []}
    for instances in (1, 2):
        parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
        ddp = wrap(_Model(), transformer_config(), instances=instances, bucket_size=1)
        for name, seen in races.items():
            # That no step comes after an abandoned one is what ``hooks`` shows.
            with recording() as recorder, suppress(AssertionError):
                for step in range(STEPS):
                    ddp.zero_grad_buffer()
                    if name == "abandoned" and step == STEPS - 2:
                        _abandon(ddp, batch(rank, step, HIDDEN), "hooks")
                    else:
                        _backward(ddp, batch(rank, step, HIDDEN), "hooks")
                        ddp.finish_grad_sync()
            seen += [f"{race} ({instances} instances)" for race in recorder.races]
        parallel_state.destroy_model_parallel()
    return races


def judge_record(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if zeroing after an abandoned step races on any rank; nothing is shown if a finished step races."""
    finished, abandoned = ([race for e in evidence for race in e[name]] for name in ("finished", "abandoned"))
    if finished:
        return Judgement("not-runnable", f"the recorder reports {len(finished)} races in finished steps: {finished[0]}")
    if abandoned:
        return Judgement("defect", f"{len(abandoned)} races after an abandoned step, such as: {abandoned[0]}")
    return Judgement("clean", f"0 races after an abandoned step on {len(evidence)} ranks")


def _two_gpus(rank: int) -> dict[str, Any]:
    recovery = _recovery(rank, situations=("dense", "schedule"))
    parallel_state.destroy_model_parallel()
    return {**recovery, "apart": _apart(rank, both=False)}


def judge_two_gpus(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if either of its parts shows one."""
    recovery, apart = judge_recovery(evidence), judge_apart([e["apart"] for e in evidence])
    outcome = apart.outcome if recovery.outcome == "clean" else recovery.outcome
    return Judgement(outcome, f"{recovery.summary}; {apart.summary}")


HOOKS = ("dense", "expert", "no distributed optimizer")
PROOF = Proof(
    "MF0002",
    (
        Case("hooks", "gloo", 2, partial(_recovery, situations=HOOKS), judge_recovery),
        Case("schedule", "gloo", 2, partial(_recovery, situations=("schedule",)), judge_recovery),
        Case("one-rank-alone", "gloo", 2, partial(_apart, both=False), judge_apart, timeout_s=20.0),
        Case("different-points", "gloo", 2, partial(_apart, both=True), judge_apart, timeout_s=20.0),
        Case("recorder", "gloo", 4, _record, judge_record),
        CONTROL,
        Case("two-gpus", "nccl", 2, _two_gpus, judge_two_gpus, timeout_s=120.0),
    ),
)
