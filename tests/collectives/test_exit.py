# SPDX-License-Identifier: Apache-2.0
"""A process that ends with a collective under way ends in bounded time, and says where that was issued.

Bare gloo blocks in the destructor of the group until the group's own timeout (``benchmarks/drills.py``).
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from ..loading import ROOT

PROGRAM = """
import os, sys, time
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
import torch
import torch.distributed as dist
from datetime import timedelta
from megatron_fixes.collectives import AllReduceContext, context
context.EXIT_S = 0.5
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2, timeout=timedelta(seconds=120))
owner = AllReduceContext()
if rank == 0:
    owner.all_reduce(torch.ones(4))  # the peer never comes
    print("leaves", flush=True)
else:
    sys.stdin.read()
    os._exit(0)
"""


def test_exit_with_work_in_flight_is_bounded_and_told(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), str(tmp_path / "store")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={"PATH": "", "PYTHONPATH": str(ROOT)},
        )
        for rank in range(2)
    ]
    try:
        assert ranks[0].stdout is not None and ranks[0].stderr is not None
        assert ranks[0].stdout.readline() == "leaves\n"
        began = time.monotonic()
        assert ranks[0].wait(60) == 0
        assert time.monotonic() - began < 30
        said = ranks[0].stderr.read()
        assert f"collectives of group 0 under way, issued at {program}:13" in said
        assert "ranks [1]" in said
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


IN_A_DESTRUCTOR = """
import os, sys
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
import torch
import torch.distributed as dist
from megatron_fixes.collectives import AllReduceContext, groups
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)

def told(call):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, error, flush=True)

class Trainer:
    def __del__(self):
        context, checked = AllReduceContext(deadline_s=2), AllReduceContext(deadline_s=2, checked=True)
        told(lambda: context.reduce_scatter(torch.ones(4), torch.ones(4)))
        told(lambda: checked.all_reduce(torch.ones(4)))
        print(context.outstanding, checked.outstanding, flush=True)
        told(lambda: groups.destroy(agree_s=2))

trainer = Trainer()
"""


def test_a_destructor_at_the_exit_starts_no_thread_and_is_told(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(IN_A_DESTRUCTOR)
    ended = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "", "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 0, ended.stderr
    refused, _, unmet, _, nothing, left = ended.stdout.splitlines()
    assert refused.startswith("UsageError got reduce_scatter") and "while the interpreter ends" in refused
    assert "the store can't be asked any more, the interpreter ends; nothing was issued" in unmet
    assert nothing == "() ()"
    assert left.startswith("TeardownError") and "left to the end of the process" in left
