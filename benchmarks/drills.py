#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What happens when collectives go wrong: bare torch.distributed beside ``AllReduceContext``, in the same drills.

``python benchmarks/drills.py [--backend nccl] [--ours] [--markdown] [--report FILE] [DRILL …]``. Each drill runs on two
real ranks (gloo over loopback, or NCCL with a GPU each) twice: as code on torch alone is usually written, and with a
context or ``groups``; ``--ours`` leaves out the first. The process groups' own timeout is 8 s, the context's deadline
1 s. Told is how each rank ended: what it returned or raised, after how many seconds, or that a signal killed it, or
that it was still running at the end, and killed then. With us each rank destroys all groups at its end, and groups,
threads and collectives under way that are left then are counted. Ends with 1 where it went otherwise with us than
``DRILLS`` says, which is the same for both back ends (``tests/gpu/test_drills.py``) but for what ``Drill.given_up``
names. All drills run with us first; the report, which has every word, is written after each.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import drill_cases as cases
import drill_teardowns as teardowns
import torch.distributed as dist

from megatron_fixes.proofs.proof import Backend
from megatron_fixes.proofs.world import Ended, run

END_S = 20.0
# With torch alone; past the groups' own timeout, what still runs then hangs.
BARE_END_S = 16.0
# For a rank to destroy all groups at its end: it drains, asks who is missing, aborts and waits for the others.
TEARDOWN_S = 10.0
# Of a gloo group (torch 2.13); they stay as long as the group does.
GROUP_THREADS = 3


class Drill(NamedTuple):
    """One thing that goes wrong, without and with us.

    Attributes:
        expected: What the words of each rank must match, with us.
        given_up: How many groups each rank gives up with a collective under way, or at most. gloo can't abort: the
            collective goes on until it fails, and the group's threads stay. With NCCL, an abort ends it, unless
            the other ranks do not come: then its thread, the group and the default one may stay, on all ranks.
        within_s: What each rank that ends by itself may take, with us.
        end_s: When ranks are killed, with and without us.
    """

    name: str
    bare: cases.Body
    ours: cases.Body
    expected: tuple[str, str]
    given_up: tuple[int, int] = (0, 0)
    within_s: float = 6.0
    end_s: float = END_S
    bare_end_s: float = BARE_END_S


