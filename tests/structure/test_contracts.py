# SPDX-License-Identifier: Apache-2.0
"""The import contracts hold, and each still breaks when it is violated.

A contract that can't break guards nothing: a renamed room or a typo in its settings switches it off without a word.
So the package is copied, one import is put into one file, and ``lint-imports`` must name the contract. Not handled:
imports by computed name (``importlib.import_module``); for those, every pure module is imported in a process where
importing torch or megatron is an error.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = None

ROOT = Path(__file__).resolve().parents[2]
LAYERS = "Rooms lean downwards only"
CLI = "The command line imports pure rooms only"
HEAVY = "Only proofs and guards import megatron, and only they, collectives and ranks torch"
CYCLES = "Modules of one room form no cycle"
IN_FUNCTION = "\n\ndef _late() -> None:\n    import {0}\n    del {0}\n"

needs_linter = pytest.mark.skipif(sys.version_info < (3, 11), reason="import-linter needs Python 3.11")


class Violation(NamedTuple):
    """One way to break a contract: text appended to files of the package (a missing file is made)."""

    contract: str
    files: dict[str, str]


VIOLATIONS = {
    "errors imports catalog": Violation(LAYERS, {"errors.py": "import megatron_fixes.catalog\n"}),
    "catalog imports patching": Violation(LAYERS, {"catalog/__init__.py": "import megatron_fixes.patching\n"}),
    "catalog imports cli": Violation(LAYERS, {"catalog/__init__.py": "import megatron_fixes.cli\n"}),
    "patching imports proofs": Violation(LAYERS, {"patching/__init__.py": "import megatron_fixes.proofs\n"}),
    "proofs imports cli": Violation(LAYERS, {"proofs/__init__.py": "import megatron_fixes.cli\n"}),
    "machine imports patching": Violation(LAYERS, {"machine/stray.py": "import megatron_fixes.patching\n"}),
    "machine imports torch late": Violation(HEAVY, {"machine/stray.py": IN_FUNCTION.format("torch")}),
    "patching imports overlay": Violation(LAYERS, {"patching/__init__.py": "import megatron_fixes.overlay\n"}),
    "overlay imports ranks": Violation(LAYERS, {"overlay/stray.py": "import megatron_fixes.ranks\n"}),
    "collectives imports guards": Violation(LAYERS, {"collectives/stray.py": "import megatron_fixes.guards\n"}),
    "overlay imports guards late": Violation(LAYERS, {"overlay/stray.py": IN_FUNCTION.format("megatron_fixes.guards")}),
    "guards import proofs": Violation(LAYERS, {"guards/stray.py": "import megatron_fixes.proofs\n"}),
    "release imports overlay": Violation(LAYERS, {"release/stray.py": "import megatron_fixes.overlay\n"}),
    "a room without a place": Violation(LAYERS, {"stray/__init__.py": '"""A room that no layer names."""\n'}),
    "cli imports proofs late": Violation(CLI, {"cli/__init__.py": IN_FUNCTION.format("megatron_fixes.proofs")}),
    "cli imports torch": Violation(CLI, {"cli/__init__.py": "import torch\n"}),
    "cli imports prometheus_client": Violation(CLI, {"cli/stray.py": "from prometheus_client import Counter\n"}),
    "cli reaches megatron through patching": Violation(
        CLI,
        {
            "patching/stray.py": "import megatron.core\n",
            "cli/stray.py": "import megatron_fixes.patching.stray\n",
        },
    ),
    "the package imports torch": Violation(HEAVY, {"__init__.py": "import torch\n"}),
    "errors imports torch": Violation(HEAVY, {"errors.py": "import torch.distributed\n"}),
    "catalog imports megatron late": Violation(HEAVY, {"catalog/stray.py": IN_FUNCTION.format("megatron")}),
    "overlay imports torch late": Violation(HEAVY, {"overlay/stray.py": IN_FUNCTION.format("torch")}),
    "ranks imports megatron": Violation(HEAVY, {"ranks.py": "import megatron.core\n"}),
    "collectives imports megatron": Violation(HEAVY, {"collectives/stray.py": "import megatron.core\n"}),
    "patching imports torch late": Violation(HEAVY, {"patching/stray.py": IN_FUNCTION.format("torch")}),
    "a new room imports torch": Violation(HEAVY, {"stray/__init__.py": "import torch\n"}),
    "two modules import each other": Violation(
        CYCLES,
        {
            "catalog/left.py": "import megatron_fixes.catalog.right\n",
            "catalog/right.py": "import megatron_fixes.catalog.left\n",
        },
    ),
}


def lint_imports(where: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache", "--no-logo"],
        cwd=where,
        env={"PATH": "", "PYTHONPATH": str(where), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a folder with the package and its settings, to be spoilt."""
    ignore = shutil.ignore_patterns("__pycache__", "_data")
    shutil.copytree(ROOT / "megatron_fixes", tmp_path / "megatron_fixes", ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def spoil(copy: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = copy / "megatron_fixes" / name
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(text)


@needs_linter
def test_all_contracts_are_kept(copy: Path) -> None:
    done = lint_imports(copy)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout


@needs_linter
@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_violation_breaks_its_contract(name: str, copy: Path) -> None:
    contract, files = VIOLATIONS[name]
    spoil(copy, files)
    done = lint_imports(copy)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{contract} BROKEN" in done.stdout


@pytest.mark.skipif(tomllib is None, reason="needs tomllib (Python 3.11)")
def test_every_contract_has_a_violation_that_breaks_it() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = {contract["name"] for contract in settings["tool"]["importlinter"]["contracts"]}
    assert contracts == {violation.contract for violation in VIOLATIONS.values()}


IMPORT_ALL_PURE = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "megatron"):
            raise RuntimeError("a pure module imported " + name)

sys.meta_path.insert(0, Refuse())
import megatron_fixes
for found in pkgutil.walk_packages(megatron_fixes.__path__, "megatron_fixes.", onerror=lambda name: None):
    if found.name.split(".")[1] not in ("proofs", "collectives", "guards", "ranks", "__main__"):
        importlib.import_module(found.name)
        print(found.name)
"""


def import_all_pure(where: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", IMPORT_ALL_PURE],
        cwd=where,
        env={"PATH": "", "PYTHONPATH": str(where)},
        capture_output=True,
        text=True,
    )


def test_importing_the_package_loads_neither_torch_nor_megatron() -> None:
    code = "import sys, megatron_fixes; print([name for name in ('torch', 'megatron') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_pure_module_imports_without_torch_and_megatron(copy: Path) -> None:
    done = import_all_pure(copy)
    assert done.returncode == 0, done.stderr
    assert "megatron_fixes.errors" in done.stdout


@pytest.mark.parametrize("file", ["__init__.py", "errors.py", "catalog/__init__.py"])
def test_an_import_by_computed_name_is_noticed(file: str, copy: Path) -> None:
    spoil(copy, {file: '\n__import__("importlib").import_module("tor" + "ch")\n'})
    done = import_all_pure(copy)
    assert done.returncode == 1
    assert "a pure module imported torch" in done.stderr
