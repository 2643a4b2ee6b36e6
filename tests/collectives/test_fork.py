# SPDX-License-Identifier: Apache-2.0
"""A fork of a rank: it can use no group of its parent, and neither disturbs nor frees what is under way there.

Needs torch (CPU).
"""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

from megatron_fixes.collectives import AllReduceContext, GroupDestroyedError
from megatron_fixes.collectives.registry import adrift
from megatron_fixes.proofs.world import finish, run, stay

from .test_context import ones, results, said


def test_a_fork_can_not_use_the_groups_of_its_parent_and_does_not_disturb_them(tmp_path: Path) -> None:
    def body(rank: int) -> Any:
        context = AllReduceContext(deadline_s=10.0)
        context.all_reduce(ones())
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            text = said(GroupDestroyedError, lambda: context.all_reduce(ones()))
            said(GroupDestroyedError, AllReduceContext)
            del context
            os.write(write, text.encode())
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        text = os.read(read, 1000).decode()
        context.wait()
        tensor = ones()
        context.all_reduce(tensor)
        context.close()
        return [code, text, tensor.tolist()]

    for code, text, tensor in results(run(body, 2, tmp_path)):
        assert code == 0 and "the process that this one was forked from" in text
        assert tensor == [2.0] * 4


def test_a_fork_frees_nothing_that_is_under_way_in_its_parent(tmp_path: Path) -> None:
    """torch's allocator ends a process that frees a CUDA tensor there whose memory another stream has used."""

    def body(rank: int) -> Any:
        if rank == 1:
            # What its peer drops is under way until it issues the same.
            stay([0])
        held, dropped = AllReduceContext(deadline_s=10.0), AllReduceContext(deadline_s=10.0)
        tensors = [ones(), ones()]
        handles = [dropped.all_reduce(tensors[0]), held.all_reduce(tensors[1])]
        seen = [weakref.ref(one) for one in (*tensors, *(work for one in handles for work in one.operation.works))]
        tensors.clear()
        handles.clear()
        del dropped
        child = os.fork() if rank == 0 else -1
        if child == 0:
            del held
            adrift()
            gc.collect()
            os._exit(sum(one() is None for one in seen))
        if rank == 0:
            finish(rank)
            child = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        held.wait()
        return child

    assert results(run(body, 2, tmp_path)) == [0, -1]
