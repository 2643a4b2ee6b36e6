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
    spec = importlib.util.spec_from_file_location(program.stem, program)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(program.parent))
    # Dataclasses look their module up while they are made.
    before = sys.modules.get(spec.name)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(program.parent))
        if before is None:
            del sys.modules[spec.name]
        else:
            sys.modules[spec.name] = before
    return module
