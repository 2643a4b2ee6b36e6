# SPDX-License-Identifier: Apache-2.0
"""What the tarball of patches holds: patches, matrix, fingerprints, ``apply.py``, and the manifest of it all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_fixes.catalog.matrix import load_matrix
from megatron_fixes.catalog.series import load_series
from megatron_fixes.release import manifest

if TYPE_CHECKING:
    from pathlib import Path

PYTHON = "3.10"
BUNDLED = {"packaging": "Apache-2.0 OR BSD-2-Clause", "unidiff": "MIT"}
_FROM = {
    "LICENSE": "LICENSE",
    "NOTICE": "NOTICE",
    "compat_matrix.json": "megatron_fixes/catalog/matrix.json",
    "fingerprints.json": "megatron_fixes/catalog/fingerprints.json",
}


def files_of_patches(tree: Path, *, version: str, commit: str, epoch: int) -> dict[str, bytes]:
    """Return the tarball's files by name below its folder.

    Args:
        tree: The exported source tree.
        version: Of megatron-fixes.
        commit: That the tree is of.
        epoch: The time of that commit.
    """
    files = {name: (tree / path).read_bytes() for name, path in _FROM.items()}
    patches = sorted(path for path in (tree / "patches").rglob("*") if path.is_file())
    files.update({path.relative_to(tree).as_posix(): path.read_bytes() for path in patches})
    lines = {
        line: manifest.Line(releases, load_series(tree / "patches", line).ids())
        for line, releases in load_matrix(tree / _FROM["compat_matrix.json"]).lines().items()
    }
    described = manifest.Manifest(
        schema=1,
        name="megatron-fixes-patches",
        version=version,
        commit=commit,
        source_date_epoch=epoch,
        python=PYTHON,
        lines=lines,
        files=manifest.entries(files),
    )
    return {**files, manifest.FILE: manifest.encode(described)}
