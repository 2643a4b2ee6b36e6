# SPDX-License-Identifier: Apache-2.0
"""Proof of MF0007: DDP copies weights on a side stream that nothing orders after those who write them.

Guards: DDP built on another stream than the default one, as Megatron-LM's ``get_model`` builds it, copies the
weights after the default stream wrote them, and what the default stream does next comes after the copy.

The core package holds the victim; who waits, or doesn't, is the caller. So DDP is built here in the way of the
release's own ``get_model`` (``published``): read from its source where the package has it (from 0.17.0 on), else
from a table. Up to 0.13.1 it built DDP on the current stream; 0.14.0 to 0.15.3 on a side stream without waiting
(commit e7c55de99e); from 0.16.0 on the caller waits before and after (commits de56227b26 and 4ba9f46967). A DDP that
somebody builds on a side stream by hand, without waiting, races in every release that does not have this fix.

* ``recorder`` (CPU, gloo): the happens-before recorder over writing the weights, the build, and a training step.
  Built on the default stream, or by a caller who waits, no release races; a recorder that cries wolf is caught.
* ``without-cuda``: control; where CUDA is not up, building DDP asks it for no stream.
* ``weights`` (one GPU, NCCL): weights that are written late, and weights that are read early, compared one by one.

Not handled: weights written on a stream that is neither the default one nor the one of the build, and the FSDP
wrappers that ``get_model`` builds in the same place.
"""

from __future__ import annotations

import ast
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import megatron.core
import torch
from megatron.core import package_info, parallel_state

from megatron_fixes.proofs.ddp import batch, compare, mean_square, reference_gradients, transformer_config, wrap
from megatron_fixes.proofs.proof import Case, Judgement, Proof
from megatron_fixes.proofs.recorder import recording

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

HIDDEN = 8
# 16.8 million weights, and some 0.2 s at the clocks of any current GPU: longer than building DDP over them takes.
GPU_HIDDEN, DELAY_CYCLES = 4096, 400_000_000


@dataclass(frozen=True)
class Build:
    """How a caller builds DDP: on a side stream or not, and what waits for what."""

    side: bool
    before: bool = False
    after: bool = False

    def __call__(self, module: torch.nn.Module, occupy: Callable[[], None] = lambda: None) -> Any:
        """Real DDP over ``module``; ``occupy`` puts work on the stream of the build first."""
        current: Any = torch.cuda.current_stream()
        stream: Any = torch.cuda.Stream() if self.side else current
        if self.before:
            stream.wait_stream(current)
        with torch.cuda.stream(stream):
            occupy()
            ddp = wrap(module, transformer_config(), instances=1, bucket_size=None)
        if self.after:
            current.wait_stream(stream)
        return ddp


HERE, WAITING = Build(side=False), Build(side=True, before=True, after=True)
# First minor release of the 0.x series that builds DDP in this way.
WITHOUT_SOURCE = {0: HERE, 14: Build(side=True), 16: WAITING}


def read(source: str) -> Build:
    """How the ``get_model`` in a source of ``megatron/training/training.py`` builds DDP."""
    (function,) = [
        node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "get_model"
    ]
    waits = [
        node.lineno
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "wait_stream"
    ]
    blocks = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.With) and "torch.cuda.stream(" in ast.unparse(node.items[0])
    ]
    if not blocks:
        return HERE
    (block,) = blocks
    end = block.end_lineno or block.lineno
    return Build(side=True, before=any(at < block.lineno for at in waits), after=any(at > end for at in waits))


def published() -> Build:
    """How the ``get_model`` of the release that is imported builds DDP."""
    training = Path(str(megatron.core.__file__)).parents[1] / "training" / "training.py"
    if training.is_file():
        return read(training.read_text("utf-8"))
    return WITHOUT_SOURCE[max(first for first in WITHOUT_SOURCE if first <= package_info.MINOR)]


def _layer(seed: int = 1) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(HIDDEN, HIDDEN)


@contextmanager
def _cuda(*, up: bool) -> Iterator[None]:
    """While in here, CUDA passes for up; or it is down, and asking for a stream is an error as in torch for CPU."""
    cuda: Any = torch.cuda
    before = cuda.is_initialized, cuda.current_stream, cuda.default_stream

    def no_stream(*_: Any) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    cuda.is_initialized = lambda: up
    if not up:
        cuda.current_stream = cuda.default_stream = no_stream
    try:
        yield
    finally:
        cuda.is_initialized, cuda.current_stream, cuda.default_stream = before


