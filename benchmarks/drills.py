#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What happens when collectives go wrong: bare torch.distributed beside ``AllReduceContext``, in the same drills.

``python benchmarks/drills.py [--backend nccl] [--markdown] [DRILL …]``. Each drill runs on two real ranks (gloo over
loopback, or NCCL with a GPU each) twice: as code on torch alone is usually written, and with a context or ``groups``.
With NCCL the host then waits for the device, as a step does that reads its loss. The process groups' own timeout is
8 s, the context's deadline 1 s. Told is how each rank ended: what it returned or raised, after how many seconds, or
that a signal killed it, or that it was still running at the end. ``tests/collectives`` holds what the second column
must be.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fixes.collectives import AllReduceContext, groups
from megatron_fixes.proofs.proof import Backend
from megatron_fixes.proofs.world import Ended, run

TIMEOUT_S, DEADLINE_S, END_S = 8.0, 1.0, 20.0
HERE = str(Path(__file__).parent) + os.sep
Body = Callable[[int], Any]


@dataclass(frozen=True)
class Drill:
    """One thing that goes wrong, without and with us."""

    name: str
    bare: Body
    ours: Body
    ranks: int = 2


def ones(count: int = 4) -> torch.Tensor:
    """Something to reduce."""
    return torch.ones(count, device="cuda" if dist.get_backend() == "nccl" else "cpu")


def pair() -> Any:
    """A process group of both ranks that has been used: NCCL connects in the first collective, and blocks the host."""
    group = dist.new_group([0, 1])
    dist.all_reduce(ones(), group=group)
    return group


def told(call: Callable[[], Any]) -> str:
    """What a call ended with."""
    try:
        value = call()
        if dist.is_initialized() and dist.get_backend() == "nccl":
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what we want to know
        first = str(error).replace(HERE, "").splitlines()[0] if str(error) else ""
        return f"{type(error).__name__}: {first[:200]}"
    return f"no error{'' if value is None else f': {value}'}"


def stop_when(rank: int, which: int, how: signal.Signals) -> None:
    """Send this rank a signal if it is the one."""
    if rank == which:
        os.kill(os.getpid(), how)


def destroyed_bare(rank: int) -> Any:
    """A group is destroyed while a collective on it is under way, and used afterwards."""
    group = pair()
    work = dist.all_reduce(ones(), group=group, async_op=True) if rank == 0 else None
    dist.destroy_process_group(group)
    return [told(work.wait) if work else "", told(lambda: dist.all_reduce(ones(), group=group))]


def destroyed_ours(rank: int) -> Any:
    """The same with us."""
    group = pair()
    context = AllReduceContext(group, deadline_s=DEADLINE_S)
    if rank == 0:
        context.all_reduce(ones())
    dist.destroy_process_group(group)
    return [told(context.wait) if rank == 0 else "", told(lambda: context.all_reduce(ones()))]


def one_rank_bare(rank: int) -> Any:
    """One rank destroys the group; the other goes on to use it."""
    group = pair()
    if rank == 0:
        dist.destroy_process_group(group)
        time.sleep(TIMEOUT_S + 1)
        return "destroyed it"
    return told(lambda: dist.all_reduce(ones(), group=group))


def one_rank_ours(rank: int) -> Any:
    """The same with us."""
    group = pair()
    if rank == 0:
        said = told(lambda: groups.destroy(group, agree_s=DEADLINE_S))
        time.sleep(TIMEOUT_S + 1)
        return said
    context = AllReduceContext(group, deadline_s=DEADLINE_S)
    context.all_reduce(ones())
    return told(context.close)


def exception_bare(rank: int) -> Any:
    """A run of collectives is left by an exception; then a step is tried."""
    try:
        with dist.distributed_c10d._coalescing_manager(async_ops=True):
            dist.all_reduce(ones())
            raise KeyError
    except KeyError:
        tensor = ones()
        error = told(lambda: dist.all_reduce(tensor))
    return f"next step: {error}, result {tensor.tolist()}, expected {[2.0] * 4}"


def exception_ours(rank: int) -> Any:
    """The same with us."""
    try:
        with AllReduceContext(deadline_s=DEADLINE_S) as context, context.coalesced() as run_:
            run_.all_reduce(ones())
            raise KeyError
    except KeyError:
        tensor = ones()
        with AllReduceContext(deadline_s=DEADLINE_S) as context:
            context.all_reduce(tensor)
    return f"next step: no error, result {tensor.tolist()}"


def alone_bare(rank: int) -> Any:
    """One rank alone leaves the step before its collective."""
    if rank == 1:
        time.sleep(TIMEOUT_S + 1)
        return "left the step"
    return told(lambda: dist.all_reduce(ones()))


def alone_ours(rank: int) -> Any:
    """The same with us."""
    if rank == 1:
        time.sleep(TIMEOUT_S + 1)
        return "left the step"
    context = AllReduceContext(deadline_s=DEADLINE_S)
    context.all_reduce(ones())
    return told(context.wait)


def _signalled(how: signal.Signals, *, ours: bool) -> Body:
    def body(rank: int) -> Any:
        context = AllReduceContext(deadline_s=DEADLINE_S)
        call = (lambda: context.all_reduce(ones()).wait()) if ours else (lambda: dist.all_reduce(ones()))
        call()
        stop_when(rank, 1, how)
        return told(call)

    return body


