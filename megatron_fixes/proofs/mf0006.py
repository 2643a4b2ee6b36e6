# SPDX-License-Identifier: Apache-2.0
"""Proof of MF0006: the optimizers of one chain drift apart in loss scale, and some gradients are unscaled wrongly.

Guards, after every step and on every rank: all optimizers of a ``ChainedOptimizer`` have one loss scale, growth
count and hysteresis count, the ones that a plain model of dynamic loss scaling foretells; a step is skipped by
all or by none; the unscaled gradients and their norm equal those of plain autograd in float64.

The optimizer is what ``get_megatron_optimizer`` builds, with and without the distributed optimizer, over a
dense and an expert layer that stand side by side. An overflow is a real one: the scaled gradient of one layer
leaves the range of fp16.

* ``expert overflows``, ``dense overflows``: one rank, one of the two layers.
* ``one rank's expert overflows``: 4 ranks, expert parallel 2, expert data parallel 2, hysteresis 2.
* ``scales in a checkpoint differ``: ``load_state_dict`` of scales and counts that have drifted apart.
* ``scales in a sharded state dict differ``: the same from ``sharded_state_dict``, on 2 ranks.
* ``one scaler in two optimizers``: it may be updated once a step only.

What must stay as it is: the controls. Their evidence has a digest of every weight and scale.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import mapping
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace

from megatron_fixes.proofs.mixed import LAYERS, SCALE, TOLERANCE, WINDOW, Plan, Run
from megatron_fixes.proofs.proof import Case, Judgement, Proof

if TYPE_CHECKING:
    from collections.abc import Sequence


def foretell(plan: Plan, state: Sequence[float], start: int = 0) -> list[dict[str, Any]]:
    """What each step must leave behind: dynamic loss scaling in plain Python, one scale for everything.

    Args:
        plan: Its overflows are what happens.
        state: Scale, growth count and hysteresis count to begin with; empty where there is no scaler.
        start: The first step that is foretold.
    """
    steps = []
    for overflows in plan.overflows[start:]:
        if state and not plan.constant:
            scale, growth, hysteresis = state
            growth, hysteresis = (0, hysteresis - 1) if overflows else (growth + 1, hysteresis)
            if overflows and hysteresis <= 0:
                scale /= 2
            elif growth == WINDOW:
                scale, growth, hysteresis = scale * 2, 0, plan.hysteresis
            state = [scale, growth, hysteresis]
        steps.append({"taken": not overflows, "scaler": list(state)})
    return steps


def _fresh(plan: Plan) -> list[float]:
    if plan.constant:
        return [SCALE, 0, 0]
    return [SCALE, 0, plan.hysteresis] if plan.dtype == torch.float16 else []


def _both(plan: Plan) -> list[Plan]:
    return [replace(plan, distributed=distributed) for distributed in (False, True)]


def _take(run: Run, foretold: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**run.step(), "foretold": expected} for expected in foretold]


def _evidence(runs: dict[str, list[dict[str, Any]]], **more: Any) -> dict[str, Any]:
    steps = {f"{name}, step {at}": step for name, taken in runs.items() for at, step in enumerate(taken)}
    return {"ep_rank": parallel_state.get_expert_model_parallel_rank(), "steps": steps, **more}


def _train(rank: int, *, plan: Plan, shared: bool = False) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=plan.expert_parallel)
    runs = {}
    for variation in _both(plan):
        run = Run(variation, rank)
        if shared:
            run.optimizers[1].grad_scaler = run.optimizers[0].grad_scaler
        runs[variation.name] = _take(run, foretell(variation, _fresh(variation)))
    return _evidence(runs)


QUIET: tuple[tuple[str, ...], ...] = ((),) * 5
# Scale, growth count and hysteresis count of the dense and of the expert optimizer.
DRIFTS = {
    "expert lower": ([SCALE, 2, 2], [SCALE / 4, 0, 0]),
    "dense lower": ([SCALE / 2, 1, 1], [SCALE * 2, 0, 2]),
    "counts differ": ([SCALE, 2, 1], [SCALE, 1, 2]),
}
# Another way to the same load: one drift is enough.
SHARDED_DRIFTS = {"expert lower": DRIFTS["expert lower"]}
EQUAL = {"equal scales loaded": ([SCALE * 2, 2, 1], [SCALE * 2, 2, 1])}


def _set(run: Run, states: Sequence[Sequence[float]]) -> None:
    for optimizer, (scale, growth, hysteresis) in zip(run.optimizers, states, strict=True):
        state = {"scale": torch.tensor([scale]), "growth_tracker": growth, "hysteresis_tracker": hysteresis}
        optimizer.grad_scaler.load_state_dict(state)


def _read(value: Any) -> Any:
    if isinstance(value, (mapping.ShardedTensor, mapping.ShardedObject)):
        return value.data
    return value.unwrap() if isinstance(value, mapping.LocalNonpersistentObject) else value


def _unsharded_moments(run: Run) -> dict[str, Any]:
    """What ``sharded_state_dict`` of this release takes to save the distributed optimizer's moments in one piece."""
    moments = "dp_zero_gather_scatter"
    accepted = inspect.signature(run.optimizers[0].sharded_state_dict).parameters
    if "metadata" in accepted:
        return {"metadata": {"distrib_optim_sharding_type": moments}}
    return {"sharding_type": moments} if "sharding_type" in accepted else {}


