# SPDX-License-Identifier: Apache-2.0
"""Imports a program that lies outside the package, such as a script or a benchmark, for tests of its functions."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]


def load_program(path: str) -> ModuleType:
    """The program at a path below the project's root, as a module; what lies beside it is within its reach.

    Its imports happen while it loads, so the import path is as before afterwards.
    """
    program = ROOT / path
    spec = importlib.util.spec_from_file_location(f"{program.stem} at {path}", program)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Structs and dataclasses look names up in their module, some of them later; no import finds it by this name.
    sys.modules[spec.name] = module
    sys.path.insert(0, str(program.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(program.parent))
    return module
