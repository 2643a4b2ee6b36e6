#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What happens when collectives go wrong: bare torch.distributed beside ``AllReduceContext``, in the same drills.

``python benchmarks/drills.py [--backend nccl] [--ours] [--markdown] [--report FILE] [DRILL …]``. Each drill runs on two
real ranks (gloo over loopback, or NCCL with a GPU each) twice: as code on torch alone is usually written, and with a
context or ``groups``; ``--ours`` leaves out the first. The process groups' own timeout is 8 s, the context's deadline
1 s. Told is how each rank ended: what it returned or raised, after how many seconds, or that a signal killed it, or
that it was still running at the end, and killed then. Ends with 1 where it went otherwise with us than ``DRILLS`` says,
which is the same for both back ends (``tests/gpu/test_drills.py``). The report is written after each drill.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import drill_cases as cases
import torch.distributed as dist

from megatron_fixes.proofs.proof import Backend
from megatron_fixes.proofs.world import Ended, run

END_S = 20.0


class Drill(NamedTuple):
    """One thing that goes wrong, without and with us.

    Attributes:
        expected: What the words of each rank must match, with us.
        within_s: What each rank that ends by itself may take, with us.
        end_s: When ranks are killed, with and without us.
    """

    name: str
    bare: cases.Body
    ours: cases.Body
    expected: tuple[str, str]
    within_s: float = 6.0
    end_s: float = END_S


TIMED_OUT = r"CollectiveTimeoutError: .*ranks \[1\]"
GONE = "; GroupDestroyedError"
FORKED = r"child: \[0, 'GroupDestroyedError: .*forked from'\]; parent: no error"
DROPPED = r"issued at drill_cases.py:\d+, was never waited for"
REDUCED = r"next step: no error, result \[2\.0, 2\.0, 2\.0, 2\.0\]"
KILLED = "ended by SIGKILL"
DRILLS = (
    Drill(
        "group destroyed under work",
        cases.destroyed_bare,
        cases.destroyed_ours,
        (rf"TeardownError: .*collective 0 .*{GONE}", rf"TeardownError: .*ranks \[0\] did not come.*{GONE}"),
    ),
    Drill(
        "group destroyed on one rank only",
        cases.one_rank_bare,
        cases.one_rank_ours,
        (r"TeardownError: .*ranks \[1\] did not come", r"Collective(Timeout|Failed)Error"),
    ),
    Drill("exception inside a coalesced run", cases.exception_bare, cases.exception_ours, (REDUCED, REDUCED)),
    Drill("one rank leaves the step", cases.alone_bare, cases.alone_ours, (TIMED_OUT, "left the step")),
    Drill("first collective without one rank", cases.absent_bare, cases.absent_ours, (TIMED_OUT, "did not come")),
    Drill(
        "rank killed (SIGKILL)",
        cases.signalled(signal.SIGKILL, ours=False),
        cases.signalled(signal.SIGKILL, ours=True),
        (r"Collective(Timeout|Failed)Error", KILLED),
    ),
    Drill(
        "rank stopped (SIGSTOP)",
        cases.signalled(signal.SIGSTOP, ours=False),
        cases.signalled(signal.SIGSTOP, ours=True),
        (TIMED_OUT, KILLED),
    ),
    Drill(
        "groups destroyed in different orders",
        cases.orders_bare,
        cases.orders_ours,
        ("TeardownError", "TeardownError"),
        # With NCCL, each end of a group and each connection takes up to half a second beside the waits.
        within_s=10.0,
    ),
    Drill("fork with work in flight", cases.fork_bare, cases.fork_ours, (FORKED, FORKED)),
    Drill(
        "exit with work in flight",
        cases.exits("bare"),
        cases.exits("ours"),
        (r"ended with 0 [0-5]\.\d s .*under way, issued at <string>:\d+", "stayed"),
        within_s=40.0,
        end_s=45.0,
    ),
    Drill("work dropped", cases.dropped_bare, cases.dropped_ours, (DROPPED, DROPPED)),
    Drill(
        "different sizes", cases.sizes_bare, cases.sizes_ours, ("CollectiveMismatchError", "CollectiveMismatchError")
    ),
)


