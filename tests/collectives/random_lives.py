# SPDX-License-Identifier: Apache-2.0
"""Carries out the plans of ``test_random_lives.py`` in a process of its own: ``random_lives.py FOLDER BACKEND PARENT``.

A process that has started CUDA can't fork ranks that use it, and pytest's may have; this one has not, so new ranks cost
no imports. Plans come as lines of JSON on standard input, and for each goes out a line that says for each rank what was
not as it must be. What ranks print is in the folder. Ends, and the ranks with it, with its input or its parent.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_fixes.collectives import AllReduceContext, ClosedContextError, GroupDestroyedError, groups
from megatron_fixes.collectives.registry import adrift
from megatron_fixes.proofs.ranks import ForkedRank, die_with
from megatron_fixes.proofs.rendezvous import join_store, keep_store

CONTEXTS, GROUPS, WORLD = 3, 2, 2
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "coalesced")
ANSWER_S = 60.0
# A child of a fork has nothing to do but to end.
CHILD_S = 20


class Life:
    """What one rank does with a plan, and what it expects."""

    def __init__(self, rank: int, world: list[Any], device: torch.device) -> None:
        self.rank, self.groups, self.device = rank, world, device
        self.contexts: list[Any] = [None] * CONTEXTS
        self.due: list[list[tuple[Any, torch.Tensor, list[float]]]] = [[] for _ in range(CONTEXTS)]
        self.faults: list[str] = []
        self.number = 0

    def expect(self, good: bool, fault: str) -> None:
        if not good:
            self.faults.append(fault)

    def context(self, index: int) -> Any:
        """The context at a place, made if there is none; None if its group is gone."""
        if self.contexts[index] is None:
            group = self.groups[index % GROUPS]
            try:
                self.contexts[index] = AllReduceContext(group, deadline_s=20.0)
                self.expect(alive(group), "a context was made on a group that is gone")
            except GroupDestroyedError:
                self.expect(not alive(group), "no context could be made on a group that lives")
        return self.contexts[index]

    def issue(self, kind: str, index: int) -> None:
        context, group = self.context(index), self.groups[index % GROUPS]
        if context is None:
            return
        self.number += 1
        value = float(self.number)
        mine = torch.full((2,), value * (self.rank + 1), device=self.device)
        try:
            if kind == "all_reduce":
                handle, result, right = context.all_reduce(mine), mine, [3 * value] * 2
            elif kind == "reduce_scatter":
                result, right = torch.empty(1, device=self.device), [3 * value]
                handle = context.reduce_scatter(result, mine)
            elif kind == "all_gather":
                result, right = torch.empty(4, device=self.device), [value] * 2 + [2 * value] * 2
                handle = context.all_gather(result, mine)
            else:
                with context.coalesced() as run:
                    run.all_reduce(mine)
                    run.all_reduce(torch.ones(1, device=self.device))
                handle, result, right = None, mine, [3 * value] * 2
            self.expect(alive(group) and not context.closed, f"{kind} went out on a closed context or a gone group")
            self.due[index].append((handle, result, right))
        except ClosedContextError:
            self.expect(context.closed, f"{kind}: told closed, is open")
        except GroupDestroyedError:
            self.expect(not alive(group), f"{kind}: told gone, lives")

    def settle(self, index: int) -> None:
        for _, result, right in self.due[index]:
            self.expect(result.tolist() == right, f"got {result.tolist()}, expected {right}")
        self.due[index].clear()

    def on_context(self, what: str, index: int) -> None:
        context = self.contexts[index]
        if context is None:
            return
        handles = [entry for entry in self.due[index] if entry[0] is not None]
        if what == "wait":
            context.wait()
            self.settle(index)
        elif what in ("wait first", "wait last") and handles:
            handle, result, right = handles[0 if what == "wait first" else -1]
            handle.wait()
            handle.wait()
            self.expect(result.tolist() == right, f"{what}: got {result.tolist()}, expected {right}")
        elif what == "close":
            context.close()
            context.close()
            self.settle(index)
        elif what == "raise":
            self.left_by_exception(context)
            self.settle(index)
        elif what == "fork":
            child = os.fork()
            if child == 0:
                signal.alarm(CHILD_S)
                self.contexts[index] = context = None
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            self.expect(code == 0, f"a fork ended with {code}")
        elif what in ("drop", "renew"):
            self.due[index].clear()
            self.contexts[index] = None
        if context is not None and what in ("wait", "close", "raise"):
            self.expect(not context.outstanding, f"outstanding after {what}")

    def left_by_exception(self, context: Any) -> None:
        closed = context.closed
        try:
            with context:
                self.expect(not closed, "a block began on a closed context")
                raise KeyError
        except ClosedContextError:
            self.expect(closed, "told closed at the beginning of a block, is open")
        except KeyError:
            self.expect(context.closed, "open after an exception left its block")

    def on_group(self, what: str, index: int) -> None:
        if what == "destroy group" and alive(self.groups[index]):
            groups.destroy(self.groups[index])
            for number in range(index, CONTEXTS, GROUPS):
                self.settle(number)
        elif what == "renew group" and not alive(self.groups[index]):
            self.groups[index] = dist.new_group(list(range(WORLD)))
            for number in range(index, CONTEXTS, GROUPS):
                self.contexts[number] = None
                self.due[number].clear()

    def live(self, plan: list[tuple[str, int]]) -> list[str]:
        for what, index in plan:
            if what == "late":
                time.sleep(0.002 * (self.rank == index))
            elif what in KINDS:
                self.issue(what, index)
            elif what in ("destroy group", "renew group"):
                self.on_group(what, index)
            else:
                self.on_context(what, index)
        for index in range(CONTEXTS):
            self.on_context("close", index)
            self.contexts[index] = None
        for index in range(GROUPS):
            self.on_group("renew group", index)
        dist.barrier(device_ids=[self.rank] if self.device.type == "cuda" else None)
        end = time.monotonic() + 10
        while (left := adrift()) and time.monotonic() < end:
            time.sleep(0.001)
        self.expect(not left, f"{left} collectives left")
        self.expect(len(c10d._world.pg_map) == GROUPS + 1, f"{len(c10d._world.pg_map)} groups left")
        while threading.active_count() > 1 and time.monotonic() < end:
            time.sleep(0.001)
        self.expect(threading.active_count() == 1, f"{threading.active_count()} threads")
        return self.faults


def alive(group: Any) -> bool:
    return group in c10d._world.pg_map


def serve(rank: int, folder: Path, backend: str, channel: socket.socket) -> None:
    try:
        made, device = groups_of(rank, folder, backend)
    except BaseException:
        traceback.print_exc()
        raise
    for line in channel.makefile():
        try:
            found = Life(rank, made, device).live([(what, index) for what, index in json.loads(line)])
        except Exception:  # noqa: BLE001 - hypothesis is to see it
            found = traceback.format_exc().splitlines()
        channel.sendall((json.dumps(found) + "\n").encode())


def groups_of(rank: int, folder: Path, backend: str) -> tuple[list[Any], torch.device]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    # Without device_id: NCCL connects in a group's first collective, for which contexts meet.
    dist.init_process_group(backend, store=join_store(folder), rank=rank, world_size=WORLD)
    return [dist.new_group(list(range(WORLD))) for _ in range(GROUPS)], device


class TwoRanks:
    """Two ranks that carry out one plan after the other; new ones after a plan that did not go well."""

    def __init__(self, folder: Path, backend: str) -> None:
        self.parent_folder, self.backend, self.started = folder, backend, 0
        self.start()

    def start(self) -> None:
        self.started += 1
        self.folder = self.parent_folder / str(self.started)
        self.folder.mkdir()
        self.processes = [ForkedRank(lambda: keep_store(self.folder), self.folder / "store.log")]
        self.channels = [self.start_rank(rank) for rank in range(WORLD)]

    def start_rank(self, rank: int) -> socket.socket:
        ours, theirs = socket.socketpair()
        # A rank that dies ends its channel: nobody else has that end.
        with theirs:
            self.processes.append(ForkedRank(lambda: serve(rank, self.folder, self.backend, theirs), self.log(rank)))
        return ours

    def log(self, rank: int) -> Path:
        return self.folder / f"{rank}.log"

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
        for channel in self.channels:
            channel.close()

    def carry_out(self, plan: str) -> list[list[str]]:
        for channel in self.channels:
            with suppress(OSError):  # one that has died gives no answer
                channel.sendall(plan.encode())
        end = time.monotonic() + ANSWER_S
        found = [self.answer(rank, end) for rank in range(WORLD)]
        if any(found):
            self.stop()
            self.start()
        return found

    def answer(self, rank: int, end: float) -> list[str]:
        ready, _, _ = select.select([self.channels[rank]], [], [], max(end - time.monotonic(), 0.0))
        with suppress(OSError):
            if ready and (line := self.channels[rank].makefile().readline()):
                faults: list[str] = json.loads(line)
                return faults
        return ["no answer", *self.log(rank).read_text(errors="replace").splitlines()[-30:]]


def main(arguments: list[str]) -> None:
    folder, backend, parent = arguments
    die_with(int(parent))
    ranks = TwoRanks(Path(folder), backend)
    for plan in sys.stdin:
        sys.stdout.write(json.dumps(ranks.carry_out(plan)) + "\n")
        sys.stdout.flush()
    ranks.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
