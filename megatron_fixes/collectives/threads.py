# SPDX-License-Identifier: Apache-2.0
"""Starts our threads, or says that the interpreter starts none any more.

While the interpreter is torn down (destructors of what still lives at the exit), Python 3.11 waits without an end for a
new thread to report that it runs, and 3.12 and later raise. Those raise in functions of ``atexit`` already.

Not handled: a thread of ours that runs on at the exit; all are daemons.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def interpreter_ends() -> bool:
    """Whether the interpreter is being torn down, so that no thread may be started."""
    return sys.is_finalizing()


def start(target: Callable[..., Any], name: str, *arguments: Any) -> threading.Thread | None:
    """Start a daemon thread; None if there is none any more."""
    if interpreter_ends():
        return None
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread
