# SPDX-License-Identifier: Apache-2.0
"""Proof of MF0005: destroy_model_parallel forgets its process groups, and c10d keeps them.

Guards: after ``destroy_model_parallel`` c10d holds the groups that it held before ``initialize_model_parallel``,
and every other group is as it was.

* ``rounds`` (2 ranks): the number of groups that c10d holds stays the same over 10 rounds, each of five layouts twice.
* ``each-once`` (4 ranks): each group is destroyed once, the newest first on every rank, also where the
  initialisation failed halfway; groups of others are left alone, and none is left in the list of the timeouts.
* ``errors`` (4 ranks): groups whose destruction raises are named in the log; the others are destroyed, and the
  module is as after any destroy.
* ``control`` (4 ranks): what works on every release: groups of others, groups that others destroyed first, a
  second destroy, and collectives on every group after each initialisation.
* ``sharded-tensors`` (2 ranks): a DTensor over the same ranks in the next round. DTensor remembers what it worked
  out for a layout of ranks, with the names of groups in it, which must not outlive the groups.
* ``nccl-rounds``, on two GPUs (NCCL): the number of groups and the device memory stay the same from round to round,
  groups having communicators. ``MF0005_NCCL_ROUNDS`` in the environment sets the number of rounds. In more than 10,
  a quarter of the groups has a communicator in each round, by turns: ending one takes NCCL 0.4 s.

Creation and destruction are watched where Megatron calls torch, so what a patch remembers is not what it is
judged by. Left out: objects that hold a group of their own past ``destroy_model_parallel``.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from megatron_fixes.proofs.proof import Case, Judgement, Proof

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ROUNDS = 10
NCCL_ROUNDS, NCCL_WARM_UP = int(os.environ.get("MF0005_NCCL_ROUNDS", "3")), 1
# What may differ from round to round without growing; the defect costs GiB a round.
NCCL_SLACK_BYTES = 256 * 2**20

# Names that a release doesn't know are left out.
SMALL_LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tensor_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
    {"context_parallel_size": 2, "hierarchical_context_parallel_sizes": [1, 2]},
    {"expert_model_parallel_size": 2},
    {"num_distributed_optimizer_instances": 2, "create_all_gather_group": True},
)
LAYOUTS: tuple[dict[str, Any], ...] = (
    {
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 2,
        "hierarchical_context_parallel_sizes": [1, 2],
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "num_distributed_optimizer_instances": 2,
    },
    {"pipeline_model_parallel_size": 4},
    {
        "expert_model_parallel_size": 2,
        "num_distributed_optimizer_instances": 2,
        "hybrid_context_parallel": True,
        "create_all_gather_group": True,
    },
)
# Those that releases as published destroy by name, with groups before, between and after them.
UNDESTROYABLE = [
    "DATA_PARALLEL_GROUP_WITH_CP_GLOO",
    "DATA_PARALLEL_GROUP_GLOO",
    "TENSOR_MODEL_PARALLEL_GROUP",
    "EXPERT_DATA_PARALLEL_GROUP_GLOO",
]
if hasattr(parallel_state, "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"):  # Since 0.13 experts have instances too.
    UNDESTROYABLE += ["HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_GLOO_L0", "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"]

# gloo takes 10 ms to end the threads of a group when its last reference goes; these end with the process.
_kept: list[Any] = []


def _held() -> dict[Any, Any]:
    """The groups that c10d holds on this rank."""
    groups: dict[Any, Any] = dist.distributed_c10d._world.pg_map
    return groups


def _initialize(layout: dict[str, Any]) -> None:
    known = inspect.signature(parallel_state.initialize_model_parallel).parameters
    try:
        parallel_state.initialize_model_parallel(**{name: value for name, value in layout.items() if name in known})
    finally:
        if dist.get_backend() == "gloo":
            _kept.extend(_held())


def _destroy() -> None:
    """Destroy once all ranks have come so far.

    A rank that is done with a group may find a peer connecting it still; gloo then fails at the peer. That is so for
    any use of ``destroy_process_group``.
    """
    dist.barrier()
    parallel_state.destroy_model_parallel()


class _Watch:
    """Hears every group made and every destruction asked for through ``torch.distributed``, while it is entered.

    Attributes:
        made: The groups that this rank is a member of, by number; numbers go up, and are the same on all ranks.
        descriptions: What each is for, by number.
        asked: Numbers in the order in which their destruction was asked for; -1 for groups made elsewhere.
        undestroyable: Groups described so can't be destroyed: asking raises.
    """

    def __init__(self) -> None:
        self.made: dict[int, Any] = {}
        self.descriptions: dict[int, str] = {}
        self.asked: list[int] = []
        self.undestroyable: Sequence[str] = ()
        self._numbers = itertools.count()
        self._new_group, self._destroy_process_group = dist.new_group, dist.destroy_process_group

    def __enter__(self) -> _Watch:
        dist.new_group, dist.destroy_process_group = self._new, self._destroy
        return self

    def __exit__(self, *_: object) -> None:
        dist.new_group, dist.destroy_process_group = self._new_group, self._destroy_process_group

    def _new(self, *args: Any, **kwargs: Any) -> Any:
        number, group = next(self._numbers), self._new_group(*args, **kwargs)
        if group in _held():
            self.made[number] = group
            self.descriptions[number] = str(kwargs.get("group_desc"))
        return group

    def _destroy(self, group: Any = None) -> None:
        number = next((number for number, made in self.made.items() if made is group), -1)
        self.asked.append(number)
        if self.descriptions.get(number) in self.undestroyable:
            raise RuntimeError("this group can't be destroyed")
        self._destroy_process_group(group)

    def left(self) -> list[str]:
        """What those of the made groups are for that c10d still holds."""
        return [self.descriptions[number] for number, group in self.made.items() if group in _held()]


def _named(groups: Sequence[Any]) -> list[str]:
    """The names of the module that stand for one of these groups."""
    return [name for name, value in vars(parallel_state).items() if any(value is group for group in groups)]


def _raises(action: Callable[[], None]) -> list[str]:
    """What a call raised, if anything."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - any is evidence
        return [f"{type(error).__name__}: {error}"]
    return []


