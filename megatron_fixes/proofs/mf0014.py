# SPDX-License-Identifier: Apache-2.0
"""Proof of MF0014: the offloading optimizer's copies back to the GPU are not waited for.

Guards: what reads a parameter on the current stream after ``HybridDeviceOptimizer.step`` comes after the copy of its
new value from the CPU.

* ``recorder`` (CPU, gloo): the happens-before recorder over real steps, with reads of the parameters between
  them; also without overlap, where no release races, so that a recorder that cries wolf is caught.
* ``stale-reads`` (one GPU, NCCL): a large parameter is read right after the step, as the next forward pass would
  do; each element must have its new value. In some steps the stream of the copies is kept busy beforehand, as it
  is when a copy of another parameter is still under way. Also without overlap.

Everything is offloaded, so that no inner optimizer runs on the GPU.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from megatron_fixes.proofs.host_memory import HostMemory
from megatron_fixes.proofs.offloading import RECORDED_STEPS, SIZE, evidence_of_races, judge_races, sgd
from megatron_fixes.proofs.proof import Case, Judgement, Proof
from megatron_fixes.proofs.recorder import recording

if TYPE_CHECKING:
    from collections.abc import Sequence

# 256 MiB of float32: a copy of several milliseconds, where enqueuing the next kernel takes some microseconds.
GPU_ELEMENTS, GPU_STEPS = 64 * 2**20, 6
# About 20 ms at the clocks of any current GPU.
DELAY_CYCLES = 40_000_000


def _record_steps(*, overlap: bool) -> tuple[list[str], int]:
    """Take two steps, with reads after each; list the races, and count the elements that came out wrong."""
    wrong = 0
    with HostMemory(), recording() as recorder:
        parameters = [torch.nn.Parameter(torch.zeros(SIZE)) for _ in range(2)]
        optimizer = sgd(parameters, offload_fraction=1.0, overlap=overlap)
        for step in range(RECORDED_STEPS):
            for parameter in parameters:
                parameter.grad = torch.ones(SIZE)
            optimizer.step()
            wrong += sum(int((parameter.detach() != -(step + 1)).sum()) for parameter in parameters)
    return [str(race) for race in recorder.races], wrong


def _record(rank: int) -> dict[str, Any]:
    return evidence_of_races(_record_steps(overlap=True), _record_steps(overlap=False))


judge_record = partial(judge_races, control="without overlap", missing="something was not copied back")


def _gpu_steps(*, overlap: bool) -> list[dict[str, Any]]:
    """Take steps of a large parameter and read it at once; count the elements that were stale when read."""
    parameter = torch.nn.Parameter(torch.zeros(GPU_ELEMENTS, device="cuda"))
    optimizer = sgd([parameter], offload_fraction=1.0, overlap=overlap)
    steps = []
    for step in range(GPU_STEPS):
        parameter.grad = torch.ones_like(parameter)
        torch.cuda.synchronize()
        delayed = step % 2 == 1
        if delayed:
            with torch.cuda.stream(optimizer._h2d_stream):
                torch.cuda._sleep(DELAY_CYCLES)
        optimizer.step()
        seen = parameter.detach().clone()
        torch.cuda.synchronize()
        expected = -float(step + 1)
        steps.append(
            {
                "delayed": delayed,
                "stale": int((seen != expected).sum()),
                # Once everything has run the parameter must be right on every release.
                "wrong_in_the_end": int((parameter.detach() != expected).sum()),
            }
        )
        torch.cuda.synchronize()
    return steps


def _stale_reads(rank: int) -> dict[str, Any]:
    return {"steps": _gpu_steps(overlap=True), "steps_without_overlap": _gpu_steps(overlap=False)}


def judge_reads(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if any read was stale; nothing is shown if one was without overlap, or a value stayed wrong.

    Args:
        evidence: From each rank: ``steps`` and ``steps_without_overlap``, each with ``delayed``, ``stale``,
            ``wrong_in_the_end``.
    """
    steps = [step for e in evidence for step in e["steps"]]
    control = [step for e in evidence for step in e["steps_without_overlap"]]
    if any(step["stale"] for step in control):
        return Judgement("not-runnable", "stale reads without overlap, expected none")
    if any(step["wrong_in_the_end"] for step in (*steps, *control)):
        return Judgement("not-runnable", "wrong parameters also after everything has run, expected none")
    stale = [step["stale"] for step in steps if step["stale"]]
    if not stale:
        return Judgement("clean", f"no stale element in {len(steps)} of {len(steps)} steps")
    alone = sum(bool(step["stale"]) for step in steps if not step["delayed"])
    share = 100 * max(stale) / GPU_ELEMENTS
    where = f"{alone} of them without any delay"
    return Judgement("defect", f"stale reads in {len(stale)} of {len(steps)} steps, {where}; up to {share:.1f} %")


PROOF = Proof(
    "MF0014",
    (
        Case("recorder", "gloo", 1, _record, judge_record),
        Case("stale-reads", "nccl", 1, _stale_reads, judge_reads, timeout_s=120.0),
    ),
)
