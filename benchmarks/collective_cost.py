#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What ``AllReduceContext`` costs: issue and wait through it and through bare torch.distributed, interleaved, medians.

``python benchmarks/collective_cost.py [--backend nccl] [--rounds 51] [--markdown]``. Ranks: one with gloo (so that no
peer's scheduling is in the numbers), one a GPU with NCCL. Told per collective: host time to issue, host time to issue
and wait, the difference (the bookkeeping), and the ratio. With NCCL, the time of 20 collectives until the device is
done, too, by message size.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from megatron_fixes.collectives import AllReduceContext

CALLS = 200
DEVICE_CALLS = 20
Way = Callable[[torch.Tensor], None]


def bare(tensor: torch.Tensor) -> None:
    """Issue and wait as code on torch alone does."""
    dist.all_reduce(tensor, async_op=True).wait()


def owned(context: AllReduceContext) -> Way:
    """The same through a context."""

    def way(tensor: torch.Tensor) -> None:
        context.all_reduce(tensor).wait()

    return way


def host_us(way: Way, tensor: torch.Tensor) -> float:
    """Microseconds of host time a collective, over some calls."""
    began = time.perf_counter_ns()
    for _ in range(CALLS):
        way(tensor)
    took = (time.perf_counter_ns() - began) / CALLS / 1e3
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return took


def device_us(way: Way, tensor: torch.Tensor) -> float:
    """Microseconds a collective until the device is done with all of them."""
    torch.cuda.synchronize()
    began = time.perf_counter_ns()
    for _ in range(DEVICE_CALLS):
        way(tensor)
    torch.cuda.synchronize()
    return (time.perf_counter_ns() - began) / DEVICE_CALLS / 1e3


def compare(
    measure: Callable[[Way, torch.Tensor], float], ways: dict[str, Way], tensor: torch.Tensor, rounds: int
) -> dict[str, Any]:
    """Medians of interleaved rounds, and what the second way has on top of the first."""
    for way in ways.values():
        measure(way, tensor)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            taken[name].append(measure(way, tensor))
    first, second = taken.values()
    return {
        **{f"{name}_us": round(statistics.median(values), 2) for name, values in taken.items()},
        "difference_us": round(statistics.median(b - a for a, b in zip(first, second, strict=True)), 2),
        "ratio": round(statistics.median(b / a for a, b in zip(first, second, strict=True)), 4),
    }


def rank(number: int, backend: str, ranks: int, folder: str, rounds: int) -> None:
    """One rank; the first writes the report."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(number)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group(backend, store=store, rank=number, world_size=ranks)
    device = torch.device("cuda", number) if backend == "nccl" else torch.device("cpu")
    context = AllReduceContext()
    ways = {"torch": bare, "context": owned(context)}
    report: dict[str, Any] = {"host, 4 floats": compare(host_us, ways, torch.zeros(4, device=device), rounds)}
    if backend == "nccl":
        for size in (1 << 10, 1 << 20, 1 << 26):
            name = f"until the device is done, {size * 4 / 2**20:g} MiB"
            report[name] = compare(device_us, ways, torch.zeros(size, device=device), rounds)
    context.close()
    if number == 0:
        Path(folder, "report.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="what AllReduceContext costs")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--rounds", type=int, default=51)
    parser.add_argument("--markdown", action="store_true", help="a table for the docs")
    options = parser.parse_args(arguments)
    ranks = torch.cuda.device_count() if options.backend == "nccl" else 1
    if not ranks:
        parser.error("got --backend nccl, but torch finds no CUDA device")
    with TemporaryDirectory(prefix="megatron-fixes-") as folder:
        torch.multiprocessing.spawn(rank, (options.backend, ranks, folder, options.rounds), nprocs=ranks)
        report = json.loads(Path(folder, "report.json").read_text())
    machine = f"{ranks} × {torch.cuda.get_device_name(0)}" if options.backend == "nccl" else "CPU, one rank"
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    if not options.markdown:
        print(json.dumps({"machine": machine, "torch": torch.__version__, "date": date, **report}, indent=1))
        return 0
    print(f"{options.backend}, {machine}, torch {torch.__version__}, {date}, {options.rounds} rounds\n")
    print("| a collective | torch | context | difference | ratio |\n|---|---|---|---|---|")
    for name, row in report.items():
        print(
            f"| {name} | {row['torch_us']} µs | {row['context_us']} µs | {row['difference_us']} µs | {row['ratio']} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