TIMED_OUT = r"CollectiveTimeoutError: .*ranks \[1\]"
GONE = "; GroupDestroyedError"
FORKED = "child: GroupDestroyedError: .*forked from.*; parent: no error"
DROPPED = r"issued at drill_cases.py:\d+, was never waited for"
REDUCED = r"next step: no error; result \[2\.0, 2\.0, 2\.0, 2\.0\]"
KILLED = "ended by SIGKILL"
IN_ORDER = "no error: second, first, default"
DRILLS = (
    Drill(
        "group destroyed under work",
        teardowns.destroyed_bare,
        teardowns.destroyed_ours,
        (
            rf"TeardownError: .*collective 0 .*{GONE}",
            rf"TeardownError: .*ranks \[0\] (did not come|gave it up).*{GONE}",
        ),
        given_up=(1, 0),
    ),
    Drill(
        "group destroyed on one rank only",
        teardowns.one_rank_bare,
        teardowns.one_rank_ours,
        (r"TeardownError: .*ranks \[1\] did not come", r"Collective(Timeout|Failed)Error"),
        given_up=(0, 1),
    ),
    Drill(
        "healthy groups destroyed in different orders",
        teardowns.apart_bare,
        teardowns.apart_ours,
        (IN_ORDER, IN_ORDER),
    ),
    Drill(
        "stuck groups destroyed in different orders",
        teardowns.stuck_bare,
        teardowns.stuck_ours,
        # Each rank is stuck on another group, and is told so of the one that its peer gave up.
        (
            r"TeardownError: .*ranks \[1\] gave it up.*got no end of collective 0",
            r"TeardownError: .*got no end of collective 0.*ranks \[0\] gave it up",
        ),
        given_up=(1, 1),
        # With NCCL, each end of a group and each connection takes up to half a second beside the waits.
        within_s=10.0,
    ),
    Drill("exception inside a coalesced run", cases.exception_bare, cases.exception_ours, (REDUCED, REDUCED)),
    Drill(
        "exception between issue and wait",
        cases.between_bare,
        cases.between_ours,
        (rf"done; {REDUCED}", rf"done; {REDUCED}"),
    ),
    Drill(
        "exception on one rank, halfway",
        cases.half_bare,
        cases.half_ours,
        (
            rf"done, aborted; no error; {REDUCED}",
            rf"done; TeardownError: .*ranks \[0\] did not come.*; {REDUCED}",
        ),
        given_up=(1, 0),
        within_s=10.0,
    ),
    Drill(
        "one rank leaves the step",
        cases.alone_bare,
        cases.alone_ours,
        (TIMED_OUT, "left the step"),
        given_up=(1, 0),
    ),
    Drill("first collective without one rank", cases.absent_bare, cases.absent_ours, (TIMED_OUT, "did not come")),
    Drill(
        "rank killed (SIGKILL)",
        cases.signalled(signal.SIGKILL, ours=False),
        cases.signalled(signal.SIGKILL, ours=True),
        (r"Collective(Timeout|Failed)Error", KILLED),
        given_up=(1, 0),
    ),
    Drill(
        "rank stopped (SIGSTOP)",
        cases.signalled(signal.SIGSTOP, ours=False),
        cases.signalled(signal.SIGSTOP, ours=True),
        (TIMED_OUT, KILLED),
        given_up=(1, 0),
    ),
    Drill("fork with work in flight", cases.fork_bare, cases.fork_ours, (FORKED, FORKED)),
    Drill(
        "exit with work in flight",
        cases.exits("bare"),
        cases.exits("ours"),
        (r"ended with 0 [0-5]\.\d s .*under way, issued at <string>:\d+", "stayed"),
        within_s=40.0,
        end_s=45.0,
        bare_end_s=45.0,
    ),
    Drill("work dropped", cases.dropped_bare, cases.dropped_ours, (DROPPED, DROPPED)),
    Drill(
        "different sizes", cases.sizes_bare, cases.sizes_ours, ("CollectiveMismatchError", "CollectiveMismatchError")
    ),
)


class Run(NamedTuple):
    """How one rank went through a drill.

    Attributes:
        ended: As in ``world``; its result and seconds are those of the drill's body.
        teardown: What ``drill_teardowns.destroy_all`` said afterwards; None without us, or if the rank did not end.
    """

    ended: Ended
    teardown: tuple[str, float, teardowns.Left] | None


def words(rank: Ended, *, brief: bool = False) -> str:
    """How a rank ended; if brief, of errors only what they are and whom they name."""
    if rank.result is not None:
        said = [rank.result] if isinstance(rank.result, str) else list(filter(None, rank.result))
        told = "; ".join(map(in_brief, said) if brief else said)
        return f"{re.sub(r' object at 0x[0-9a-f]+', '', told)} ({rank.seconds:.1f} s)"
    if rank.code is None:
        # Less than the drill's end where a peer was killed: what is left then gets only some seconds.
        return f"still running after {rank.seconds:.0f} s"
    log = (rank.log.strip().splitlines() or [""])[-1][:160]
    return f"ended by {signal.Signals(-rank.code).name}" if rank.code < 0 else f"exit code {rank.code}: {log}"


def in_brief(text: str) -> str:
    """The kind of an error or event, and the ranks or the place that it names; what is neither stays as it is."""
    if event := re.match(r"(.*?\bcollectives?-[\w-]+):.* issued at ([^ ,]+)", text):
        return f"{event[1]}, names {event[2]}"
    error = re.match(r"(.*?\b\w+Error)\b:(.*)", text)
    if error is None:
        return text
    named = re.findall(
        r"ranks \[[\d, ]+\](?= did not come| gave it up|: \w+_)|(?<=issued it: )ranks \[[\d, ]+\]", error[2]
    )
    return f"{error[1]}, names {' and '.join(dict.fromkeys(named))}" if named else error[1]


