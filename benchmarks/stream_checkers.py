# SPDX-License-Identifier: Apache-2.0
"""Which checker finds which missing order: ``StreamOrderChecker``, and the CUDA Sanitizer that comes with torch.

Each program of ``stream_cases`` runs with its order missing and in order, once under each checker, each in processes of
its own: with NCCL on one GPU, on two if there are two. Where there is no CUDA, only ours runs, over recorded streams
and gloo. A checker that finds something in the program in order has cried wolf.

Not handled: how long a checker takes; and what it would find in a real training step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measuring import ROOT, laid_out, place, quiet_environment

OURS, SANITIZER = "StreamOrderChecker", "CUDA Sanitizer"
FOUND, NOTHING, NEEDS_CUDA = "found", "nothing", "needs a CUDA device"
PER_PROCESS_S = 60.0
AT_ONCE = 12


@contextmanager
def under_ours(found: list[str]) -> Iterator[None]:
    """Run the body under our checker."""
    from megatron_fixes.collectives import StreamOrderChecker

    with StreamOrderChecker() as checker:
        yield
    found += map(str, checker.races)


@contextmanager
def under_sanitizer(found: list[str]) -> Iterator[None]:
    """Run the body under CUDA Sanitizer, which raises at the first thing that it finds."""
    from torch.cuda import _sanitizer

    _sanitizer.enable_cuda_sanitizer()
    try:
        yield
    except _sanitizer.CUDASanitizerErrors as error:
        found += str(error).splitlines()[:1] or ["a race"]
    finally:
        _sanitizer.cuda_sanitizer.disable()


def run_case(name: str, by: str, *, right: bool, rank: int, world_size: int, store: str) -> list[str]:
    """Run one case in this process; what the checker told."""
    import torch
    import torch.distributed as dist
    from stream_cases import CASES, SIZE, Place

    on_gpu = torch.cuda.is_available()
    if by == SANITIZER:
        # From its import on it hears of streams, events and allocations; of operators, once it is enabled.
        from torch.cuda import _sanitizer  # noqa: F401
    if on_gpu:
        torch.cuda.set_device(rank)
    if CASES[name].collective:
        device = {"device_id": torch.device("cuda", rank)} if on_gpu else {}
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, **device
        )
        # Communicators are made at the first collective, which may block the host.
        dist.all_reduce(torch.zeros(SIZE, device="cuda" if on_gpu else "cpu"))
    if on_gpu:
        torch.cuda.synchronize()
    found: list[str] = []
    with under_ours(found) if by == OURS else under_sanitizer(found):
        CASES[name].run(Place("cuda" if on_gpu else "cpu"), right=right)
    return found


def child(options: argparse.Namespace) -> None:
    """Run one case and print what was found as the last line of JSON; ends the process whatever is under way."""
    try:
        said: dict[str, Any] = {
            "found": run_case(
                options.case,
                options.by,
                right=options.right,
                rank=options.rank,
                world_size=options.world_size,
                store=options.store,
            )
        }
    except Exception as error:  # noqa: BLE001 - told in the table, not a reason to stop the others
        traceback.print_exc()
        said = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    print("\n" + json.dumps(said), flush=True)
    sys.stderr.flush()
    # No teardown: a checker that raised has left a collective half issued.
    os._exit(0)


def answer(name: str, by: str, *, right: bool, world_size: int) -> dict[str, Any]:
    """Run a case under a checker on all its ranks; what they found together, or what went wrong."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), "--case", name, "--by", by]
        command += ["--store", str(Path(folder) / "store"), "--world-size", str(world_size)]
        command += ["--right"] if right else []
        environment = {**quiet_environment(), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        said = [_ended(process) for process in ranks]
    if errors := [one["error"] for one in said if "error" in one]:
        return {"outcome": "error", "told": errors}
    told = list(dict.fromkeys(text for one in said for text in one["found"]))
    return {"outcome": FOUND if told else NOTHING, "told": told}


def _ended(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        out, err = process.communicate(timeout=PER_PROCESS_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        err += f"\nno end within {PER_PROCESS_S:g} s"
    lines = [line for line in out.splitlines() if line.startswith('{"')]
    if lines:
        said: dict[str, Any] = json.loads(lines[-1])
        return said
    last = err.strip().splitlines()[-1:] or ["nothing told"]
    return {"error": f"exit code {process.returncode}: {last[0]}"}


def measured() -> dict[str, Any]:
    """The answers of both checkers to each case, its order missing and in order."""
    import torch
    from stream_cases import CASES

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    asked = [(name, by, right) for name in CASES for by in (OURS, SANITIZER) for right in (False, True)]

    def one(what: tuple[str, str, bool]) -> dict[str, Any]:
        name, by, right = what
        if by == SANITIZER and not devices:
            return {"outcome": NEEDS_CUDA, "told": []}
        world_size = 2 if CASES[name].collective and devices > 1 else 1
        return answer(name, by, right=right, world_size=world_size)

    began = time.perf_counter()
    with ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1)) as pool:
        answers = list(pool.map(one, asked))
    cases: dict[str, Any] = {name: {OURS: {}, SANITIZER: {}} for name in CASES}
    for (name, by, right), said in zip(asked, answers, strict=True):
        cases[name][by]["right" if right else "wrong"] = said
    return {
        **place(),
        "device": torch.cuda.get_device_name(0) if devices else "none",
        "devices": devices,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if devices else "none",
        "seconds": round(time.perf_counter() - began, 1),
        "cases": cases,
    }


def table(found: dict[str, Any], *, markdown: bool) -> str:
    """The answers as a table, of Markdown or plain, and where they were got."""
    rows = [("program", *(f"{by}: {which}" for by in (OURS, SANITIZER) for which in ("order missing", "in order")))]
    for name, answers in found["cases"].items():
        cells = [answers[by][which]["outcome"] for by in (OURS, SANITIZER) for which in ("wrong", "right")]
        rows.append((name, *cells))
    errors = [
        f"{name}, {by}, {which}: {said['told'][0]}"
        for name, answers in found["cases"].items()
        for by, both in answers.items()
        for which, said in both.items()
        if said["outcome"] == "error"
    ]
    device = f"{found['devices']} × {found['device']}, NCCL {found['nccl']}" if found["devices"] else "no CUDA device"
    where = f"{device}; {found['machine']}, Python {found['python']}, torch {found['torch']}; {found['date']}"
    without = [] if found["devices"] else ["Ours ran over recorded streams and gloo; the rest needs a CUDA device."]
    return "\n\n".join([where, laid_out(rows, markdown), *without, *errors])


def main() -> int:
    """Run all cases and print."""
    parser = argparse.ArgumentParser(description="which checker finds which missing order of streams")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true")
    form.add_argument("--markdown", action="store_true")
    parser.add_argument("--out", type=Path, help="write the JSON to this file too")
    one = parser.add_argument_group("one case in this process; what the others start")
    one.add_argument("--case")
    one.add_argument("--by", choices=(OURS, SANITIZER), default=OURS)
    one.add_argument("--right", action="store_true")
    one.add_argument("--rank", type=int, default=0)
    one.add_argument("--world-size", type=int, default=1)
    one.add_argument("--store")
    options = parser.parse_args()
    if options.case is not None:
        child(options)
    found = measured()
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2) if options.json else table(found, markdown=options.markdown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