def _saved(run: Run, *, sharded: bool) -> Any:
    """What a checkpoint of the optimizer gives back on this rank.

    With ``sharded`` it is the sharded state dict, each entry replaced by this rank's data, as ``dist_checkpointing``
    returns it in an unchanged layout; nothing goes through files. Without the distributed optimizer's moments, which
    releases can't load where Adam is PyTorch's (they miss its ``step``).
    """
    if not sharded:
        return copy.deepcopy(run.chain.state_dict())
    model = {}
    for name, parameter in run.ddp.module.named_parameters():
        expert = name.startswith("expert")
        group = parallel_state.get_expert_data_parallel_group() if expert else parallel_state.get_data_parallel_group()
        key = f"{name} {parallel_state.get_expert_model_parallel_rank()}" if expert else name
        replica = (0, 0, torch.distributed.get_rank(group))
        model[name] = mapping.ShardedTensor.from_rank_offsets(key, parameter, replica_id=replica)
    saved = dict_list_map_inplace(_read, run.chain.sharded_state_dict(model, **_unsharded_moments(run)))
    for state in saved.values():
        state.pop("param_state", None)
    return copy.deepcopy(saved)


def _load(rank: int, *, plan: Plan, drifts: dict[str, Any], sharded: bool = False) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=plan.expert_parallel)
    runs, bits = {}, {}
    for variation in _both(plan):
        for name, states in drifts.items():
            run = Run(variation, rank)
            run.step()
            _set(run, states)
            saved = _saved(run, sharded=sharded)
            _set(run, [_fresh(variation)] * len(states))
            run.chain.load_state_dict(saved)
            lowest = [min(values) for values in zip(*states, strict=True)]
            loaded = {"scalers": run.scalers(), "foretold": {"scaler": lowest}}
            steps = _take(run, foretell(variation, lowest, start=run.step_number))
            runs[f"{variation.name}, {name}"] = [loaded, *steps]
            bits[f"{variation.name}, {name}"] = run.digest()
    return _evidence(runs, bits=bits)


def _interrupt(run: Run) -> None:
    """Let a step of the chain end with an exception before the first optimizer has looked at its gradients."""

    def fail() -> None:
        raise InterruptedError

    run.optimizers[0]._copy_model_grads_to_main_grads = fail
    with contextlib.suppress(InterruptedError):
        run.chain.step()
    del run.optimizers[0]._copy_model_grads_to_main_grads


def _alone(rank: int, plan: Plan) -> tuple[Run, list[dict[str, Any]]]:
    """Step the dense optimizer by itself, outside the chain, after a chain's step and after an interrupted one."""
    run = Run(plan, rank)
    run.step()
    _interrupt(run)
    steps = []
    for expected in foretell(plan, run.scalers()[0], start=1):
        step = run.step(run.optimizers[0])
        steps.append({**step, "scalers": step["scalers"][:1], "foretold": expected})
    return run, steps


