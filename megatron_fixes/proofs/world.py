# SPDX-License-Identifier: Apache-2.0
"""Starts real ranks without Megatron, for tests and benchmarks of ``collectives``: forks that meet over loopback.

A rank that ends says how: what its body returned, its exit code or signal, and how long it took. None is left behind:
the kernel ends them with the process that started them, and those still running at the deadline are killed by id.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fixes.proofs.proof import Backend
from megatron_fixes.proofs.ranks import ForkedRank, wait
from megatron_fixes.proofs.rendezvous import join_store, keep_store


@dataclass(frozen=True)
class Ended:
    """How a rank ended: what its body returned (None if it raised), its exit code (None if it was still running).

    Attributes:
        seconds: That the body took; without a result, that the ranks had when they were killed or had ended.
    """

    result: Any
    code: int | None
    seconds: float
    log: str


def _rank(
    body: Callable[[int], Any], rank: int, world_size: int, folder: Path, group_timeout_s: float, backend: Backend
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    timeout = timedelta(seconds=group_timeout_s)
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(backend, store=join_store(folder), rank=rank, world_size=world_size, timeout=timeout)
        began = time.monotonic()
        result = body(rank)
    except BaseException:
        traceback.print_exc()
        raise
    report = json.dumps({"result": result, "seconds": time.monotonic() - began})
    (folder / f"{rank}.part").write_text(report)
    os.replace(folder / f"{rank}.part", folder / f"{rank}.json")


def finish(rank: int) -> None:
    """Let those go on that ``stay`` for this rank; called inside a body."""
    dist.distributed_c10d._get_default_store().set(f"finished/{rank}", "1")


def stay(ranks: Sequence[int], within_s: float = 60.0) -> None:
    """Do nothing until some ranks have said that they finished; called inside a body."""
    keys = [f"finished/{rank}" for rank in ranks]
    dist.distributed_c10d._get_default_store().wait(keys, timedelta(seconds=within_s))


def run(
    body: Callable[[int], Any],
    world_size: int,
    folder: Path,
    *,
    group_timeout_s: float = 20.0,
    within_s: float = 30.0,
    backend: Backend = "gloo",
) -> list[Ended]:
    """Run ``body(rank)`` on each rank, inside a default process group, and tell how each ended.

    With NCCL each rank has a GPU, and this process must not have started CUDA.
    """
    keeper = ForkedRank(lambda: keep_store(folder), folder / "store.log")
    began = time.monotonic()
    ranks = {
        rank: ForkedRank(
            lambda rank=rank: _rank(body, rank, world_size, folder, group_timeout_s, backend),  # type: ignore[misc]
            folder / f"{rank}.log",
        )
        for rank in range(world_size)
    }
    try:
        codes = wait(ranks, began + within_s)
        waited_s = time.monotonic() - began
    finally:
        for started in (*ranks.values(), keeper):
            started.kill()
    ended = []
    for rank in ranks:
        report = folder / f"{rank}.json"
        said: dict[str, Any] = {"result": None, "seconds": waited_s}
        if report.exists():
            said = json.loads(report.read_text())
        log = (folder / f"{rank}.log").read_text(errors="replace")
        ended.append(Ended(said["result"], codes[rank], said["seconds"], log))
    return ended
