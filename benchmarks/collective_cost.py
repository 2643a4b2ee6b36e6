#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What ``AllReduceContext`` costs: issue and wait through it and through bare torch.distributed, interleaved, medians.

``python benchmarks/collective_cost.py [--backend nccl] [--rounds 51] [--only PART …] [--markdown] [--report FILE]``.
Parts:

* ``bookkeeping``: CPU time and wall time of the host a collective, on torch's own ``fake`` back end, whose works are
  complete when they are made. Nothing but Python and c10d is in these numbers. Beside torch.distributed stands the
  group's own ``allreduce``, which both come down to: torch's bookkeeping is the one difference, ours the other.
* ``collective``: host time to issue and wait, on one rank with gloo (so that no peer's scheduling is in the numbers),
  on one a GPU with NCCL; there also the time of 20 collectives until the device is done, by message size.
* ``checked``: checked mode beside the same context without it, on two ranks (with NCCL, all GPUs): it waits for all
  ranks at the store before each collective. The wait for the device is in these numbers.

The report is written after each part, so that a run that is ended early leaves what it has.
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
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from megatron_fixes.collectives import AllReduceContext
from megatron_fixes.proofs.rendezvous import join_store, keep_store

CALLS = 200
DEVICE_CALLS = 20
CHECKED_CALLS = 10
Way = Callable[[torch.Tensor], None]
Measure = Callable[[Way, torch.Tensor], float]
Row = dict[str, Any]


def bare(tensor: torch.Tensor) -> None:
    """Issue and wait as code on torch alone does."""
    dist.all_reduce(tensor, async_op=True).wait()


def group_alone() -> Way:
    """Issue and wait by the methods of the default group, without anybody's bookkeeping."""
    group, options = dist.group.WORLD, dist.distributed_c10d.AllreduceOptions()
    options.asyncOp = True

    def way(tensor: torch.Tensor) -> None:
        group.allreduce([tensor], options).wait()

    return way


def owned(context: AllReduceContext) -> Way:
    """The same through a context."""

    def way(tensor: torch.Tensor) -> None:
        context.all_reduce(tensor).wait()

    return way


def host_us(way: Way, tensor: torch.Tensor, clock: Callable[[], int] = time.perf_counter_ns) -> float:
    """Microseconds of host time a collective, over some calls."""
    began = clock()
    for _ in range(CALLS):
        way(tensor)
    took = (clock() - began) / CALLS / 1e3
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return took


def done_us(way: Way, tensor: torch.Tensor, calls: int = DEVICE_CALLS) -> float:
    """Microseconds a collective until the device, if there is one, is done with all of them."""
    settle = torch.cuda.synchronize if tensor.is_cuda else lambda: None
    settle()
    began = time.perf_counter_ns()
    for _ in range(calls):
        way(tensor)
    settle()
    return (time.perf_counter_ns() - began) / calls / 1e3


def compare(measure: Measure, ways: dict[str, Way], tensor: torch.Tensor, rounds: int) -> Row:
    """Medians of interleaved rounds, and what the last way has on top of the first."""
    for way in ways.values():
        measure(way, tensor)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            taken[name].append(measure(way, tensor))
    first, *_, last = taken.values()
    return {
        **{name: round(statistics.median(values), 2) for name, values in taken.items()},
        "difference": round(statistics.median(b - a for a, b in zip(first, last, strict=True)), 2),
        "ratio": round(statistics.median(b / a for a, b in zip(first, last, strict=True)), 4),
    }


def bookkeeping(rounds: int) -> dict[str, Row]:
    """Host time on a back end that does nothing, by both clocks, beside torch and beside the group's own method."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    context = AllReduceContext()
    beside = {"torch": bare, "the group's own method": group_alone()}
    rows = {}
    for clock in (time.process_time_ns, time.perf_counter_ns):
        for name, way in beside.items():
            what = f"bookkeeping, {'CPU' if clock is time.process_time_ns else 'wall'} time, beside {name}"
            ways = {"bare": way, "context": owned(context)}
            rows[what] = compare(partial(host_us, clock=clock), ways, torch.zeros(4), rounds)
    context.close()
    dist.destroy_process_group()
    return rows


def collective(device: torch.device, rounds: int) -> dict[str, Row]:
    """Issue and wait beside bare torch; on a device also until it is done."""
    context = AllReduceContext()
    ways = {"bare": bare, "context": owned(context)}
    rows = {"issue and wait on the host, 4 floats": compare(host_us, ways, torch.zeros(4, device=device), rounds)}
    if device.type == "cuda":
        for size in (4, 1 << 20, 1 << 26):
            rows[f"until the device is done, {named(size)}"] = compare(
                done_us, ways, torch.zeros(size, device=device), rounds
            )
    context.close()
    return rows


def checked(device: torch.device, rounds: int) -> dict[str, Row]:
    """Checked mode beside the same context without it."""
    plain, careful = AllReduceContext(), AllReduceContext(checked=True)
    ways = {"bare": owned(plain), "context": owned(careful)}
    sizes = (4, 1 << 26) if device.type == "cuda" else (4, 1 << 22)
    measure = partial(done_us, calls=CHECKED_CALLS)
    rows = {}
    for size in sizes:
        rows[f"checked beside unchecked, {named(size)}"] = compare(
            measure, ways, torch.zeros(size, device=device), rounds
        )
    plain.close()
    careful.close()
    return rows


def named(size: int) -> str:
    """How large a tensor of so many floats is."""
    return f"{size * 4 / 2**20:g} MiB" if size >= 1 << 18 else f"{size} floats"


def rank(number: int, part: str, backend: str, ranks: int, folder: str, rounds: int) -> None:
    """One rank; the first writes the rows of a part."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    device = torch.device("cuda", number) if backend == "nccl" else torch.device("cpu")
    if part == "bookkeeping":
        rows = bookkeeping(rounds)
    else:
        if backend == "nccl":
            torch.cuda.set_device(number)
        # A store over TCP, as jobs have: checked mode goes through it.
        dist.init_process_group(backend, store=join_store(Path(folder)), rank=number, world_size=ranks)
        rows = collective(device, rounds) if part == "collective" else checked(device, rounds)
    if number == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def measured(part: str, backend: str, rounds: int) -> tuple[str, dict[str, Row]]:
    """Where a part was measured, and its rows."""
    ranks = 1 if part == "bookkeeping" else torch.cuda.device_count() if backend == "nccl" else 1 + (part == "checked")
    context = torch.multiprocessing.get_context("spawn")
    with TemporaryDirectory(prefix="megatron-fixes-") as folder:
        keeper = context.Process(target=keep_store, args=(Path(folder),), daemon=True)
        keeper.start()
        try:
            torch.multiprocessing.spawn(rank, (part, backend, ranks, folder, rounds), nprocs=ranks)
        finally:
            keeper.kill()
        rows = json.loads(Path(folder, "rows.json").read_text())
    if part == "bookkeeping":
        return "no back end", rows
    return f"{backend}, {ranks} rank{'s' * (ranks > 1)}", rows


PARTS = ("bookkeeping", "collective", "checked")


def laid_out(report: Row) -> str:
    """A table for the docs."""
    lines = [f"{report['machine']}, torch {report['torch']}, {report['date']}, {report['rounds']} rounds; µs", ""]
    lines += ["| a collective | on | without | with | difference | ratio |", "|---|---|---|---|---|---|"]
    for name, row in report["rows"].items():
        cells = [row["on"], *(f"{row[column]}" for column in ("bare", "context", "difference", "ratio"))]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="what AllReduceContext costs")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--rounds", type=int, default=51)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="only these parts")
    parser.add_argument("--markdown", action="store_true", help="a table for the docs")
    parser.add_argument("--report", type=Path, help="where the report goes, as JSON, after each part")
    options = parser.parse_args(arguments)
    if options.backend == "nccl" and not torch.cuda.device_count():
        parser.error("got --backend nccl, but torch finds no CUDA device")
    report: Row = {
        "machine": torch.cuda.get_device_name(0) if options.backend == "nccl" else "CPU",
        "torch": torch.__version__,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "rounds": options.rounds,
        "rows": {},
    }
    for part in options.only:
        where, rows = measured(part, options.backend, options.rounds)
        report["rows"].update({name: {"on": where, **row} for name, row in rows.items()})
        if options.report:
            options.report.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    print(laid_out(report) if options.markdown else json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