def drill_once(body: cases.Body, end_s: float, backend: Backend, *, ours: bool) -> list[Run]:
    """Run one body on its ranks; with us, each destroys all groups afterwards."""

    def connected(rank: int) -> Any:
        dist.all_reduce(cases.ones())
        began = time.monotonic()
        said = body(rank)
        return [said, time.monotonic() - began, teardowns.destroy_all(backend) if ours else None]

    with tempfile.TemporaryDirectory(prefix="megatron-fixes-") as folder:
        ended = run(connected, 2, Path(folder), group_timeout_s=cases.TIMEOUT_S, within_s=end_s, backend=backend)
    runs = []
    for rank in ended:
        if rank.result is None:
            runs.append(Run(rank, None))
            continue
        said, seconds, end = rank.result
        teardown = (end[0], end[1], teardowns.Left(*end[2])) if end else None
        runs.append(Run(replace(rank, result=said, seconds=seconds), teardown))
    return runs


def allowed(drill: Drill, number: int, backend: Backend) -> teardowns.Left:
    """What a rank may have left at most."""
    if backend == "gloo":
        return teardowns.Left(adrift=drill.given_up[number], native=GROUP_THREADS * drill.given_up[number])
    most = max(drill.given_up)
    return teardowns.Left(groups=most and most + 1, threads=most, adrift=most)


def faults(drill: Drill, runs: list[Run], backend: Backend) -> list[str]:
    """What is not as expected."""
    found = []
    for number, ((rank, teardown), expected) in enumerate(zip(runs, drill.expected, strict=True)):
        if not re.search(expected, said := words(rank)):
            found.append(f"rank {number}: got {said!r}, expected {expected!r}")
        elif rank.result is not None and rank.seconds > drill.within_s:
            found.append(f"rank {number}: took {rank.seconds:.1f} s, expected at most {drill.within_s:g} s")
        if teardown is None:
            continue
        told, took_s, left = teardown
        if told != "no error" and not any(drill.given_up):
            found.append(f"rank {number}: got {told!r} as it destroyed all groups, expected no error")
        if took_s > TEARDOWN_S:
            found.append(f"rank {number}: destroyed all groups in {took_s:.1f} s, expected at most {TEARDOWN_S:g} s")
        most = allowed(drill, number, backend)
        if any(is_ > may for is_, may in zip(left, most, strict=True) if is_ is not None and may is not None):
            found.append(f"rank {number}: left {left}, expected at most {most}")
    return found


HEAD = "| drill | torch.distributed alone | with `megatron_fixes.collectives` |\n|---|---|---|"


def line(name: str, row: dict[str, Any]) -> str:
    """A line of the table for the docs."""
    columns = (row.get("torch in brief", []), row["megatron_fixes in brief"])
    cells = ["<br>".join(f"{rank}: {text}" for rank, text in enumerate(texts)) for texts in columns]
    return f"| {name} | {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def told_of(drill: Drill, column: str, backend: Backend, row: dict[str, Any]) -> None:
    """Run a drill without or with us, and write into the row how it went."""
    ours = column == "megatron_fixes"
    body, end_s = (drill.ours, drill.end_s) if ours else (drill.bare, drill.bare_end_s)
    runs = drill_once(body, end_s, backend, ours=ours)
    row[column] = [words(rank) for rank, _ in runs]
    row[f"{column} in brief"] = [words(rank, brief=True) for rank, _ in runs]
    if not ours:
        return
    row["teardown"] = [
        {"said": teardown[0], "seconds": round(teardown[1], 1), "left": teardown[2]._asdict()} if teardown else None
        for _, teardown in runs
    ]
    row["faults"] = faults(drill, runs, backend)
    if row["faults"]:
        row["logs"] = [rank.log[-3000:] for rank, _ in runs]


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
    chosen = [drill for drill in DRILLS if not options.drills or any(word in drill.name for word in options.drills)]
    print(HEAD * options.markdown, end="\n" * options.markdown)
    for column in ("megatron_fixes", "torch")[: 1 if options.ours else 2]:
        for drill in chosen:
            print(f"{drill.name}, {column} …", file=sys.stderr, flush=True)
            row = rows.setdefault(drill.name, {})
            told_of(drill, column, options.backend, row)
            if options.report:
                options.report.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")
            if options.markdown and (options.ours or column == "torch"):
                print(line(drill.name, row), flush=True)
    if not options.markdown:
        print(json.dumps(rows, indent=1))
    missed = [f"{name}: {fault}" for name, row in rows.items() for fault in row["faults"]]
    print(*missed, sep="\n", end="\n" * bool(missed), file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
