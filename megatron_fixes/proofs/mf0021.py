# SPDX-License-Identifier: Apache-2.0
"""Proof of MF0021: a forked checkpoint writer reads host copies that nobody keeps.

Guards: what ``preload_fn`` returned to ``TemporalAsyncCaller.schedule_async_call`` lives until the process that
writes it has ended, and no longer.

* ``lifetime`` (CPU): a real forked writer is held at a gate, and the copies, seen through weak references, must
  live; once it is through and has been joined they must be gone, and its file is right. With one caller that is used
  twice, as a user of the class may, and with two requests at a time in an ``AsyncCallsQueue``.
* ``corrupt-file`` (one GPU, NCCL): ``dist_checkpointing.save`` of GPU tensors, its writer held at the gate while the
  trainer copies other tensors of the same sizes to the host; the checkpoint, loaded again, must hold what was saved.
  Whether the allocator gave the same memory out again is told too.

Memory of this process is copied on write for a forked child, so on the CPU no file can be spoilt. A clean
``corrupt-file`` on a release that needs the fix means that this was not shown on that machine, not that it can't be.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.async_utils import (
    AsyncCallsQueue,
    AsyncRequest,
    TemporalAsyncCaller,
)

from megatron_fixes.proofs.proof import Case, Judgement, Proof

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ELEMENTS, GPU_ELEMENTS, GPU_TENSORS = 1024, 8 * 2**20, 4
SAVED, OTHER = 3.0, 7.0


class Gate:
    """Holds a forked writer until it is opened, or until the process that could open it has ended."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def pass_through(self) -> None:
        """Wait in the writer."""
        # Its own copy of the other end would keep the pipe alive.
        with contextlib.suppress(OSError):
            os.close(self._write)
        os.read(self._read, 1)

    def open(self) -> None:
        """Let the writer through."""
        os.close(self._write)


def _write(gates: Sequence[Gate], number: int, tensors: list[torch.Tensor], path: str) -> None:
    for other in (gate for at, gate in enumerate(gates) if at != number):
        with contextlib.suppress(OSError):
            os.close(other._write)
    gates[number].pass_through()
    Path(path).write_bytes(b"".join(tensor.numpy().tobytes() for tensor in tensors))


class _Save:
    """One request: preloads copies that it sees through weak references only, and knows what its file must hold."""

    def __init__(self, gates: Sequence[Gate], number: int, folder: str) -> None:
        self.gate, self.path = gates[number], Path(folder) / str(number)
        self.source = [torch.full((ELEMENTS,), float(10 * number + at)) for at in range(2)]
        self.copies: list[Callable[[], torch.Tensor | None]] = []
        self.request = AsyncRequest(_write_of(gates, number), (None, None, str(self.path)), [], {}, self._preload)

    def _preload(self) -> list[torch.Tensor]:
        copies = [tensor.clone() for tensor in self.source]
        self.copies = [weakref.ref(copy) for copy in copies]
        return copies

    def alive(self) -> int:
        """How many of the copies live."""
        gc.collect()
        return sum(copy() is not None for copy in self.copies)

    def right(self) -> bool:
        """Whether the file holds what was to be saved."""
        return self.path.read_bytes() == b"".join(tensor.numpy().tobytes() for tensor in self.source)


def _write_of(gates: Sequence[Gate], number: int) -> Callable[..., None]:
    def write(_: Any, tensors: list[torch.Tensor], path: str) -> None:
        _write(gates, number, tensors, path)

    return write


def _lifetime(rank: int) -> dict[str, Any]:
    # Collections look at what this case makes only, not at all that was imported.
    gc.freeze()
    gates = [Gate() for _ in range(4)]
    writes: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        first, second, third, fourth = (_Save(gates, number, folder) for number in range(4))
        caller = TemporalAsyncCaller()
        for name, save in (("first of a caller", first), ("second of a caller", second)):
            caller.schedule_async_call(save.request)
            held = save.alive()
            save.gate.open()
            caller.is_current_async_call_done(blocking=True, no_dist=False)
            writes[name] = {"while_written": held, "after": save.alive(), "right": save.right()}
        queue = AsyncCallsQueue()
        for save in (third, fourth):
            queue.schedule_async_request(save.request)
        held_third, held_fourth = third.alive(), fourth.alive()
        third.gate.open()
        fourth.gate.open()
        queue.maybe_finalize_async_calls(blocking=True)
        writes["first of a queue"] = {"while_written": held_third, "after": third.alive(), "right": third.right()}
        writes["second of a queue"] = {"while_written": held_fourth, "after": fourth.alive(), "right": fourth.right()}
    return {"writes": writes, "copies": 2}