def _reduces(groups: Sequence[Any]) -> list[str]:
    """Reduce over each group, in the same order on all ranks; what went wrong."""
    wrong = []
    for number, group in enumerate(groups):
        value = torch.ones(1)
        dist.all_reduce(value, group=group)
        if value.item() != dist.get_world_size(group):
            wrong.append(f"sum over group {number}: got {value.item():g}, expected {dist.get_world_size(group)}")
    return wrong


def _faults_of_destroy(watch: _Watch) -> list[str]:
    """Destroy; what is wrong with how that went."""
    expected = [number for number in sorted(watch.made, reverse=True) if watch.made[number] in _held()]
    watch.asked.clear()
    faults = _raises(_destroy)
    left = [name for name in watch.left() if name not in watch.undestroyable]
    if left:
        faults.append(f"{len(left)} of {len(watch.made)} groups are left, such as {left[0]}")
    if watch.asked != expected:
        faults.append(f"groups {watch.asked} were destroyed in this order, expected {expected}")
    if names := _named(list(watch.made.values())):
        faults.append(f"destroyed groups still have the names {', '.join(names)}")
    if parallel_state.is_initialized():
        faults.append("is_initialized() after destroy_model_parallel")
    listed = getattr(parallel_state, "_global_process_group_list", None) or []
    if any(group is not None and group not in _held() for group in listed):
        faults.append("destroyed groups are listed for update_pg_timeout")
    return faults


def _rounds(rank: int) -> dict[str, Any]:
    counts = [len(_held())]
    for number in range(1, ROUNDS + 1):
        _initialize(SMALL_LAYOUTS[number % len(SMALL_LAYOUTS)])
        _destroy()
        counts.append(len(_held()))
    return {"groups": counts}