def orders_bare(rank: int) -> Any:
    """Ranks destroy their groups in different orders while a collective on one is under way."""
    made = [pair() for _ in range(2)]
    works = [dist.all_reduce(ones(), group=made[rank], async_op=True)]
    said = [told(lambda group=group: dist.destroy_process_group(group)) for group in (made if rank else made[::-1])]
    return [*said, told(works[0].wait)]


def orders_ours(rank: int) -> Any:
    """The same with us."""
    made = [pair() for _ in range(2)]
    context = AllReduceContext(made[rank], deadline_s=DEADLINE_S)
    context.all_reduce(ones())
    return told(lambda: groups.destroy_all(agree_s=2 * DEADLINE_S).destroyed)


def _fork(call: Callable[[], str]) -> list[Any]:
    """What a call ends with in a fork: its words, or that it hung for 3 s, or its exit code."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, call().encode())
        os._exit(0)
    end = time.monotonic() + 3
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return [os.waitstatus_to_exitcode(status), os.read(read, 300).decode() if status == 0 else ""]
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return ["hung", ""]


def fork_bare(rank: int) -> Any:
    """A fork uses the group of its parent while a collective is under way."""
    work = dist.all_reduce(ones(), async_op=True)
    child = _fork(lambda: told(lambda: dist.all_reduce(ones())))
    return [f"child: {child}", f"parent: {told(work.wait)}"]


def fork_ours(rank: int) -> Any:
    """The same with us."""
    context = AllReduceContext(deadline_s=DEADLINE_S)
    context.all_reduce(ones())
    child = _fork(lambda: told(lambda: context.all_reduce(ones())))
    return [f"child: {child}", f"parent: {told(context.close)}"]


def dropped_bare(rank: int) -> Any:
    """The only reference to the work is dropped."""
    dist.all_reduce(ones(), async_op=True)
    return "nothing said"


def dropped_ours(rank: int) -> Any:
    """The same with us."""
    from megatron_fixes.events import subscribe

    heard: list[str] = []
    subscribe(lambda event: heard.append(event.message))
    context: Any = AllReduceContext()
    context.all_reduce(ones())
    del context
    return [message.replace(HERE, "") for message in heard]


def sizes_bare(rank: int) -> Any:
    """Ranks reduce tensors of different sizes."""
    tensor = ones(4 - 2 * rank)
    return f"{told(lambda: dist.all_reduce(tensor))}, result {tensor.tolist()}"


def sizes_ours(rank: int) -> Any:
    """The same with us."""
    return told(lambda: AllReduceContext(checked=True).all_reduce(ones(4 - 2 * rank)))


DRILLS = (
    Drill("group destroyed under work", destroyed_bare, destroyed_ours),
    Drill("group destroyed on one rank only", one_rank_bare, one_rank_ours),
    Drill("exception inside a coalesced run", exception_bare, exception_ours),
    Drill("one rank leaves the step", alone_bare, alone_ours),
    Drill("rank killed (SIGKILL)", _signalled(signal.SIGKILL, ours=False), _signalled(signal.SIGKILL, ours=True)),
    Drill("rank stopped (SIGSTOP)", _signalled(signal.SIGSTOP, ours=False), _signalled(signal.SIGSTOP, ours=True)),
    Drill("groups destroyed in different orders", orders_bare, orders_ours),
    Drill("fork with work in flight", fork_bare, fork_ours),
    Drill("work dropped", dropped_bare, dropped_ours),
    Drill("different sizes", sizes_bare, sizes_ours),
)


def ending(rank: Ended) -> str:
    """How a rank ended, in words."""
    if rank.result is not None:
        words = rank.result if isinstance(rank.result, str) else "; ".join(filter(None, rank.result))
        return f"{words} ({rank.seconds:.1f} s)"
    if rank.code is None:
        return f"still running after {END_S:g} s"
    last = (rank.log.strip().splitlines() or [""])[-1][:160]
    return f"ended by {signal.Signals(-rank.code).name}" if rank.code < 0 else f"exit code {rank.code}: {last}"


def drill_once(body: Body, ranks: int, backend: Backend) -> list[str]:
    """Run one body on its ranks."""

    def connected(rank: int) -> Any:
        dist.all_reduce(ones())
        return body(rank)

    with tempfile.TemporaryDirectory(prefix="megatron-fixes-") as folder:
        ended = run(connected, ranks, Path(folder), group_timeout_s=TIMEOUT_S, within_s=END_S, backend=backend)
    return [ending(rank) for rank in ended]


def main(arguments: list[str]) -> int:
    """Run the drills and print what happened."""
    parser = argparse.ArgumentParser(description="what happens when collectives go wrong")
    parser.add_argument("drills", nargs="*", help="only those whose names contain one of these")
    parser.add_argument("--markdown", action="store_true", help="a table for the docs")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    options = parser.parse_args(arguments)
    report = {}
    for drill in DRILLS:
        if options.drills and not any(word in drill.name for word in options.drills):
            continue
        print(f"{drill.name} …", file=sys.stderr, flush=True)
        bare, ours = (drill_once(body, drill.ranks, options.backend) for body in (drill.bare, drill.ours))
        report[drill.name] = {"torch": bare, "megatron_fixes": ours}
    if not options.markdown:
        print(json.dumps(report, indent=1))
        return 0
    print("| drill | torch.distributed alone | with `megatron_fixes.collectives` |\n|---|---|---|")
    for name, row in report.items():
        cells = ["<br>".join(f"{rank}: {text}" for rank, text in enumerate(texts)) for texts in row.values()]
        print(f"| {name} | {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
