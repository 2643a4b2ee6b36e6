# SPDX-License-Identifier: Apache-2.0
"""Lets SIGTERM and SIGHUP end a command as Ctrl-C does: by an exception, so that what was begun is undone on the way.

By default both kill at once, and a batch system or a dropped connection would leave a tree half patched and the process
of the proofs running. Only the first of all three raises: a second would cut the undoing short, so it is ignored until
the process ends. One that whoever started us had ignored (nohup) stays ignored. Not handled: SIGKILL, after which the
next command mends.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndedError(SystemExit):
    """A signal ended the command.

    Args:
        number: Of the signal; the exit code follows from it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.exit_code = 128 + number
        self.name = signal.Signals(number).name


@contextlib.contextmanager
def ending_by_exception() -> Iterator[None]:
    """On the first of the signals raise ``EndedError``, for SIGINT ``KeyboardInterrupt``; only in the main thread."""
    left = False

    def leave(number: int, frame: object) -> None:
        nonlocal left
        if not left:
            left = True
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            raise EndedError(number)

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in SIGNALS}
    taken = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for number in taken:
            signal.signal(number, leave)
        yield
    finally:
        if not left:
            for number, handler in taken.items():
                signal.signal(number, handler)
