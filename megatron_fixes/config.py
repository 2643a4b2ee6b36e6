# SPDX-License-Identifier: Apache-2.0
"""Settings, each with the source its value came from.

An argument goes before the environment, the environment before the default. What a variable may say:

* ``MEGATRON_FIXES``: ``all``, or ids or slugs separated by commas, semicolons or spaces (``all,MF0100`` adds a gated
  fix by name). Unset, empty, ``0``, ``no``, ``none``, ``false`` and ``off`` turn the overlay off;
  ``megatron-fixes.pth`` knows the same words. ``1``, ``yes``, ``true`` and ``on`` mean ``all``.
* ``MEGATRON_FIXES_STRICT``: the same words mean no, or yes. Any other word is told, and means yes: whoever sets it
  wants no job to train unmended.
* ``MEGATRON_FIXES_CACHE``: the folder for fetched releases and the overlay's files.
* ``MEGATRON_GUARDS``: names of guards, separated like fixes; the same words mean none, or all.
* ``MEGATRON_GUARDS_DEADLINE_S``: seconds, more than 0; the words that mean off mean none.
* ``MEGATRON_GUARDS_ABORT``: the words of ``MEGATRON_FIXES_STRICT``. Any other is an error: aborting ends process
  groups.
* ``MEGATRON_FIXES_TRACEBACK``: as ``MEGATRON_FIXES_STRICT``, for the command line's own bugs.

Not handled: whether an id is one of a known fix (``catalog``), and whether a folder can be used (who uses it).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from megatron_fixes.errors import UsageError, nearest

FIXES, STRICT, CACHE = "MEGATRON_FIXES", "MEGATRON_FIXES_STRICT", "MEGATRON_FIXES_CACHE"
GUARDS, DEADLINE, ABORT = "MEGATRON_GUARDS", "MEGATRON_GUARDS_DEADLINE_S", "MEGATRON_GUARDS_ABORT"
TRACEBACK = "MEGATRON_FIXES_TRACEBACK"
# Tells children what was said (``overlay.notice``).
SAID = "MEGATRON_FIXES_SAID"
VARIABLES = (FIXES, STRICT, CACHE, GUARDS, DEADLINE, ABORT, TRACEBACK, SAID)
GUARD_NAMES = ("lifecycle", "streams", "teardown")
ALL = "all"
OFF = ("", "0", "no", "none", "false", "off")
ON = ("1", "yes", "true", "on")

# A wait that is longer has no end that anyone sees; clocks and locks overflow at some larger number.
LONGEST_S = 1e9
T = TypeVar("T")


@dataclass(frozen=True)
class Setting(Generic[T]):
    """A value, the name of its variable, and where it came from: an argument, a variable, or the default.

    Attributes:
        problem: What is wrong with what was said, and what it is taken as; empty if nothing is.
    """

    value: T
    source: str
    name: str = ""
    problem: str = ""


@dataclass(frozen=True)
class OverlaySettings:
    """What the overlay is told.

    Attributes:
        fixes: Names as asked for, ids in upper case, and ``all`` where it was said; empty means off.
        strict: Whether the process stops where a fix that it asked for can't be in force.
        cache: The cache folder; None where there is no home folder to put it.
    """

    fixes: Setting[tuple[str, ...]]
    strict: Setting[bool]
    cache: Setting[Path | None]

    def all(self) -> tuple[Setting[tuple[str, ...]], Setting[bool], Setting[Path | None]]:
        """Every setting, for printing."""
        return self.fixes, self.strict, self.cache


@dataclass(frozen=True)
class GuardSettings:
    """What the guards are told.

    Attributes:
        names: Of ``GUARD_NAMES``; empty means none.
        deadline_s: How long a collective may take before it is told as late; None: for ever.
        abort: Whether the process group of a late collective is aborted.
    """

    names: Setting[tuple[str, ...]]
    deadline_s: Setting[float | None]
    abort: Setting[bool]

    def all(self) -> tuple[Setting[tuple[str, ...]], Setting[float | None], Setting[bool]]:
        """Every setting, for printing."""
        return self.names, self.deadline_s, self.abort


def cache_dir(argument: str | Path | None = None) -> Setting[Path]:
    """Where fetched Megatron-LM releases and the overlay's files are kept.

    Args:
        argument: Given on the command line, or None.

    Raises:
        RuntimeError: It would be below the home folder, and there is none.
    """
    if argument is not None:
        return Setting(Path(argument).expanduser().absolute(), "argument", CACHE)
    for variable, below in ((CACHE, ""), ("XDG_CACHE_HOME", "megatron-fixes")):
        if os.environ.get(variable):
            folder = (Path(os.environ[variable]) / below).expanduser().absolute()
            return Setting(folder, f"environment {variable}", CACHE)
    return Setting(Path("~/.cache/megatron-fixes").expanduser().absolute(), "default", CACHE)


def asked_fixes(text: str) -> tuple[str, ...]:
    """Read a list of fixes as people write it; empty for the words that mean off."""
    if text.strip().lower() in OFF:
        return ()
    words = (ALL if word.lower() in (ALL, *ON) else word for word in re.split(r"[,;\s]+", text) if word)
    return tuple(dict.fromkeys(word.upper() if re.fullmatch(r"(?i)mf\d+", word) else word for word in words))


def unknown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that are meant for us and that nothing reads, each with the one that it was probably meant to be."""
    ours = [name for name in environ if name.upper().startswith(("MEGATRON_FIX", "MEGATRON_GUARD"))]
    return {name: nearest(name, VARIABLES, 0) for name in ours if name not in VARIABLES}