def judge_lifetime(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if a copy was gone before its writer had ended, was kept afterwards, or a file is wrong.

    Args:
        evidence: From each rank: ``copies`` of each write, and ``writes``, name to ``while_written`` and ``after`` (how
            many copies lived) and ``right`` (the file).
    """
    writes = [(e["copies"], write) for e in evidence for write in e["writes"].values()]
    early = sum(write["while_written"] < copies for copies, write in writes)
    kept = sum(write["after"] > 0 for _, write in writes)
    wrong = sum(not write["right"] for _, write in writes)
    if early or kept or wrong:
        faults = f"host copies gone while they were written in {early} of {len(writes)} saves"
        return Judgement("defect", f"{faults}, kept after the writer had ended in {kept}, wrong files: {wrong}")
    return Judgement("clean", f"host copies lived as long as their writer in {len(writes)} of {len(writes)} saves")


def _pointers(value: Any) -> Iterator[int]:
    if isinstance(value, torch.Tensor):
        yield value.data_ptr()
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _pointers(item)


def _sharded(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        name: dist_checkpointing.ShardedTensor.from_rank_offsets(name, tensor, replica_id=0)
        for name, tensor in tensors.items()
    }


def _corrupt_file(rank: int) -> dict[str, Any]:
    parallel_state.initialize_model_parallel()
    names = [f"tensor {number}" for number in range(GPU_TENSORS)]
    tensors = {name: torch.full((GPU_ELEMENTS,), SAVED + at, device="cuda") for at, name in enumerate(names)}
    gate = Gate()
    preloaded: set[int] = set()
    with tempfile.TemporaryDirectory() as folder:
        request = dist_checkpointing.save(_sharded(tensors), folder, async_sharded_save=True)

        def preload() -> Any:
            buckets = request.preload_fn()
            preloaded.update(_pointers(buckets))
            return buckets

        def write(*args: Any, **kwargs: Any) -> None:
            gate.pass_through()
            request.async_fn(*args, **kwargs)

        queue = AsyncCallsQueue()
        queue.schedule_async_request(request._replace(async_fn=write, preload_fn=preload))
        # As a trainer's next copies to the host would do, of a loss log, activations or a second checkpoint.
        others = [torch.full((GPU_ELEMENTS,), OTHER, device="cuda") for _ in range(2 * GPU_TENSORS)]
        copies = [other.to("cpu", non_blocking=True) for other in others]
        torch.cuda.synchronize()
        reused = len(preloaded & {copy.data_ptr() for copy in copies})
        gate.open()
        queue.maybe_finalize_async_calls(blocking=True)
        blank = {name: torch.zeros(GPU_ELEMENTS, device="cuda") for name in names}
        loaded = dist_checkpointing.load(_sharded(blank), folder)
        wrong = {name: int((loaded[name].cuda() != tensors[name]).sum()) for name in names}
    return {"wrong": wrong, "preloaded": len(preloaded), "reused": reused, "pinned": all(c.is_pinned() for c in copies)}


def judge_file(evidence: Sequence[dict[str, Any]]) -> Judgement:
    """Defect if a loaded element is not what was saved.

    Args:
        evidence: From each rank: ``wrong`` elements by tensor, how many host copies were ``preloaded``, how many of
            them had been given out again (``reused``) before they were written, and whether new copies were
            ``pinned``.
    """
    if not all(e["pinned"] and e["preloaded"] for e in evidence):
        return Judgement("not-runnable", "copies to the host were not pinned, or none was preloaded")
    wrong = sum(sum(e["wrong"].values()) for e in evidence)
    total = sum(len(e["wrong"]) for e in evidence) * GPU_ELEMENTS
    reused, preloaded = sum(e["reused"] for e in evidence), sum(e["preloaded"] for e in evidence)
    memory = f"{reused} of {preloaded} host copies were given out again before they were written"
    if wrong:
        return Judgement("defect", f"{wrong} of {total} elements wrong in the checkpoint; {memory}")
    return Judgement("clean", f"{total} of {total} elements right in the checkpoint; {memory}")


PROOF = Proof(
    "MF0021",
    (
        Case("lifetime", "gloo", 1, _lifetime, judge_lifetime),
        Case("corrupt-file", "nccl", 1, _corrupt_file, judge_file, timeout_s=180.0),
    ),
)
