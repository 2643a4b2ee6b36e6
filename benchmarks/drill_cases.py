# SPDX-License-Identifier: Apache-2.0
"""The drills of ``drills.py``: each a thing that goes wrong, as a body that ranks run, without and with us.

With NCCL the host waits for the device afterwards, as a step does that reads its loss. Groups that a drill does not
mean to connect have been used before it. What is about destroying groups is in ``drill_teardowns.py``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fixes.collectives import AllReduceContext, CollectiveTimeoutError, groups
from megatron_fixes.proofs.world import finish, stay

TIMEOUT_S, DEADLINE_S = 8.0, 1.0
HERE = str(Path(__file__).parent) + os.sep
Body = Callable[[int], Any]


def ones(count: int = 4) -> torch.Tensor:
    """Something to reduce."""
    return torch.ones(count, device="cuda" if dist.get_backend() == "nccl" else "cpu")


def new_pair() -> Any:
    """A new process group of both ranks; torch would give it 30 minutes."""
    return dist.new_group([0, 1], timeout=timedelta(seconds=TIMEOUT_S))


def pair() -> Any:
    """A process group of both ranks that has been used: NCCL connects in the first collective, and blocks the host."""
    group = new_pair()
    dist.all_reduce(ones(), group=group)
    return group


def told(call: Callable[[], Any]) -> str:
    """What a call ended with."""
    try:
        value = call()
        if dist.is_initialized() and dist.get_backend() == "nccl":
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what we want to know
        return f"{type(error).__name__}: {' '.join(str(error).replace(HERE, '').split())[:600]}"
    return f"no error{'' if value is None else f': {value}'}"


def step(tensor: torch.Tensor, group: Any = None, deadline_s: float = DEADLINE_S) -> None:
    """A step with us that reduces one tensor."""
    with AllReduceContext(group, deadline_s=deadline_s) as context:
        context.all_reduce(tensor)


def next_step(said: str, tensor: torch.Tensor) -> list[str]:
    """How the step after a failed one went; its tensor was ``ones`` on both ranks."""
    result, due = tensor.tolist(), [2.0] * len(tensor)
    return [f"next step: {said}", f"result {result}{'' if result == due else f', expected {due}'}"]


def last(rank: int, said: str) -> str:
    """What was said, after those that stay for this rank were told to go on."""
    finish(rank)
    return said


def exception_bare(rank: int) -> Any:
    """A run of collectives is left by an exception; then a step is tried."""
    try:
        with dist.distributed_c10d._coalescing_manager(async_ops=True):
            dist.all_reduce(ones())
            raise KeyError
    except KeyError:
        tensor = ones()
        error = told(lambda: dist.all_reduce(tensor))
    return next_step(error, tensor)


def exception_ours(rank: int) -> Any:
    """The same with us."""
    try:
        with AllReduceContext(deadline_s=DEADLINE_S) as context, context.coalesced() as run_:
            run_.all_reduce(ones())
            raise KeyError
    except KeyError:
        tensor = ones()
        error = told(lambda: step(tensor))
    return next_step(error, tensor)


def between_bare(rank: int) -> Any:
    """One rank raises between issue and wait; all had issued."""
    tensor = ones()
    with suppress(KeyError):
        work = dist.all_reduce(ones(), async_op=True)
        if rank == 0:
            raise KeyError
        work.wait()
    return next_step(told(lambda: dist.all_reduce(tensor)), tensor)


def between_ours(rank: int) -> Any:
    """The same with us: what was issued is drained, and the group goes on."""
    tensor = ones()
    with suppress(KeyError), AllReduceContext(deadline_s=DEADLINE_S) as context:
        handle = context.all_reduce(ones())
        if rank == 0:
            raise KeyError
    return [handle.state, *next_step(told(lambda: step(tensor)), tensor)]


def half_bare(rank: int) -> Any:
    """One rank raises after the first of two collectives; the others issued both. Then a step is tried."""
    group, tensor = pair(), ones()
    with suppress(KeyError):
        dist.all_reduce(ones(), group=group, async_op=True)
        if rank == 1:
            raise KeyError
        dist.all_reduce(100 * ones(), group=group)
    return next_step(told(lambda: dist.all_reduce(tensor, group=group)), tensor)


def half_ours(rank: int) -> Any:
    """The same with us: one rank drains, the other gives the group up; both go on with a new one."""
    group, tensor = pair(), ones()
    handles = []
    with suppress(KeyError, CollectiveTimeoutError), AllReduceContext(group, deadline_s=DEADLINE_S) as context:
        handles.append(context.all_reduce(ones()))
        if rank == 1:
            raise KeyError
        handles.append(context.all_reduce(100 * ones()))
    states = ", ".join(handle.state for handle in handles)
    destroyed = told(lambda: groups.destroy(group, agree_s=DEADLINE_S) and None)
    # The ranks come to it as far apart as their deadlines and an abort take.
    return [states, destroyed, *next_step(told(lambda: step(tensor, new_pair(), 6 * DEADLINE_S)), tensor)]


def alone_bare(rank: int) -> Any:
    """One rank alone leaves the step before its collective."""
    if rank == 1:
        stay([0])
        return "left the step"
    return last(rank, told(lambda: dist.all_reduce(ones())))


def alone_ours(rank: int) -> Any:
    """The same with us."""
    if rank == 1:
        stay([0])
        return "left the step"
    context = AllReduceContext(deadline_s=DEADLINE_S)
    context.all_reduce(ones())
    return last(rank, told(context.wait))


def absent_bare(rank: int) -> Any:
    """One rank does not come to the first collective of a group."""
    group = new_pair()
    if rank == 1:
        stay([0])
        return "did not come"
    return last(rank, told(lambda: dist.all_reduce(ones(), group=group)))


def absent_ours(rank: int) -> Any:
    """The same with us; gloo, which connects a group when it is made, is told to meet."""
    group = new_pair()
    if rank == 1:
        stay([0])
        return "did not come"
    meet_first = None if dist.get_backend() == "nccl" else True
    context = AllReduceContext(group, deadline_s=DEADLINE_S, meet_first=meet_first)
    return last(rank, told(lambda: context.all_reduce(ones())))


def signalled(how: signal.Signals, *, ours: bool) -> Body:
    """One rank gets a signal before its second collective; one that was stopped is killed when the other has ended."""

    def body(rank: int) -> Any:
        context = AllReduceContext(deadline_s=DEADLINE_S)
        call = (lambda: context.all_reduce(ones()).wait()) if ours else (lambda: dist.all_reduce(ones()))
        call()
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            store.set("pid", str(os.getpid()))
            os.kill(os.getpid(), how)
        said = told(call)
        if how == signal.SIGSTOP:
            os.kill(int(store.get("pid")), signal.SIGKILL)
        return said

    return body


def _fork(call: Callable[[], str]) -> str:
    """What a call ends with in a fork: its words, or that it hung for 3 s, or its exit code."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write, call().encode())
        finally:
            os._exit(0)
    end = time.monotonic() + 3
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.read(read, 1000).decode() if status == 0 else f"exit code {os.waitstatus_to_exitcode(status)}"
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "hung for 3 s"


