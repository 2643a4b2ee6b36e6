# SPDX-License-Identifier: Apache-2.0
"""On PYTHONPATH, moves the date that a Python process sees, and its Python children, 400 days ahead.

For ``scripts/reproduce_release.py``: a date that gets into a release then differs between its two builds. Nothing is
installed for it. Not moved: the times of files, other programs (git gets its dates from the commit), and ``python -I``.
"""

from __future__ import annotations

import datetime
import subprocess
import time
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

AHEAD_S = 400 * 86_400
_time, _time_ns, _popen = time.time, time.time_ns, subprocess.Popen.__init__
_clock, _clock_ns = time.clock_gettime, time.clock_gettime_ns


def _at_present(function: Callable[..., Any], present: Callable[[], Any], before: int = 0) -> Callable[..., Any]:
    """A function of ``time`` that is given the present moment if it gets no more than ``before`` arguments."""

    @wraps(function)
    def moved(*given: Any) -> Any:
        return function(*given, present()) if len(given) == before else function(*given)

    return moved


class _Datetime(datetime.datetime):
    """Asks ``time.time``, as ``date.today`` does by itself."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _Datetime:
        return cls.fromtimestamp(time.time(), tz)

    @classmethod
    def utcnow(cls) -> _Datetime:
        return cls.fromtimestamp(time.time(), datetime.timezone.utc).replace(tzinfo=None)


def _start(self: Any, *given: Any, **named: Any) -> None:
    # Whoever gives a child an environment of its own leaves this folder out of it.
    if (environment := named.get("env")) is not None:
        path = [str(Path(__file__).parent), *filter(None, [environment.get("PYTHONPATH")])]
        named["env"] = {**environment, "PYTHONPATH": ":".join(dict.fromkeys(path))}
    _popen(self, *given, **named)


time.time = lambda: _time() + AHEAD_S
time.time_ns = lambda: _time_ns() + AHEAD_S * 10**9
time.clock_gettime = lambda clock: _clock(clock) + AHEAD_S * (clock == time.CLOCK_REALTIME)
time.clock_gettime_ns = lambda clock: _clock_ns(clock) + AHEAD_S * 10**9 * (clock == time.CLOCK_REALTIME)
time.gmtime, time.localtime, time.ctime = (
    _at_present(function, time.time) for function in (time.gmtime, time.localtime, time.ctime)
)
time.asctime = _at_present(time.asctime, time.localtime)
time.strftime = _at_present(time.strftime, time.localtime, before=1)
_Datetime.__name__ = _Datetime.__qualname__ = "datetime"
_Datetime.__module__ = "datetime"
datetime.datetime = _Datetime
subprocess.Popen.__init__ = _start
