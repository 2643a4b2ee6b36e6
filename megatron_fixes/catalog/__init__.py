# SPDX-License-Identifier: Apache-2.0
"""What is known of fixes: patch headers, series, the matrix, fingerprints and verdicts. Pure: files in, facts out.

``load()`` gives everything at once and checks that the patches are the very ones the table of fingerprints was
made from. Where every millisecond counts, ``load(compiled=True)`` reads the matrix from ``matrix.json``, which
``scripts/compile_matrix.py`` makes of ``compat_matrix.yaml``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_fixes.catalog.data import compiled_matrix_path, fingerprints_path, matrix_path, patches_root
from megatron_fixes.catalog.known import Known, load_known
from megatron_fixes.catalog.matrix import Matrix, load_matrix
from megatron_fixes.catalog.series import PatchFile, Series, load_series
from megatron_fixes.errors import RefusedError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Catalog", "load", "without_local"]


@dataclass(frozen=True)
class Catalog:
    """The matrix, the series of every line, and the table of known functions."""

    matrix: Matrix
    series: dict[str, Series]
    known: Known

    def patch(self, fix_id: str, release: str) -> PatchFile | None:
        """The patch of a fix for a release of the matrix, or None if there is none yet."""
        patch = self.series[self.matrix.releases[release].line].get(fix_id)
        return patch if patch and release in patch.header.applies_to else None

    def patches_of(self, fix_id: str) -> list[PatchFile]:
        """The patches of a fix, one a line, oldest line first."""
        found = (self.series[line].get(fix_id) for line in self.matrix.lines())
        return [patch for patch in found if patch is not None]

    def patched_releases(self, fix_id: str) -> tuple[str, ...]:
        """The releases that a patch of the fix applies to, in the order of the matrix."""
        return tuple(release for release in self.matrix.releases if self.patch(fix_id, release) is not None)

    def knows(self, release: str | None) -> bool:
        """Whether a release that a target claims is one of the matrix."""
        return without_local(release or "") in self.matrix.releases

    def is_gated(self, fix_id: str) -> bool:
        """Whether a fix is put in only by name, whatever a target makes of it."""
        return any(patch.gated for patch in self.patches_of(fix_id))


def without_local(release: str) -> str:
    """A release without the local part that builds and checkouts add: ``0.16.1+abc`` holds the text of 0.16.1."""
    return release.partition("+")[0]


def load(*, compiled: bool = False) -> Catalog:
    """Load the catalogue of this distribution.

    Args:
        compiled: Read the matrix from its JSON form, without a YAML parser.

    Raises:
        DataError: Something is missing or malformed.
        RefusedError: A patch is missing, or its bytes are not those that the fingerprints were made from.
    """
    matrix = load_matrix(compiled_matrix_path() if compiled else matrix_path())
    known, root = load_known(fingerprints_path()), patches_root()
    series = {line: load_series(root, line) for line in matrix.lines()}
    _require_whole(matrix, known, series, root)
    return Catalog(matrix, series, known)


def _require_whole(matrix: Matrix, known: Known, series: dict[str, Series], root: Path) -> None:
    """Refuse a distribution of which a part is missing, added or changed: else a lost patch reads as "none yet"."""
    hint = "Reinstall megatron-fixes; if you changed it on purpose, run scripts/record_fingerprints.py."
    found = {patch.name: patch for patches in series.values() for patch in patches.patches}
    for name in sorted(set(found) | set(known.patches)):
        if name not in found:
            raise RefusedError("a patch of this version is missing", context=str(root / name), hint=hint)
        if found[name].sha256 != known.patches.get(name):
            raise RefusedError(
                f"got sha256 {found[name].sha256}, expected {known.patches.get(name, 'no such patch')}: "
                "not the file that this version was made with",
                context=str(found[name].path),
                hint=hint,
            )
    if odd := sorted(set(matrix.fixes) ^ set(known.touches)):
        message = f"the matrix and the table of fingerprints don't know the same fixes: {', '.join(odd)}"
        raise RefusedError(message, context=str(root.parent), hint=hint)