def fork_bare(rank: int) -> Any:
    """A fork uses the group of its parent while a collective is under way."""
    tensor, work = ones(), dist.all_reduce(ones(), async_op=True)  # no fork can make a tensor on a device
    child = _fork(lambda: told(lambda: dist.all_reduce(tensor)))
    return [f"child: {child}", f"parent: {told(work.wait)}"]


def fork_ours(rank: int) -> Any:
    """The same with us."""
    context = AllReduceContext(deadline_s=DEADLINE_S)
    tensor = ones()
    context.all_reduce(ones())
    child = _fork(lambda: told(lambda: context.all_reduce(tensor)))
    return [f"child: {child}", f"parent: {told(context.close)}"]


EXITS = """
import os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from megatron_fixes.collectives import AllReduceContext
rank, port, backend, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
if backend == "nccl":
    torch.cuda.set_device(rank)
store = dist.PrefixStore("exits", dist.TCPStore("127.0.0.1", port, is_master=False))
dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT_S))
tensor = torch.ones(4, device="cuda" if backend == "nccl" else "cpu")
dist.all_reduce(tensor)
if rank == 0 and how == "bare":
    dist.all_reduce(tensor, async_op=True)
elif rank == 0:
    context = AllReduceContext(deadline_s=DEADLINE_S)
    context.all_reduce(tensor)
print("leaves", flush=True)
if rank == 1:
    sys.stdin.read()
""".replace("TIMEOUT_S", str(TIMEOUT_S)).replace("DEADLINE_S", str(DEADLINE_S))


def exits(how: str) -> Body:
    """A process with a collective under way comes to its end; the ranks start processes of their own for that."""

    def body(rank: int) -> Any:
        store = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        command = [sys.executable, "-c", EXITS, str(rank), str(store.port), dist.get_backend(), how]
        path = os.pathsep.join([str(Path(HERE).parent), os.environ.get("PYTHONPATH", "")])
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
            try:
                assert process.stdout is not None
                # NCCL_DEBUG has NCCL write there, too.
                next((line for line in process.stdout if line == "leaves\n"), None)
                began = time.monotonic()
                if rank == 1:
                    stay([0])
                    return "stayed"
                code = process.wait(TIMEOUT_S + 4)
                took = time.monotonic() - began
            except subprocess.TimeoutExpired:
                return last(rank, f"still running {TIMEOUT_S + 4:g} s after its last line")
            finally:
                process.kill()
                process.wait()
            errors.seek(0)
            said = [line.strip() for line in errors if "under way" in line][:1]
        return last(rank, f"ended with {code} {took:.1f} s after its last line; {(said or ['nothing said'])[0]}")

    return body


def dropped_bare(rank: int) -> Any:
    """The only reference to the work is dropped."""
    dist.all_reduce(ones(), async_op=True)
    return "nothing said"


def dropped_ours(rank: int) -> Any:
    """The same with us."""
    from megatron_fixes.events import subscribe

    heard: list[str] = []
    subscribe(lambda event: heard.append(f"{event.name}: {event.message}"))
    context: Any = AllReduceContext()
    context.all_reduce(ones())
    del context
    return [message.replace(HERE, "") for message in heard]


def sizes_bare(rank: int) -> Any:
    """Ranks reduce tensors of different sizes."""
    tensor = ones(4 - 2 * rank)
    return [told(lambda: dist.all_reduce(tensor)), f"result {tensor.tolist()}"]


def sizes_ours(rank: int) -> Any:
    """The same with us."""
    return told(lambda: AllReduceContext(checked=True).all_reduce(ones(4 - 2 * rank)))