CONTROL_PLANS = {
    "no overflow": Plan(QUIET),
    "both overflow": Plan(((), LAYERS, (), ()), hysteresis=2),
    "constant scale": Plan(((), ("expert",), (), ("dense",), ()), constant=True),
    "bf16": Plan(((),) * 3, dtype=torch.bfloat16),
    "one optimizer": Plan(((), ("dense",), (), ()), layers=("dense",)),
}
ALONE = Plan(((), (), ("dense",), (), (), ()))


def _control(rank: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    runs, bits = {}, {}
    for name, plan in CONTROL_PLANS.items():
        for variation in _both(plan):
            run = Run(variation, rank)
            runs[f"{variation.name}, {name}"] = _take(run, foretell(variation, _fresh(variation)))
            bits[f"{variation.name}, {name}"] = run.digest()
    for variation in _both(ALONE):
        run, runs[f"{variation.name}, by itself"] = _alone(rank, variation)
        bits[f"{variation.name}, by itself"] = run.digest()
    parallel_state.destroy_model_parallel()
    loaded = _load(rank, plan=Plan(QUIET, expert_parallel=2, hysteresis=2), drifts=EQUAL)
    trained = _evidence(runs)
    return {**trained, "steps": {**trained["steps"], **loaded["steps"]}, "bits": {**bits, **loaded["bits"]}}


def _expected_norm(evidence: Sequence[dict[str, Any]], name: str) -> float:
    """Over the dense layer once and each expert once, however many ranks hold a copy."""
    squares = {
        (layer, rank["ep_rank"] if layer == "expert" else 0): square
        for rank in evidence
        for layer, square in rank["steps"][name]["expected_squares"].items()
    }
    return math.sqrt(sum(squares.values()))


def judge(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if a scaler is not what was foretold, a step was taken by some only, or a gradient or norm is wrong.

    Args:
        evidence: From each rank, in order: ``ep_rank`` and ``steps``, name to a report of ``Run.step`` with what
            was ``foretold`` of it.
    """
    names = list(evidence[0]["steps"])
    scales, factors, faults = 0, [], 0
    for name in names:
        steps = [rank["steps"][name] for rank in evidence]
        apart = any(scaler != step["foretold"]["scaler"] for step in steps for scaler in step["scalers"])
        other = any(
            "taken" in step and (step["taken"] != step["foretold"]["taken"] or any(step["moved"]) != step["taken"])
            for step in steps
        )
        off = [gradient["factor"] for s in steps for gradient in s.get("gradients", {}).values() if gradient["wrong"]]
        norm = False
        if "norm" in steps[0]:
            expected = _expected_norm(evidence, name)
            norm = any(not abs(step["norm"] - expected) <= TOLERANCE * expected for step in steps)
        scales += apart
        factors += off
        faults += apart or other or norm or bool(off)
    if not faults:
        return Judgement("clean", f"one loss scale and right gradients in {len(names)} of {len(names)} steps")
    wrong = f", gradients off by factors from {min(factors):g} to {max(factors):g}" if factors else ""
    return Judgement("defect", f"{faults} of {len(names)} steps wrong (scales apart in {scales}{wrong})")


PROOF = Proof(
    "MF0006",
    (
        Case("expert overflows", "gloo", 1, partial(_train, plan=Plan(((), ("expert",), (), (), ()))), judge),
        Case("dense overflows", "gloo", 1, partial(_train, plan=Plan(((), ("dense",), (), (), ()))), judge),
        Case(
            "one rank's expert overflows",
            "gloo",
            4,
            partial(
                _train,
                plan=Plan(((), ("expert",), (), ("expert",), (), (), ()), on_rank=3, expert_parallel=2, hysteresis=2),
            ),
            judge,
        ),
        Case(
            "scales in a checkpoint differ",
            "gloo",
            1,
            partial(_load, plan=Plan(QUIET, hysteresis=2), drifts=DRIFTS),
            judge,
        ),
        Case(
            "scales in a sharded state dict differ",
            "gloo",
            2,
            partial(_load, plan=Plan(QUIET[:3], hysteresis=2, expert_parallel=2), drifts=SHARDED_DRIFTS, sharded=True),
            judge,
        ),
        Case("one scaler in two optimizers", "gloo", 1, partial(_train, plan=Plan(QUIET), shared=True), judge),
        Case("control", "gloo", 2, _control, judge, control=True),
    ),
)