def switch(name: str, environ: Mapping[str, str]) -> Setting[bool]:
    """Read a variable that says yes or no; a word that is neither means yes, and is a ``problem``."""
    text = environ.get(name, "")
    if not text:
        return Setting(False, "default", name)
    word = text.strip().lower()
    problem = "" if word in (*OFF, *ON) else f"got {text!r}, expected 1 or 0; taken as 1"
    return Setting(word not in OFF, f"environment {name}", name, problem)


def overlay_settings(
    fixes: Sequence[str] | None = None,
    strict: bool | None = None,
    cache: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> OverlaySettings:
    """Settle what the overlay is told: an argument that is None leaves it to the environment, then the default."""
    environ = os.environ if environ is None else environ
    if fixes is not None:
        fixes_setting = Setting(asked_fixes(",".join(fixes)), "argument", FIXES)
    elif environ.get(FIXES):
        fixes_setting = Setting(asked_fixes(environ[FIXES]), f"environment {FIXES}", FIXES)
    else:
        fixes_setting = Setting((), "default", FIXES)
    strict_setting = switch(STRICT, environ) if strict is None else Setting(strict, "argument", STRICT)
    return OverlaySettings(fixes_setting, strict_setting, _cache(cache))


def guard_settings(
    names: Sequence[str] | None = None,
    deadline_s: float | None = None,
    abort: bool | None = None,
    environ: Mapping[str, str] | None = None,
) -> GuardSettings:
    """Settle what the guards are told, as ``overlay_settings`` does.

    Raises:
        UsageError: An unknown name, or a deadline that is no number of seconds.
    """
    environ = os.environ if environ is None else environ
    if names is not None:
        text = names if isinstance(names, str) else ",".join(names)
        names_setting = Setting(_guard_names(text, "argument"), "argument", GUARDS)
    elif environ.get(GUARDS):
        source = f"environment {GUARDS}"
        names_setting = Setting(_guard_names(environ[GUARDS], source), source, GUARDS)
    else:
        names_setting = Setting((), "default", GUARDS)
    if deadline_s is not None:
        deadline = Setting(_deadline(str(deadline_s), "argument"), "argument", DEADLINE)
    elif environ.get(DEADLINE):
        source = f"environment {DEADLINE}"
        deadline = Setting(_deadline(environ[DEADLINE], source), source, DEADLINE)
    else:
        deadline = Setting(None, "default", DEADLINE)
    abort_setting = switch(ABORT, environ) if abort is None else Setting(abort, "argument", ABORT)
    if abort_setting.problem:
        got = environ[ABORT]
        raise UsageError(
            f"got {got!r}, expected 1 or 0", context=abort_setting.source, hint="Correct the value, or unset it."
        )
    return GuardSettings(names_setting, deadline, abort_setting)


def _guard_names(text: str, source: str) -> tuple[str, ...]:
    if text.strip().lower() in OFF:
        return ()
    words = [word for word in re.split(r"[,;\s]+", text.strip().lower()) if word]
    if unknown := [word for word in words if word not in (ALL, *ON, *GUARD_NAMES)]:
        raise UsageError(
            f"got the guard {', '.join(map(repr, unknown))}, expected some of {', '.join(GUARD_NAMES)}, or all",
            context=source,
            hint="Correct the name; docs/guards.md says what each one does.",
        )
    return tuple(name for name in GUARD_NAMES if name in words or {ALL, *ON} & set(words))


def _deadline(text: str, source: str) -> float | None:
    if source != "argument" and text.strip().lower() in OFF:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_S:
        raise UsageError(
            f"got {text!r}, expected a number of seconds, more than 0 and at most {LONGEST_S:g}", context=source
        )
    return seconds


def _cache(argument: str | Path | None) -> Setting[Path | None]:
    try:
        setting = cache_dir(argument)
    except RuntimeError:
        return Setting(None, "default", CACHE)
    return Setting(setting.value, setting.source, CACHE)
