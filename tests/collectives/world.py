# SPDX-License-Identifier: Apache-2.0
"""Starts real ranks for tests of collectives: forks with gloo over loopback that meet in a TCP store of their own.

A rank that ends says how: what its body returned, its exit code or signal, and how long it took. None is left behind:
the kernel ends them with the process that started them, and those still running at the deadline are killed by id.
"""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fixes.proofs.ranks import ForkedRank, wait

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Ended:
    """How a rank ended: what its body returned (None if it raised), its exit code (None if it was still running)."""

    result: Any
    code: int | None
    seconds: float
    log: str


def _keep_store(folder: Path) -> None:
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    (folder / "port.part").write_text(str(store.port))
    os.replace(folder / "port.part", folder / "port")
    signal.pause()


def _rank(body: Callable[[int], Any], rank: int, world_size: int, folder: Path, group_timeout_s: float) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    while not (folder / "port").exists():
        time.sleep(0.001)
    store = dist.TCPStore(LOOPBACK, int((folder / "port").read_text()), is_master=False)
    timeout = timedelta(seconds=group_timeout_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    began = time.monotonic()
    try:
        result = body(rank)
    except BaseException:
        traceback.print_exc()
        raise
    report = json.dumps({"result": result, "seconds": time.monotonic() - began})
    (folder / f"{rank}.part").write_text(report)
    os.replace(folder / f"{rank}.part", folder / f"{rank}.json")


def run(
    body: Callable[[int], Any], world_size: int, folder: Path, *, group_timeout_s: float = 20.0, within_s: float = 30.0
) -> list[Ended]:
    """Run ``body(rank)`` on each rank, inside a default process group, and tell how each ended."""
    keeper = ForkedRank(lambda: _keep_store(folder), folder / "store.log")
    began = time.monotonic()
    ranks = {
        rank: ForkedRank(
            lambda rank=rank: _rank(body, rank, world_size, folder, group_timeout_s),  # type: ignore[misc]
            folder / f"{rank}.log",
        )
        for rank in range(world_size)
    }
    try:
        codes = wait(ranks, began + within_s)
    finally:
        for started in (*ranks.values(), keeper):
            started.kill()
    ended = []
    for rank in ranks:
        report = folder / f"{rank}.json"
        said = json.loads(report.read_text()) if report.exists() else {"result": None, "seconds": within_s}
        ended.append(Ended(said["result"], codes[rank], said["seconds"], (folder / f"{rank}.log").read_text()))
    return ended
