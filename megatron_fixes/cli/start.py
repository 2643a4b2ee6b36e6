# SPDX-License-Identifier: Apache-2.0
"""How a program begins and ends: Ctrl-C shows no traceback while its modules are imported, and none at its exit.

There is nothing to undo then, so the process ends at once, with the line and the exit code that Ctrl-C has during the
work. An exception would not do: Python prints one that is raised in the bookkeeping of an import or at its exit, and
goes on. Between the two Ctrl-C is ``KeyboardInterrupt`` as ever, so that a command can undo what it began. Where
whoever started us ignores SIGINT, as a shell does for what it runs in the background, it stays ignored.

Imported before everything else, so it imports next to nothing. Not handled: Python's own start, before our first line.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys

INTERRUPTED = 130


def _leave(number: int, frame: object) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"ended by SIGINT\n")
    os._exit(INTERRUPTED)


def run(module: str) -> int:
    """Import a module, and return what its ``main`` makes of this process's arguments.

    Raises:
        KeyboardInterrupt: Ctrl-C came in the moment between two of the states above; nothing is under way.
    """
    as_ever = signal.default_int_handler
    heeded = signal.getsignal(signal.SIGINT) is as_ever
    if heeded:
        signal.signal(signal.SIGINT, _leave)
    main = importlib.import_module(module).main
    if heeded:
        signal.signal(signal.SIGINT, as_ever)
    code: int = main(sys.argv[1:])
    # A command that a signal has ended goes on ignoring further ones.
    if heeded and signal.getsignal(signal.SIGINT) is as_ever:
        signal.signal(signal.SIGINT, _leave)
    return code
