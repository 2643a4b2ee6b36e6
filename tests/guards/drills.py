# SPDX-License-Identifier: Apache-2.0
"""What the tests of the guards run over one release, in a process of its own: ``drills.py TREE BACKEND DRILL…``.

Megatron is imported once, each drill forks its ranks, and what all of them found is printed as one JSON object. With
``MEGATRON_FIXES`` set, the overlay is on; the guards are installed by each drill itself. The back end is ``gloo`` or
``nccl``; with NCCL each rank has a GPU.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from megatron_fixes import events, guards
from megatron_fixes.errors import MegatronFixesError
from megatron_fixes.proofs.parent import prepare
from megatron_fixes.proofs.proof import Backend

DRILLS: dict[str, Any] = {}
# As DDP's own, and the watcher's of a device: long enough there for what a sound step queues.
DEADLINE_S = {"gloo": 0.7, "nccl": 2.0}
backend: Backend = "gloo"


def drill(function: Any) -> Any:
    DRILLS[function.__name__] = function
    return function


def each_rank(body: Any, ranks: int = 2, **more: Any) -> list[Any]:
    """What each rank returned, with the events it heard; None where it failed, and its log."""
    from megatron_fixes.proofs.world import run

    def heard(rank: int) -> Any:
        told: list[Any] = []
        events.subscribe(lambda event: told.append([event.name, event.message, dict(event.fields)]))
        return {"result": body(rank), "events": told}

    with tempfile.TemporaryDirectory() as folder:
        ended = run(heard, ranks, Path(folder), backend=backend, **more)
    return [rank.result or {"result": None, "events": [], "log": rank.log[-3000:]} for rank in ended]


def guarded(**bodies: Any) -> dict[str, Any]:
    """What each rank returned of each body, one after the other, under guards with a short deadline."""
    guards.install(deadline_s=DEADLINE_S[backend])
    result = {name: each_rank(body) for name, body in bodies.items()}
    guards.uninstall()
    return result


def model(**more: Any) -> Any:
    """Model parallelism, and real DDP over two layers with a bomb between them, a bucket a parameter."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    return wrapped_model(**more)


def wrapped_model(bucket_size: int = 1, instances: int = 1, **more: Any) -> Any:
    import torch

    from megatron_fixes.proofs.ddp import transformer_config, wrap
    from megatron_fixes.proofs.mf0002 import _Model

    module = _Model().to(torch.cuda.current_device())
    return wrap(module, transformer_config(), instances=instances, bucket_size=bucket_size, **more)


def step(ddp: Any, rank: int, number: int, between: Any = lambda: None) -> str:
    """A whole step; a digest of every rank's own gradients."""
    from megatron_fixes.proofs.ddp import batch, mean_square

    ddp.zero_grad_buffer()
    mean_square(ddp, batch(rank, number, 8)).backward()
    between()
    ddp.finish_grad_sync()
    return hashlib.sha256(b"".join(buffer.grad_data.cpu().numpy().tobytes() for buffer in ddp.buffers)).hexdigest()


def attributes() -> dict[str, Any]:
    """Every object that an attach point names, as it is in place."""
    from megatron_fixes.guards.attach import find
    from megatron_fixes.guards.points import POINTS

    places = [(point.qualname, find(point)) for point in POINTS]
    return {name: place.get() for name, place in places if place is not None}


@drill
def identity() -> Any:
    before = attributes()
    first = guards.install()
    once = attributes()
    second = guards.install(["lifecycle", "teardown"])
    twice = attributes()
    guards.uninstall()
    after = attributes()
    guards.uninstall()
    return {
        "installed": first.installed,
        "points": first.points,
        "second": second.points == first.points and all(once[name] is twice[name] for name in once),
        "changed": sorted(name for name in before if before[name] is not once[name]),
        "put_back": all(before[name] is after[name] for name in before),
        "after": guards.status().points,
    }


