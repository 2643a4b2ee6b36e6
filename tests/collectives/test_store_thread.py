# SPDX-License-Identifier: Apache-2.0
"""A store whose host is stopped answers nothing: deadlines hold all the same, and say that nobody can be named."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from megatron_fixes.collectives import AllReduceContext, CollectiveTimeoutError, TeardownError, arrivals, groups
from megatron_fixes.collectives.store_thread import StoreSilentError, ask
from megatron_fixes.proofs.ranks import ForkedRank
from megatron_fixes.proofs.rendezvous import join_store, keep_store
from megatron_fixes.proofs.world import run

from .test_context import ones, results, said


def test_what_the_store_says_is_said_where_it_was_asked() -> None:
    def broken() -> None:
        raise RuntimeError("Broken pipe")

    assert ask(lambda: threading.current_thread().daemon)
    with pytest.raises(RuntimeError, match="Broken pipe"):
        ask(broken)
    gate = threading.Event()
    with pytest.raises(StoreSilentError, match=r"no answer within 0\.05 s"):
        ask(gate.wait, 0.05)
    gate.set()


def test_where_no_thread_can_be_started_the_store_is_asked_all_the_same() -> None:
    # As at the exit of the interpreter, since Python 3.12.
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("can't create new thread")):
        assert ask(lambda: 7) == 7


def test_a_store_whose_host_is_stopped_delays_no_error_for_long(tmp_path: Path) -> None:
    apart = tmp_path / "apart"
    apart.mkdir()

    def host() -> None:
        (apart / "pid").write_text(str(os.getpid()))
        keep_store(apart)

    def body(rank: int) -> Any:
        groups.destroy_all()
        kept = join_store(tmp_path)  # which goes on, for the ranks themselves
        dist.init_process_group("gloo", store=join_store(apart), rank=rank, world_size=2)
        with AllReduceContext(deadline_s=5.0, checked=True) as context:
            context.all_reduce(ones())
        kept.set(f"ready/{rank}", "1")
        if rank == 1:
            kept.wait(["done"], timedelta(seconds=60))
            return None
        kept.wait(["ready/1"], timedelta(seconds=20))
        os.kill(int((apart / "pid").read_text()), signal.SIGSTOP)
        told, took = [], []
        late, checked = AllReduceContext(deadline_s=0.3), AllReduceContext(deadline_s=0.3, checked=True)
        late.all_reduce(ones())
        for error, call in (
            (CollectiveTimeoutError, late.wait),
            (CollectiveTimeoutError, lambda: checked.all_reduce(ones())),
            (TeardownError, lambda: groups.destroy_all(agree_s=0.3)),
        ):
            began = time.monotonic()
            told.append(said(error, call))
            took.append(time.monotonic() - began)
        kept.set("done", "1")
        return [told, took, dist.is_initialized()]

    keeper = ForkedRank(host, apart / "log")
    try:
        first, second = run(body, 2, tmp_path)
    finally:
        keeper.kill()
    told, took, initialized = results([first, second])[0]
    assert "the store can't tell" in told[0] and "did not answer" in told[1] and "can't tell" in told[2]
    assert took[0] < 0.3 + arrivals.LISTEN_S + 3 and took[1] < 0.3 + arrivals.LAST_WORD_S + 1
    assert not initialized
