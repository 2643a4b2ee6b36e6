# SPDX-License-Identifier: Apache-2.0
"""Which packages a training job in this environment would get, found from metadata and files alone.

Nothing is imported: a package is where the import system would look first, its version what its distribution's
metadata says, and for torch what is judged, as ``reading`` tells it. Apex is told apart by its files, since an
unrelated project has that name on PyPI and so the same metadata: NVIDIA's has ``multi_tensor_apply`` and ``contrib``
packages. Not handled: whether a package works.
"""

from __future__ import annotations

import platform
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_fixes.machine.places import place

if TYPE_CHECKING:
    from pathlib import Path

TRANSFORMER_ENGINE = (
    "transformer-engine",
    "transformer-engine-cu13",
    "transformer-engine-cu12",
    "transformer-engine-torch",
)


@dataclass(frozen=True)
class Package:
    """One package: version and place, None where it is not there, and what a person should know of it."""

    name: str
    version: str | None
    where: str | None
    note: str = ""


def version(*distributions: str) -> str | None:
    """What the metadata of the first of these distributions says that is installed."""
    # Here, as importing it costs 12 ms, and what is asked at every start of a job needs no metadata.
    import importlib.metadata

    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _plain(name: str, module: str, *distributions: str, told: str = "") -> Package:
    folder = place(module)
    if folder is None:
        return Package(name, None, None)
    known = version(*distributions)
    note = "" if known else "no metadata: a source tree on the path?"
    if known and told and told != known:
        note = f"its metadata says {known}"
    return Package(name, told or known or "unknown", str(folder), note)


def is_nvidia_apex(folder: Path) -> bool:
    """Whether an ``apex`` folder is NVIDIA's, by the packages that lie in it."""
    return (folder / "multi_tensor_apply").is_dir() and (folder / "contrib").is_dir()


def _apex() -> Package:
    folder = place("apex")
    if folder is None:
        return Package("apex", None, None, "optional")
    namesake = "not NVIDIA Apex but an unrelated project of that name: uninstall it"
    note = "NVIDIA Apex" if is_nvidia_apex(folder) else namesake
    return Package("apex", version("apex") or "unknown", str(folder), note)


def packages(torch: str = "") -> tuple[Package, ...]:
    """Python, torch, TransformerEngine and Apex, as a job of this interpreter would find them.

    Args:
        torch: The version of torch that is judged, where it is known.
    """
    return (
        Package("Python", platform.python_version(), sys.executable),
        _plain("torch", "torch", "torch", told=torch),
        _apex(),
        _plain("TransformerEngine", "transformer_engine", *TRANSFORMER_ENGINE),
    )