def judge_rounds(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if the number of groups changed on any rank."""
    for rank, seen in enumerate(evidence):
        counts = seen["groups"]
        if set(counts) != {counts[0]}:
            several = " -> ".join(str(count) for count in counts[:4])
            return Judgement("defect", f"rank {rank}: groups held by c10d after each round: {several} …")
    rounds = len(evidence[0]["groups"]) - 1
    return Judgement("clean", f"{rounds} rounds: c10d holds as many groups as before on {len(evidence)} ranks")


class _RefusedError(Exception):
    """Ends an initialisation halfway, when the groups of data and tensor parallelism are made."""


def _refuse(*_: Any) -> list[int]:
    raise _RefusedError


def _each_once(rank: int) -> dict[str, Any]:
    mine = [dist.new_group(), parallel_state.create_group(list(range(dist.get_world_size())))]
    steps: dict[str, list[str]] = {}
    for number, layout in enumerate(LAYOUTS):
        with _Watch() as watch:
            _initialize(layout)
            steps[f"layout {number}"] = _faults_of_destroy(watch)
    with _Watch() as watch:
        try:
            _initialize({"get_embedding_ranks": _refuse})
        except _RefusedError:
            steps["refused halfway"] = _faults_of_destroy(watch)
        else:
            raise RuntimeError("the release did not ask which ranks have an embedding")
    with _Watch() as watch:
        _initialize(LAYOUTS[0])
        dist.barrier()
        for group in (parallel_state.get_tensor_model_parallel_group(), parallel_state.get_data_parallel_group_gloo()):
            dist.destroy_process_group(group)
        steps["two destroyed before"] = _faults_of_destroy(watch)
    steps["others"] = _reduces([None, *mine])
    return {"steps": steps}


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _errors(rank: int) -> dict[str, Any]:
    messages = _Messages()
    logging.getLogger().addHandler(messages)
    with _Watch() as watch:
        watch.undestroyable = UNDESTROYABLE
        _initialize(LAYOUTS[0])
        missing = set(UNDESTROYABLE) - set(watch.descriptions.values())
        if missing:
            raise RuntimeError(f"the release makes no group for {', '.join(sorted(missing))}")
        faults = _faults_of_destroy(watch)
        faults += [
            f"no word of {description}"
            for description in UNDESTROYABLE
            if not any(text.endswith(f" {description}") for text in messages.texts)
        ]
    with _Watch() as watch:
        again = _raises(lambda: _initialize(LAYOUTS[0]))
        again += _reduces(list(watch.made.values())) + _faults_of_destroy(watch)
    return {"steps": {"undestroyable": faults, "the next round": again}}


def judge_steps(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if anything is wrong in any step on any rank."""
    for rank, seen in enumerate(evidence):
        for step, faults in seen["steps"].items():
            if faults:
                return Judgement("defect", f"rank {rank}, {step}: {faults[0]}")
    return Judgement("clean", f"{len(evidence[0]['steps'])} steps on {len(evidence)} ranks, nothing wrong")


def _control(rank: int) -> dict[str, Any]:
    world = list(range(dist.get_world_size()))
    store = dist.distributed_c10d._get_default_store()
    mine = [dist.new_group(), parallel_state.create_group(world), dist.new_group(backend="gloo")]
    steps: dict[str, list[str]] = {"never initialised": _raises(_destroy)}
    for number, layout in enumerate(LAYOUTS):
        with _Watch() as watch:
            _initialize(layout)
        faults = _reduces(list(watch.made.values()))
        if hasattr(parallel_state, "update_pg_timeout"):
            faults += _raises(lambda: parallel_state.update_pg_timeout(timedelta(seconds=60)))
        if number == 1:
            # A user's group under one of Megatron's names; Megatron's own is gone already.
            dist.barrier()
            dist.destroy_process_group(parallel_state._TENSOR_MODEL_PARALLEL_GROUP)
            dist.destroy_process_group(parallel_state._DATA_PARALLEL_GROUP_GLOO)
            parallel_state._TENSOR_MODEL_PARALLEL_GROUP = mine[0]
            parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = dist.group.WORLD
        faults += _raises(_destroy) + _raises(_destroy)
        steps[f"layout {number}"] = faults + _reduces([None, *mine])
    _initialize(LAYOUTS[0])
    dist.barrier()
    dist.destroy_process_group()
    faults = _raises(parallel_state.destroy_model_parallel)
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=len(world))
    with _Watch() as watch:
        _initialize(LAYOUTS[0])
    steps["all destroyed before"] = faults + _reduces([None, *watch.made.values()])
    return {"steps": steps}


