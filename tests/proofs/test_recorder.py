# SPDX-License-Identifier: Apache-2.0
"""The recorder finds exactly the pairs of accesses that nothing orders, on programs whose answer is known.

The programs run in one process of their own, since the shim takes over ``torch.cuda`` for good.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, os, tempfile
import torch, torch.distributed as dist
from megatron_fixes.proofs import shim
from megatron_fixes.proofs.recorder import recording
shim.install()
dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
side, third = torch.cuda.Stream(name="side"), torch.cuda.Stream(name="third")
main = torch.cuda.default_stream()
on = torch.cuda.stream

def unordered(x):
    with on(side): x.add_(1)
    x.sum()

def waits_for_stream(x):
    with on(side): x.add_(1)
    main.wait_stream(side); x.sum()

def waits_too_early(x):
    main.wait_stream(side)
    with on(side): x.add_(1)
    x.sum()

def waits_the_wrong_way(x):
    with on(side): x.add_(1)
    side.wait_stream(main); x.sum()

def waits_for_event(x):
    with on(side):
        x.add_(1); event = side.record_event()
    main.wait_event(event); x.sum()

def event_before_the_write(x):
    event = side.record_event()
    with on(side): x.add_(1)
    main.wait_event(event); x.sum()

def host_waits_for_stream(x):
    with on(side): x.add_(1)
    side.synchronize(); x.sum()

def host_waits_for_all(x):
    with on(side): x.add_(1)
    torch.cuda.synchronize(); x.sum()

def a_chain_of_waits(x):
    with on(side): x.add_(1)
    third.wait_stream(side); main.wait_stream(third); x.sum()

def both_read(x):
    with on(side): x.sum()
    x.sum()

def other_half_of_the_buffer(x):
    with on(side): x[:4].add_(1)
    x[4:].sum()

def one_shared_element(x):
    with on(side): x[:5].add_(1)
    x[4:].sum()

def views_touch_nothing(x):
    with on(side): x.add_(1)
    x.view(2, 4).t()[1:].expand(3, 3, 2)

def write_after_read(x):
    with on(side): x.sum()
    x.zero_()

def collective_after_the_write(x):
    with on(side):
        x.add_(1); dist.all_reduce(x); x.sum()

def collective_before_anyone_waits(x):
    with on(side): x.add_(1)
    dist.all_reduce(x)

def read_elsewhere_after_a_collective(x):
    with on(side): dist.all_reduce(x)
    x.sum()

def async_collective_not_waited_for(x):
    work = dist.all_reduce(x, async_op=True)
    x.sum(); work.wait()

def async_collective_waited_for(x):
    dist.all_reduce(x, async_op=True).wait()
    x.sum()

def one_context_entered_twice(x):
    context = on(side)
    with context:
        with context: x.add_(1)
        x.add_(1)
    main.wait_stream(side); x.sum()

programs = [f for f in list(globals().values()) if callable(f) and getattr(f, "__module__", "") == "__main__"]
found = {}
for program in programs:
    x = torch.zeros(8)
    with recording() as recorder:
        program(x)
    found[program.__name__] = len(recorder.races)
found["device_cuda_is_cpu"] = str(torch.zeros(2, device="cuda").device)
print(json.dumps(found))
"""

RACES = {
    "unordered": 1,
    "waits_for_stream": 0,
    "waits_too_early": 1,
    "waits_the_wrong_way": 1,
    "waits_for_event": 0,
    "event_before_the_write": 1,
    "host_waits_for_stream": 0,
    "host_waits_for_all": 0,
    "a_chain_of_waits": 0,
    "both_read": 0,
    "other_half_of_the_buffer": 0,
    "one_shared_element": 1,
    "views_touch_nothing": 0,
    "write_after_read": 1,
    "collective_after_the_write": 0,
    "collective_before_anyone_waits": 1,
    "read_elsewhere_after_a_collective": 1,
    "async_collective_not_waited_for": 1,
    "async_collective_waited_for": 0,
    "one_context_entered_twice": 0,
}


@pytest.fixture(scope="module")
def found() -> dict[str, int]:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("program", RACES)
def test_a_program_has_the_races_that_nothing_orders(found: dict[str, int], program: str) -> None:
    assert found[program] == RACES[program]


def test_every_program_is_checked(found: dict[str, int]) -> None:
    assert set(found) == {*RACES, "device_cuda_is_cpu"}
    assert found["device_cuda_is_cpu"] == "cpu"
