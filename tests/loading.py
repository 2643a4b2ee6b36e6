# SPDX-License-Identifier: Apache-2.0
"""Imports a program that lies outside the package, such as a script or a benchmark, for tests of its functions."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]


def load_program(path: str) -> ModuleType:
    """The program at a path below the project's root, as a module; what lies beside it is within its reach.

    Its imports happen while it loads, so the import path is as before afterwards.
    """
    program, before = ROOT / path, list(sys.path)
    name = f"{program.stem} at {path}"
    loader = SourceFileLoader(name, str(program))  # named, as a program in ci/ has no .py that would tell it
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    # Structs and dataclasses look names up in their module, some of them later; no import finds it by this name.
    sys.modules[name] = module
    sys.path.insert(0, str(program.parent))
    try:
        loader.exec_module(module)
    finally:
        sys.path[:] = before
    return module
