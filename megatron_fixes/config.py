# SPDX-License-Identifier: Apache-2.0
"""Settings, each with the source its value came from.

An argument goes before the environment, the environment before the default. There is one setting so far.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Setting:
    """A folder or file, and where its name came from: an argument, a variable, or the default."""

    value: Path
    source: str


def cache_dir(argument: str | Path | None = None) -> Setting:
    """Where fetched Megatron-LM releases are kept.

    Args:
        argument: Given on the command line, or None.
    """
    if argument is not None:
        return Setting(Path(argument).expanduser().absolute(), "argument")
    for variable, below in (("MEGATRON_FIXES_CACHE", ""), ("XDG_CACHE_HOME", "megatron-fixes")):
        if os.environ.get(variable):
            return Setting((Path(os.environ[variable]) / below).expanduser().absolute(), f"environment {variable}")
    return Setting(Path("~/.cache/megatron-fixes").expanduser().absolute(), "default")