def _sharded_tensors(rank: int) -> dict[str, Any]:
    steps = {}
    for step in ("first round", "second round"):
        _initialize({"tensor_model_parallel_size": 2})
        mesh = DeviceMesh.from_group(parallel_state.get_tensor_model_parallel_group(), "cpu")
        groups: list[Any] = []

        def compute(mesh: DeviceMesh = mesh, groups: list[Any] = groups) -> None:
            image = DTensor.from_local(torch.ones(1, 1, 4, 4), mesh, [Shard(3)])
            kernel = DTensor.from_local(torch.ones(1, 1, 3, 3), mesh, [Replicate()])
            # DTensor has two caches; the convolution takes the one that most operators don't.
            for result in (image + image, torch.nn.functional.conv2d(image, kernel, padding=1)):
                groups.append(result.device_mesh.get_group())

        steps[step] = _raises(compute) + _reduces(groups)
        _destroy()
    return {"steps": steps}


def _nccl_rounds(rank: int) -> dict[str, Any]:
    counts, used = [], []
    turns = 1 if NCCL_ROUNDS <= 10 else 4
    for number in range(NCCL_ROUNDS):
        with _Watch() as watch:
            _initialize({})
        for group in list(watch.made.values())[number % turns :: turns]:
            dist.all_reduce(torch.ones(1, device="cpu" if dist.get_backend(group) == "gloo" else "cuda"), group=group)
        torch.cuda.synchronize()
        _destroy()
        dist.barrier()
        torch.cuda.synchronize()
        counts.append(len(_held()))
        free, total = torch.cuda.mem_get_info()
        used.append(total - free)
        if len(counts) > NCCL_WARM_UP + 1 and counts[-1] > counts[0]:
            break  # Shown; each further round would take GiB.
    return {"groups": counts, "used_bytes": used}


def judge_nccl_rounds(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if the number of groups, or the device memory by more than slack, grew on any rank after the warm-up."""
    if NCCL_ROUNDS <= NCCL_WARM_UP:
        return Judgement("not-runnable", f"{NCCL_ROUNDS} rounds, expected more than {NCCL_WARM_UP}")
    growths = [
        [max(seen[what][NCCL_WARM_UP:]) - seen[what][NCCL_WARM_UP - 1] for what in ("groups", "used_bytes")]
        for seen in evidence
    ]
    for rank, (groups, used_bytes) in enumerate(growths):
        if groups > 0 or used_bytes > NCCL_SLACK_BYTES:
            rounds = len(evidence[rank]["groups"]) - NCCL_WARM_UP
            summary = f"rank {rank}: {groups:+d} groups and {used_bytes / 2**20:+.0f} MiB of device memory"
            return Judgement("defect", f"{summary} in {rounds} rounds after the first")
    most = max(used_bytes for _, used_bytes in growths)
    return Judgement("clean", f"{NCCL_ROUNDS} rounds: never more groups, {most / 2**20:+.0f} MiB after the first round")


PROOF = Proof(
    "MF0005",
    (
        Case("rounds", "gloo", 2, _rounds, judge_rounds),
        Case("each-once", "gloo", 4, _each_once, judge_steps),
        Case("errors", "gloo", 4, _errors, judge_steps),
        Case("control", "gloo", 4, _control, judge_steps, control=True),
        Case("sharded-tensors", "gloo", 2, _sharded_tensors, judge_steps, control=True),
        Case("nccl-rounds", "nccl", 2, _nccl_rounds, judge_nccl_rounds, timeout_s=max(120.0, 30.0 * NCCL_ROUNDS)),
    ),
)