def words(rank: Ended) -> str:
    """How a rank ended."""
    if rank.result is not None:
        said = rank.result if isinstance(rank.result, str) else "; ".join(filter(None, rank.result))
        said = re.sub(r" object at 0x\w+", "", said)
        return f"{said} ({rank.seconds:.1f} s)"
    if rank.code is None:
        # Less than the drill's end where a peer was killed: what is left then gets only some seconds.
        return f"still running after {rank.seconds:.0f} s"
    log = (rank.log.strip().splitlines() or [""])[-1][:160]
    return f"ended by {signal.Signals(-rank.code).name}" if rank.code < 0 else f"exit code {rank.code}: {log}"


def drill_once(body: cases.Body, end_s: float, backend: Backend) -> list[Ended]:
    """Run one body on its ranks."""

    def connected(rank: int) -> Any:
        dist.all_reduce(cases.ones())
        return body(rank)

    with tempfile.TemporaryDirectory(prefix="megatron-fixes-") as folder:
        return run(connected, 2, Path(folder), group_timeout_s=cases.TIMEOUT_S, within_s=end_s, backend=backend)


def faults(drill: Drill, ended: list[Ended]) -> list[str]:
    """What is not as expected."""
    found = []
    for number, (rank, expected) in enumerate(zip(ended, drill.expected, strict=True)):
        if not re.search(expected, said := words(rank)):
            found.append(f"rank {number}: got {said!r}, expected {expected!r}")
        elif rank.result is not None and rank.seconds > drill.within_s:
            found.append(f"rank {number}: took {rank.seconds:.1f} s, expected at most {drill.within_s:g} s")
    return found


HEAD = "| drill | torch.distributed alone | with `megatron_fixes.collectives` |\n|---|---|---|"


def line(name: str, row: dict[str, Any]) -> str:
    """A line of the table for the docs."""
    columns = (row.get("torch", []), row["megatron_fixes"])
    cells = ["<br>".join(f"{rank}: {text}" for rank, text in enumerate(texts)) for texts in columns]
    return f"| {name} | {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def main(arguments: list[str]) -> int:
    """Run the drills and print what happened."""
    parser = argparse.ArgumentParser(description="what happens when collectives go wrong")
    parser.add_argument("drills", nargs="*", help="only those whose names contain one of these")
    parser.add_argument("--ours", action="store_true", help="leave out bare torch")
    parser.add_argument("--markdown", action="store_true", help="a table for the docs")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--report", type=Path, help="where the report goes, as JSON, after each drill")
    options = parser.parse_args(arguments)
    rows: dict[str, Any] = {}
    print(HEAD * options.markdown, end="\n" * options.markdown)
    for drill in DRILLS:
        if options.drills and not any(word in drill.name for word in options.drills):
            continue
        print(f"{drill.name} …", file=sys.stderr, flush=True)
        row = rows[drill.name] = {}
        for column, body in (("megatron_fixes", drill.ours), *(() if options.ours else (("torch", drill.bare),))):
            ended = drill_once(body, drill.end_s, options.backend)
            row[column] = [words(rank) for rank in ended]
            if column == "megatron_fixes":
                row["faults"] = faults(drill, ended)
                if row["faults"]:
                    row["logs"] = [rank.log[-3000:] for rank in ended]
            if options.report:
                options.report.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
        if options.markdown:
            print(line(drill.name, row), flush=True)
    if not options.markdown:
        print(json.dumps(rows, indent=1))
    missed = [f"{name}: {fault}" for name, row in rows.items() for fault in row["faults"]]
    print(*missed, sep="\n", end="\n" * bool(missed), file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
