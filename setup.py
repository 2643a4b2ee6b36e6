# SPDX-License-Identifier: Apache-2.0
"""Puts the patches, the matrix and the ``.pth`` into the wheel; all else about the build is in pyproject.toml.

``patches/`` and ``compat_matrix.yaml`` lie at the root of the source tree, where people look for them. An installed
package has no such root, so a build copies them to ``megatron_fixes/_data/``. Three things are guaranteed: a build
without the matrix or without any patch fails; what an earlier build left in ``build/`` never travels; and the
permissions of the files are those that a source distribution has after unpacking, whatever the umask of the checkout,
so that both ways to a wheel give the same bytes. ``megatron-fixes.pth`` goes beside the package, where it becomes a
file of the site directory that Python reads at start. Not handled: an editable install, which reads the source tree
itself and has no ``.pth``.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.errors import SetupError

ROOT = Path(__file__).resolve().parent
PTH = "megatron-fixes.pth"


def shipped_files() -> list[Path]:
    """Return what travels as data, relative to the source root, in a fixed order."""
    patches = [p for p in (ROOT / "patches").rglob("*") if p.is_file() and not p.name.startswith(".")]
    matrix = ROOT / "compat_matrix.yaml"
    if not matrix.is_file() or not any(p.suffix == ".patch" for p in patches):
        raise SetupError(f"got a source tree without compat_matrix.yaml or without any patch, expected both in {ROOT}")
    return sorted(p.relative_to(ROOT) for p in [matrix, *patches])


def settle_modes(tree: Path) -> None:
    """Give every file under ``tree`` the mode 644."""
    for path in tree.rglob("*"):
        if path.is_file():
            path.chmod(0o644)


class BuildPyWithData(build_py):
    """Copies the package from scratch, then the data beside it."""

    def run(self) -> None:
        if self.editable_mode:
            super().run()
            return
        package = Path(self.build_lib) / "megatron_fixes"
        shutil.rmtree(package, ignore_errors=True)
        super().run()
        for path in shipped_files():
            copy = package / "_data" / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, copy)
        settle_modes(package)
        start = Path(self.build_lib) / PTH
        shutil.copyfile(ROOT / PTH, start)
        start.chmod(0o644)


class BdistWheelWithSettledModes(bdist_wheel):
    """Settles the modes of the metadata too, once its last file is written."""

    def write_wheelfile(self, wheelfile_base: str, *args: str) -> None:
        super().write_wheelfile(wheelfile_base, *args)
        settle_modes(Path(wheelfile_base))


setup(cmdclass={"build_py": BuildPyWithData, "bdist_wheel": BdistWheelWithSettledModes})
