# SPDX-License-Identifier: Apache-2.0
"""Proof of MF0010: what a layout left in parallel_state and in the MoE logging answers for the next layout.

Guards: after ``destroy_model_parallel`` the module holds what it held at import; in the layout that follows, each query
of ``parallel_state`` answers as it does in that layout in a process that had no other before; and the auxiliary
losses of a deeper model are logged.

One case on 4 ranks: four pipeline stages first, whose answers are the reference; then a layout with experts,
hierarchical and hybrid context parallelism; then the four stages again, with more layers.

Left out: the process groups themselves (MF0005), and what others keep of a layout.
"""

from __future__ import annotations

import copy
import inspect
import types
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker

from megatron_fixes.proofs.layouts import RICH, initialize
from megatron_fixes.proofs.proof import Case, Judgement, Proof

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

STAGES: dict[str, Any] = {"pipeline_model_parallel_size": 4}
SHALLOW, DEEP = 2, 6
# gloo takes 10 ms to end the threads of a group when its last reference goes; these end with the process.
_kept: list[Any] = []


def _initialize(layout: dict[str, Any]) -> None:
    initialize(layout)
    _kept.extend(dist.distributed_c10d._world.pg_map)


def _destroy() -> None:
    """Destroy once all ranks have come so far: a peer may be connecting a group still."""
    dist.barrier()
    parallel_state.destroy_model_parallel()


def _state() -> dict[str, Any]:
    """What the module holds beside its functions, classes and modules, copied."""
    kinds = (types.ModuleType, type)
    return {
        name: copy.copy(value) if isinstance(value, (list, dict)) else value
        for name, value in vars(parallel_state).items()
        if not name.startswith("__") and not callable(value) and not isinstance(value, kinds)
    }


def _plain(value: Any) -> Any:
    """An answer in words: groups by their ranks, and whether c10d holds them."""
    if isinstance(value, dist.ProcessGroup):
        if value not in dist.distributed_c10d._world.pg_map:
            return "destroyed group"
        return f"group {value.group_desc} of {dist.get_process_group_ranks(value)}"
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def _answer(query: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    try:
        return _plain(query(*arguments, **named))
    except Exception as error:  # noqa: BLE001 - a refusal is an answer
        return type(error).__name__


def _answers() -> dict[str, Any]:
    """What every query of the module that needs no argument answers, and what a layout's optional groups are."""
    answers = {}
    for name, query in list(vars(parallel_state).items()):
        if name.startswith(("get_", "is_", "model_parallel_is")) and inspect.isfunction(query):
            needed = [p for p in inspect.signature(query).parameters.values() if p.default is p.empty]
            if not needed:
                answers[name] = _answer(query)
    partial = _answer(parallel_state.get_data_parallel_group, with_context_parallel=True, partial_data_parallel=True)
    answers["get_data_parallel_group (partial)"] = partial
    answers["is_rank_in_embedding_group (any stage)"] = _answer(
        parallel_state.is_rank_in_embedding_group, ignore_virtual=True
    )
    if hybrid := getattr(parallel_state, "get_hybrid_data_context_parallel_groups", None):
        answers["get_hybrid_data_context_parallel_groups (2)"] = _answer(hybrid, group_size=2)
    return answers


def _log(layers: int) -> list[str]:
    """Log an auxiliary loss of each layer of a model; what was raised, if anything."""
    try:
        for layer in range(1, layers + 1):
            group = parallel_state.get_tensor_and_context_parallel_group()
            save_to_aux_losses_tracker("load_balancing_loss", torch.ones(()), layer, layers, reduce_group=group)
    except IndexError as error:
        return [f"{type(error).__name__}: {error}"]
    return []


def _differing(seen: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {seen.get(name)}, expected {expected[name]}" for name in expected if seen.get(name) != expected[name]
    ]


def _round(layout: dict[str, Any], state: dict[str, Any], layers: int) -> tuple[dict[str, Any], list[str], list[str]]:
    """Initialise, ask, log and destroy: the answers, what logging raised, and the names left in the module."""
    _initialize(layout)
    answers, raised = _answers(), _log(layers)
    _destroy()
    after = _state()
    return answers, raised, [name for name in state if name not in after or after[name] != state[name]]


def _run(rank: int) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state, nothing = _state(), _answers()
        expected, *first = _round(STAGES, state, SHALLOW)
        uninitialised = _differing(_answers(), nothing)
        _, *second = _round(RICH, state, SHALLOW)
        answers, *third = _round(STAGES, state, DEEP)
    return {
        "left": sorted({name for _, left in (first, second, third) for name in left}),
        "answers": _differing(answers, expected) + uninitialised,
        "raised": first[0] + second[0] + third[0],
    }


def judge(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if on any rank the module kept something, a query answered otherwise, or logging failed.

    Args:
        evidence: From each rank: ``left``, names; ``answers`` and ``raised``, sentences.
    """
    left = sorted({name for seen in evidence for name in seen["left"]})
    faults = [
        f"rank {rank}: {fault}"
        for what in ("raised", "answers")
        for rank, seen in enumerate(evidence)
        for fault in seen[what]
    ]
    if left or faults:
        first = faults[0] if faults else f"{left[0]} is kept"
        return Judgement("defect", f"{len(left)} names keep a layout, {len(faults)} wrong answers, such as {first}")
    return Judgement("clean", f"nothing is kept, and every query answers as at first on {len(evidence)} ranks")


PROOF = Proof("MF0010", (Case("next layout", "gloo", 4, _run, judge),))
