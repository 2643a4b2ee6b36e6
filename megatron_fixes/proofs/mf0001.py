# SPDX-License-Identifier: Apache-2.0
"""Proof of MF0001: gradients are reduced on a stream that nothing orders after the stream that wrote them.

Guards: with several distributed-optimizer instances and overlapped reduction, whatever stream a step runs on,
the reduction comes after the writes of the gradients, and later reads come after the reduction.

* ``recorder`` (CPU, gloo): the happens-before recorder over two real steps on a side stream; also on the
  default stream, where no release races, so that a recorder that cries wolf is caught.
* ``wrong-gradients`` (two GPUs, NCCL): a step on a side stream, with a slow kernel between the loss and the
  gradients, so that an unordered reduction reads them too early; each step is compared with the reference.
* ``built-on-side-stream`` (two GPUs, NCCL): DDP built on a side stream, as Megatron-LM's ``get_model`` does
  since 0.14.0, and the step on the default stream: autograd accumulates, and calls the hooks, on the stream of
  the build.

Each GPU case runs the same steps with a DDP built and used on the default stream, where no release is wrong.

Shards of size 1 on two GPUs are enough here: the reduction across instances carries the sum.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state

from megatron_fixes.collectives import recorded_streams
from megatron_fixes.proofs.controls import CONTROL
from megatron_fixes.proofs.ddp import batch, compare, mean_square, reference_gradients, transformer_config, wrap
from megatron_fixes.proofs.proof import Case, Judgement, Proof
from megatron_fixes.proofs.recorder import recording

if TYPE_CHECKING:
    from collections.abc import Sequence

RECORDED_STEPS, GPU_STEPS = 2, 16
HIDDEN, GPU_HIDDEN = 8, 1024
# About 20 ms at the clocks of any current GPU: longer than dispatching a whole step takes the host.
DELAY_CYCLES = 40_000_000


def _model(hidden: int) -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(hidden, hidden), torch.nn.Linear(hidden, hidden))


def _record_steps(rank: int, stream: Any) -> tuple[list[str], int]:
    """Run two steps on a stream; list the races, and count the elements that came out wrong."""
    ddp = wrap(_model(HIDDEN), transformer_config(), instances=2, bucket_size=1)
    peers = range(parallel_state.get_data_parallel_world_size())
    wrong = 0
    with recording() as recorder, torch.cuda.stream(stream):
        for step in range(RECORDED_STEPS):
            ddp.zero_grad_buffer()
            mean_square(ddp, batch(rank, step, HIDDEN)).backward()
            ddp.finish_grad_sync()
            losses = [partial(mean_square, data=batch(peer, step, HIDDEN)) for peer in peers]
            wrong += compare(ddp, reference_gradients(ddp.module, losses))["wrong"]
    return [str(race) for race in recorder.races], wrong


def _record(rank: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    side, wrong = _record_steps(rank, recorded_streams.Stream(name="side stream"))
    control, _ = _record_steps(rank, recorded_streams.state.default)
    return {"races": len(side), "example": side[:2], "wrong": wrong, "races_on_default_stream": len(control)}


def judge_record(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if any rank has a race, or wrong gradients; nothing is shown if the default stream has a race too."""
    control = sum(e["races_on_default_stream"] for e in evidence)
    if control:
        return Judgement("not-runnable", f"the recorder reports {control} races on the default stream, expected none")
    # Work runs at once here, so an order that is missing spoils nothing; a reduction that is missing does.
    if wrong := sum(e["wrong"] for e in evidence):
        return Judgement("defect", f"{wrong} elements with wrong mean gradients: something was not reduced")
    races = sum(e["races"] for e in evidence)
    if races:
        first = next(e["example"][0] for e in evidence if e["races"])
        return Judgement(
            "defect", f"{races} races in {RECORDED_STEPS} steps on {len(evidence)} ranks, such as: {first}"
        )
    return Judgement("clean", f"0 races in {RECORDED_STEPS} steps on {len(evidence)} ranks")


class _SlowGradient(torch.autograd.Function):
    """Identity whose backward keeps the stream busy before the gradient is passed on."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        torch.cuda._sleep(DELAY_CYCLES)
        return gradients[0].clone()


def _gpu_steps(rank: int, ddp: Any, stream: Any) -> int:
    """Run the measured steps on a stream; count those whose gradients are wrong on this rank."""
    wrong_steps = 0
    for step in range(GPU_STEPS + 1):
        with torch.cuda.stream(stream):
            ddp.zero_grad_buffer()
            output = ddp(batch(rank, step, GPU_HIDDEN).cuda())
            _SlowGradient.apply(output).square().mean().backward()
            ddp.finish_grad_sync()
            got = [parameter.main_grad.clone() for parameter in ddp.module.parameters()]
        torch.cuda.synchronize()
        # What a consumer on that stream read, not what the buffer holds once everything has run.
        for parameter, seen in zip(ddp.module.parameters(), got, strict=True):
            parameter.main_grad.copy_(seen)
        losses = [partial(mean_square, data=batch(peer, step, GPU_HIDDEN)) for peer in range(2)]
        report = compare(ddp, reference_gradients(ddp.module, losses))
        torch.cuda.synchronize()
        # Step 0 calibrates (0.16 dispatches at its end, when autograd has joined the streams) and warms NCCL up.
        wrong_steps += step > 0 and report["wrong"] > 0
    return wrong_steps


def _wrong_gradients(rank: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    ddp = wrap(_model(GPU_HIDDEN).cuda(), transformer_config(), instances=2, bucket_size=1)
    return {
        "wrong_steps": _gpu_steps(rank, ddp, torch.cuda.Stream()),
        "wrong_steps_on_default_stream": _gpu_steps(rank, ddp, torch.cuda.default_stream()),
    }


def _slow_accumulation(gradient: torch.Tensor) -> None:
    torch.cuda._sleep(DELAY_CYCLES // 10)


def _built_on_side_stream(rank: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    control = wrap(_model(GPU_HIDDEN).cuda(), transformer_config(), instances=2, bucket_size=1)
    module = _model(GPU_HIDDEN).cuda()
    torch.cuda.synchronize()
    # As Megatron-LM's get_model does since 0.14.0; autograd then accumulates these gradients on that stream.
    with torch.cuda.stream(torch.cuda.Stream()):
        ddp = wrap(module, transformer_config(), instances=2, bucket_size=1)
    torch.cuda.synchronize()
    for parameter in (*ddp.module.parameters(), *control.module.parameters()):
        parameter.register_hook(_slow_accumulation)
    return {
        "wrong_steps": _gpu_steps(rank, ddp, torch.cuda.default_stream()),
        "wrong_steps_on_default_stream": _gpu_steps(rank, control, torch.cuda.default_stream()),
    }


def judge_gradients(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if any step of any rank was wrong on the side stream; nothing is shown if the control is wrong."""
    control = max(e["wrong_steps_on_default_stream"] for e in evidence)
    if control:
        return Judgement("not-runnable", f"{control} of {GPU_STEPS} steps wrong on the default stream, expected none")
    wrong = max(e["wrong_steps"] for e in evidence)
    return Judgement("defect" if wrong else "clean", f"{wrong} of {GPU_STEPS} steps with wrong gradients")


PROOF = Proof(
    "MF0001",
    (
        Case("recorder", "gloo", 4, _record, judge_record),
        CONTROL,
        Case("wrong-gradients", "nccl", 2, _wrong_gradients, judge_gradients, timeout_s=120.0),
        Case("built-on-side-stream", "nccl", 2, _built_on_side_stream, judge_gradients, timeout_s=120.0),
    ),
)
