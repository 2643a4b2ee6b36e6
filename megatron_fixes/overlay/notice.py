# SPDX-License-Identifier: Apache-2.0
"""Says things once per node, and stops the process where that was asked for.

A line is said by the process with local rank 0, or by any process that has no local rank; once in a process, and
not again by its children: ``MEGATRON_FIXES_SAID`` in the environment carries what was said.

Stopping is ``os._exit(1)`` after flushing. An exception would not do: Megatron-LM has bare ``except:`` clauses around
imports, which swallow ``SystemExit`` as well, and in a thread it would end the thread alone; both would train on,
unpatched. Nothing is lost, as training has not begun. A process that stops says so in one line, whatever its rank.
"""

from __future__ import annotations

import hashlib
import os
import sys

from megatron_fixes.config import SAID

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

    from megatron_fixes.overlay.decision import Refusal

LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


def local_rank() -> int | None:
    """This process's rank within its node, or None if no launcher gave it one."""
    for name in LOCAL_RANKS:
        text = os.environ.get(name, "").strip()
        if text.isdigit():
            return int(text)
    return None


def say(line: str) -> None:
    """Say a line on stderr, once per node."""
    digest = hashlib.sha256(line.encode()).hexdigest()[:8]
    said = os.environ.get(SAID, "")
    if local_rank() or digest in said.split(","):
        return
    os.environ[SAID] = f"{said},{digest}" if said else digest
    _write(line)


def stop(refusals: Sequence[Refusal]) -> NoReturn:
    """End the process, whoever would catch an exception; see the module's docstring."""
    rank = local_rank()
    who = "" if rank is None else f" local rank {rank}"
    reasons = "; ".join(dict.fromkeys(refusal.message for refusal in refusals))
    _write(f"stopped{who} before training, because MEGATRON_FIXES_STRICT is set: {reasons}")
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            continue
    os._exit(1)


def _write(line: str) -> None:
    text = f"megatron-fixes: {line}\n"
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):
        return
