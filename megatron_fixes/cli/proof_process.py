# SPDX-License-Identifier: Apache-2.0
"""The process that runs proofs: started, listened to, and never left behind.

It needs torch, so it is a process of its own. On Ctrl-C, or what ends a command as Ctrl-C does (``signals``), it is
given time to end by itself (a terminal interrupts both), then it is interrupted, terminated and killed, by its id.
What it wrote to stderr is kept and shown only if it dies without saying why.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections import deque
from typing import TYPE_CHECKING, Any

from megatron_fixes.catalog.data import with_this_package
from megatron_fixes.cli.proof_events import Failure, Result, parse
from megatron_fixes.errors import MegatronFixesError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatron_fixes.cli.proof_events import Event

PATIENCE_S = 5.0
TAIL_LINES = 12


def environment() -> dict[str, str]:
    """Variables for the process: it finds this very megatron_fixes, and nothing that lies in the working directory."""
    return {**with_this_package(os.environ), "PYTHONSAFEPATH": "1"}


def listen(command: Sequence[str], heed: Callable[[Event], None]) -> tuple[list[Result], MegatronFixesError | None]:
    """Run a command to its end and hear what it says.

    Args:
        command: Prints events, one a line.
        heed: Called with each event as it comes.

    Returns:
        The results, and why the run ended early, or None if it did not.
    """
    results: list[Result] = []
    failure: MegatronFixesError | None = None
    odd: deque[str] = deque(maxlen=TAIL_LINES)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            list(command), stdout=subprocess.PIPE, stderr=log, encoding="utf-8", errors="replace", env=environment()
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                event = parse(line)
                if event is None:
                    odd.append(line.rstrip())
                    continue
                heed(event)
                if isinstance(event, Result):
                    results.append(event)
                elif isinstance(event, Failure):
                    failure = event.error()
            code = process.wait()
        finally:
            end(process)
        log.seek(0)
        odd.extend(log.read().splitlines())
    if failure is None and code != 0:
        failure = _death(code, [line for line in odd if line.strip()])
    if failure is None and not results:
        failure = RefusedError(
            "got no result, expected at least one", hint="Name a fix that has a proof on this backend."
        )
    return results, failure


def _death(code: int, last_lines: Sequence[str]) -> MegatronFixesError:
    tail = "".join(f"\n    {line}" for line in last_lines) or " nothing"
    if code < 0:
        name = signal.strsignal(-code) or f"signal {-code}"
        message = f"the process that runs proofs was ended from outside ({name}); it said last:{tail}"
        return RefusedError(message, hint="If memory ran out, prove fewer releases at once; else repeat.")
    message = f"the process that runs proofs ended with exit code {code}; it said last:{tail}"
    return MegatronFixesError(message, hint="Report this on the issue tracker of megatron-fixes, with these lines.")


def end(process: subprocess.Popen[Any]) -> None:
    """Make a process end: wait, interrupt, terminate, kill. Returns when it is gone."""
    try:
        for signal_to_send in (None, signal.SIGINT, signal.SIGTERM):
            if process.poll() is not None:
                return
            if signal_to_send is not None:
                process.send_signal(signal_to_send)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_S if signal_to_send is not None else PATIENCE_S / 5)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