def _recorded(build: Build) -> dict[str, Any]:
    """Write weights, build DDP and train a step, all called on the default stream; what the recorder saw."""
    with recording() as recorder:
        module = _layer()
        with _cuda(up=True):
            ddp = build(module)
        ddp.zero_grad_buffer()
        mean_square(ddp, batch(0, 0, HIDDEN)).backward()
        ddp.finish_grad_sync()
    moved = all(
        parameter.untyped_storage().data_ptr() == ddp.buffers[0].param_data.untyped_storage().data_ptr()
        for parameter in ddp.module.parameters()
    )
    wrong = compare(ddp, reference_gradients(_layer(), [partial(mean_square, data=batch(0, 0, HIDDEN))]))["wrong"]
    return {"races": [str(race) for race in recorder.races], "moved": moved, "wrong": wrong}


def _record(rank: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel()
    build = published()
    return {
        "build": f"side stream {build.side}, waits before {build.before}, after {build.after}",
        "get_model": _recorded(build),
        "on the default stream": _recorded(HERE),
        "by a caller who waits": _recorded(WAITING),
    }


def judge_record(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if any rank has a race built as by ``get_model``; nothing is shown if one is seen where none can be."""
    for name in ("on the default stream", "by a caller who waits"):
        if races := [race for e in evidence for race in e[name]["races"]]:
            return Judgement("not-runnable", f"{len(races)} races built {name}, expected none: {races[0]}")
    for name in ("get_model", "on the default stream", "by a caller who waits"):
        if not all(e[name]["moved"] for e in evidence):
            return Judgement("not-runnable", f"built {name}: weights were not copied into DDP's buffer")
        # Work runs at once here, so an order that is missing spoils nothing.
        if wrong := sum(e[name]["wrong"] for e in evidence):
            return Judgement("defect", f"built {name}: {wrong} elements with wrong gradients")
    races = [race for e in evidence for race in e["get_model"]["races"]]
    how = f"built as by get_model ({evidence[0]['build']})"
    if races:
        return Judgement("defect", f"{len(races)} races {how}, such as: {races[0]}")
    return Judgement("clean", f"0 races {how}")


def _without_cuda(rank: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel()
    module = _layer()
    try:
        with _cuda(up=False):
            wrap(module, transformer_config(), instances=1, bucket_size=None)
    except (AssertionError, RuntimeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"wrong": sum(int((a != b).sum()) for a, b in zip(module.parameters(), _layer().parameters(), strict=True))}


def judge_without_cuda(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if DDP could not be built on any rank, or changed a weight."""
    for report in evidence:
        if "error" in report:
            return Judgement("defect", f"DDP can't be built where CUDA is not up: {report['error']}")
        if report["wrong"]:
            return Judgement("defect", f"{report['wrong']} weights changed")
    return Judgement("clean", "DDP is built where CUDA is not up")


def _sleep() -> None:
    torch.cuda._sleep(DELAY_CYCLES)


def _weights(build: Build, situation: str, seed: int) -> dict[str, int]:
    """Build DDP over weights that are written late, or read early; count those that are wrong."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    expected = torch.randn(GPU_HIDDEN, GPU_HIDDEN, device="cuda", generator=generator)
    module: Any = torch.nn.Linear(GPU_HIDDEN, GPU_HIDDEN, bias=False, device="cuda")
    torch.cuda.synchronize()
    if situation == "written late":
        _sleep()
    with torch.no_grad():
        module.weight.copy_(expected)
    if situation == "read early":
        torch.cuda.synchronize()
    ddp = build(module, _sleep if situation == "read early" else lambda: None)
    got = ddp.module.weight.detach().clone()
    torch.cuda.synchronize()
    kept = ddp.module.weight.detach()
    return {"wrong": int(((got != expected) | (kept != expected)).sum()), "weights": expected.numel()}


def _gpu(rank: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel()
    situations = ("written late", "read early")
    # First, so that all kernels are loaded before time matters: loading one can wait for those that run.
    control = [_weights(HERE, situation, seed) for seed, situation in enumerate(situations)]
    return {
        "wrong_on_default_stream": sum(report["wrong"] for report in control),
        "situations": {name: _weights(published(), name, 10 + seed) for seed, name in enumerate(situations)},
    }


def judge_weights(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if any rank has a wrong weight; nothing is shown if DDP built on the default stream has one."""
    if wrong := sum(e["wrong_on_default_stream"] for e in evidence):
        return Judgement("not-runnable", f"{wrong} wrong weights with DDP built on the default stream, expected none")
    seen = []
    for name in evidence[0]["situations"]:
        reports = [e["situations"][name] for e in evidence]
        seen.append((sum(r["wrong"] for r in reports), sum(r["weights"] for r in reports), name))
    summary = "; ".join(f"{name}: {wrong} of {weights} weights wrong" for wrong, weights, name in seen)
    return Judgement("defect" if any(wrong for wrong, _, _ in seen) else "clean", summary)


PROOF = Proof(
    "MF0007",
    (
        Case("recorder", "gloo", 1, _record, judge_record),
        Case("without-cuda", "gloo", 1, _without_cuda, judge_without_cuda, control=True),
        Case("weights", "nccl", 1, _gpu, judge_weights, timeout_s=120.0),
    ),
)