@drill
def gradients() -> Any:
    """The same steps without guards, with them, and with a deadline; and what is tracked in a step."""

    def body(rank: int) -> Any:
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel()
        return {name: steps(rank, install) for name, install in phases.items()}

    def steps(rank: int, install: Any) -> Any:
        install()
        seen: list[Any] = []
        ddp = wrapped_model()
        digests = [
            step(ddp, rank, n, lambda: seen.append([[one.kind, one.place] for one in guards.outstanding()]))
            for n in range(3)
        ]
        return {"digests": digests, "tracked": seen, "left": len(guards.outstanding())}

    phases = {"plain": guards.uninstall, "guarded": guards.install, "bounded": partial(guards.install, deadline_s=20.0)}
    return each_rank(body)


@drill
def abandoned() -> Any:
    """Steps of which the second is abandoned after its first bucket was dispatched, against the reference."""
    from megatron.core import parallel_state

    from megatron_fixes.proofs.mf0002 import _recovery

    def both(rank: int) -> Any:
        return _recovery(rank, situations=("hooks", "no distributed optimizer", "schedule"))["situations"]

    def alone(rank: int) -> Any:
        """One rank abandons a step, its peer finishes it."""
        from megatron_fixes.proofs.mf0002 import _abandon, batch

        parallel_state.destroy_model_parallel()
        ddp = model()
        step(ddp, rank, 0)
        if rank == 0:
            ddp.zero_grad_buffer()
            _abandon(ddp, batch(rank, 1, 8), "hooks")
            began = time.monotonic()
            try:
                ddp.zero_grad_buffer()
            except (MegatronFixesError, RuntimeError) as error:
                return [type(error).__name__, str(error), time.monotonic() - began]
            return None
        time.sleep(1.5)
        return None

    return guarded(both=both, alone=alone)


@drill
def first_batch() -> Any:
    """Steps after a first batch that was abandoned within, or after, its backward pass; and without one."""

    def body(rank: int) -> Any:
        from megatron.core import parallel_state

        from megatron_fixes.proofs.mf0002 import _abandon, batch

        parallel_state.initialize_model_parallel()
        digests = {}
        for name in ("whole", "within", "after"):
            # All parameters in one bucket, of which a step that ends half-way counts half.
            ddp = wrapped_model(10**6)
            if name != "whole":
                ddp.zero_grad_buffer()
                _abandon(ddp, batch(rank, 9, 8), "hooks", armed=name == "within")
            digests[name] = [step(ddp, rank, number) for number in range(3)]
        return digests

    def alone(rank: int) -> Any:
        """Both ranks abandon the first batch, then one of them alone."""
        from megatron_fixes.proofs.mf0002 import _abandon, batch

        ddp = model()
        for _ in range(2 - rank):
            ddp.zero_grad_buffer()
            _abandon(ddp, batch(rank, 9, 8), "hooks")
        try:
            ddp.zero_grad_buffer()
        except MegatronFixesError as error:
            return str(error)
        time.sleep(1.5)
        return None

    return guarded(both=body, alone=alone)


@drill
def late() -> Any:
    """A peer that comes late to a reduction."""

    def body(rank: int) -> Any:
        ddp = model()
        step(ddp, rank, 0)
        if rank == 1:
            time.sleep(2.0)
        began = time.monotonic()
        try:
            step(ddp, rank, 1)
        except (MegatronFixesError, RuntimeError) as error:
            return [type(error).__name__, str(error), getattr(error, "missing", None), time.monotonic() - began]
        return None

    guards.install(deadline_s=0.4)
    result = each_rank(body)
    guards.uninstall()
    return result


@drill
def hung() -> Any:
    """A peer that comes late to a reduction on a device, without an end; and what the host sees of an abort."""
    import torch
    from megatron.core import parallel_state

    from megatron_fixes.proofs.world import finish, stay

    def body(rank: int, comes_s: float | None, instances: int) -> Any:
        parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
        ddp = wrapped_model(instances=instances)
        step(ddp, rank, 0)
        if rank == 1 and comes_s is None:
            return stay([0])
        time.sleep(rank * (comes_s or 0.0))
        said, seconds = [], []
        for number in (1, 2):
            began = time.monotonic()
            try:
                step(ddp, rank, number)
                torch.cuda.synchronize()
                said.append("no error")
            except (MegatronFixesError, RuntimeError, ValueError) as error:
                said.append(f"{type(error).__name__}: {error}")
            seconds.append(time.monotonic() - began)
        finish(rank)
        return {"said": said, "seconds": seconds}

    result = {}
    late_s = 2 * DEADLINE_S[backend] + 1.0
    for name, comes_s, instances in (("late", late_s, 1), ("never", None, 1), ("never, several", None, 2)):
        guards.install(deadline_s=DEADLINE_S[backend], abort=comes_s is None)
        result[name] = each_rank(partial(body, comes_s=comes_s, instances=instances))
        guards.uninstall()
    return result


