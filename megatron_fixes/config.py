# SPDX-License-Identifier: Apache-2.0
"""Settings, each with the source its value came from.

An argument goes before the environment, the environment before the default. What a variable may say:

* ``MEGATRON_FIXES``: ``all``, or ids separated by commas, semicolons or spaces (``all,MF0100`` adds a gated fix by
  name). Unset, empty, ``0``, ``no``, ``none``, ``false`` and ``off`` turn the overlay off; ``megatron-fixes.pth`` knows
  the same words. ``1``, ``yes``, ``true`` and ``on`` mean ``all``.
* ``MEGATRON_FIXES_STRICT``: the same words mean no, all else yes.
* ``MEGATRON_FIXES_CACHE``: the folder for fetched releases and the overlay's files.

Not handled: whether an id is one of a known fix (``catalog``), and whether a folder can be used (who uses it).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

FIXES, STRICT, CACHE = "MEGATRON_FIXES", "MEGATRON_FIXES_STRICT", "MEGATRON_FIXES_CACHE"
ALL = "all"
OFF = ("", "0", "no", "none", "false", "off")
ON = ("1", "yes", "true", "on")

T = TypeVar("T")


@dataclass(frozen=True)
class Setting(Generic[T]):
    """A value, the name of its variable, and where it came from: an argument, a variable, or the default."""

    value: T
    source: str
    name: str = ""


@dataclass(frozen=True)
class OverlaySettings:
    """What the overlay is told.

    Attributes:
        fixes: Ids as asked for, upper case, and ``all`` where it was said; empty means off.
        strict: Whether the process stops where a fix that it asked for can't be in force.
        cache: The cache folder; None where there is no home folder to put it.
    """

    fixes: Setting[tuple[str, ...]]
    strict: Setting[bool]
    cache: Setting[Path | None]

    def all(self) -> tuple[Setting[tuple[str, ...]], Setting[bool], Setting[Path | None]]:
        """Every setting, for printing."""
        return self.fixes, self.strict, self.cache


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
    words = (word.strip() for word in re.split(r"[,;\s]+", text))
    return tuple(dict.fromkeys(ALL if word.lower() in (ALL, *ON) else word.upper() for word in words if word))


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
    if strict is not None:
        strict_setting = Setting(strict, "argument", STRICT)
    elif environ.get(STRICT):
        strict_setting = Setting(environ[STRICT].strip().lower() not in OFF, f"environment {STRICT}", STRICT)
    else:
        strict_setting = Setting(False, "default", STRICT)
    return OverlaySettings(fixes_setting, strict_setting, _cache(cache))


def _cache(argument: str | Path | None) -> Setting[Path | None]:
    try:
        setting = cache_dir(argument)
    except RuntimeError:
        return Setting(None, "default", CACHE)
    return Setting(setting.value, setting.source, CACHE)
