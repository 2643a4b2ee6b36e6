# SPDX-License-Identifier: Apache-2.0
"""Where a package would be imported from, found without importing it."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def place(module: str) -> Path | None:
    """The folder that an import of a top-level package would use."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations)))
    return Path(spec.origin).parent if spec.origin else None