@drill
def side_stream() -> Any:
    """What the proof of MF0001 does on two GPUs, without guards and with them."""
    from megatron_fixes.proofs.mf0001 import _wrong_gradients

    def body(rank: int, guarded: bool) -> Any:
        if guarded:
            guards.install(["streams"])
        return _wrong_gradients(rank)

    return {name: each_rank(partial(body, guarded=name == "guarded"), within_s=60.0) for name in ("plain", "guarded")}


@drill
def recovered() -> Any:
    """What the proof of MF0002 does after a step that all ranks abandoned."""
    from megatron_fixes.proofs.mf0002 import _recovery

    return guarded(both=partial(_recovery, situations=("dense", "no distributed optimizer", "schedule")))


@drill
def undispatched() -> Any:
    """A parameter that a step does not use, with one and with two distributed-optimizer instances."""
    import torch
    from megatron.core import parallel_state

    from megatron_fixes.proofs.ddp import batch, mean_square, transformer_config, wrap

    def body(rank: int, instances: int) -> Any:
        parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
        torch.manual_seed(1)
        layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        ddp = wrap(layers, transformer_config(), instances=instances, bucket_size=1)
        ended = []
        for number in range(3):
            # Some code zeroes by hand; what was dispatched ends with finish_grad_sync there too.
            for part in (*ddp.buffers, *ddp.bucket_groups):
                part.reset()
            used = ddp if number < 2 else layers[0]
            mean_square(used, batch(rank, number, 8)).backward()
            try:
                ddp.finish_grad_sync()
                ended.append("finished")
            except (AssertionError, RuntimeError) as error:
                ended.append(type(error).__name__)
        return ended

    guards.install()
    result = [each_rank(partial(body, instances=instances)) for instances in (1, 2)]
    guards.uninstall()
    return result


@drill
def streams() -> Any:
    """Two steps on a side stream, two distributed-optimizer instances, under the happens-before recorder."""
    from megatron_fixes.proofs.mf0001 import _record

    guards.install(["streams"])
    result = each_rank(_record, ranks=4)
    guards.uninstall()
    return result


@drill
def teardown() -> Any:
    from megatron.core import parallel_state
    from torch.distributed import distributed_c10d as c10d

    def body(rank: int) -> Any:
        import torch.distributed as dist

        before = len(c10d._world.pg_map)
        # gloo's reduce-scatter never says that it is complete.
        ddp = model(distributed_optimizer=False)
        step(ddp, rank, 0)
        ddp.zero_grad_buffer()
        keeps_groups = not hasattr(parallel_state, "_destroy_created_groups")
        if keeps_groups and rank == 1:
            time.sleep(0.5)
        ddp.start_grad_sync()
        outstanding = [one.handle for one in guards.outstanding()]
        if not keeps_groups:
            # gloo: a peer may still use a group that is destroyed here.
            dist.barrier()
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_model_parallel()
        complete = all(work.is_completed() for handle in outstanding for work in handle.works)
        return {"outstanding": len(outstanding), "complete": complete, "left": len(c10d._world.pg_map) - before}

    guards.install()
    result = each_rank(body)
    guards.uninstall()
    return result


def main(arguments: list[str]) -> int:
    global backend
    tree, backend, *names = arguments  # type: ignore[assignment]
    logging.getLogger("megatron_fixes").propagate = False
    logging.getLogger("megatron_fixes").addHandler(logging.NullHandler())
    prepare(Path(tree), backend)
    import megatron.core.distributed

    assert Path(tree) in Path(megatron.core.distributed.__file__).parents
    sys.stdout.write(json.dumps({name: DRILLS[name]() for name in names}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
