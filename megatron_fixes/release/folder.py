# SPDX-License-Identifier: Apache-2.0
"""The files of a release on disk: which ones a person means, and their bytes.

A folder means the whole release in it, a file that one file; ``SHA256SUMS`` and its signature are those beside it. All
files are read once, so what is checked is what was read. Not handled: what happens to the files afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_fixes.errors import UsageError
from megatron_fixes.release.archive import MAX_BYTES
from megatron_fixes.release.layout import SIGNATURE, SUMS


def read_release(paths: Sequence[Path]) -> tuple[dict[str, bytes], set[str] | None]:
    """Read what some paths name.

    Args:
        paths: One folder, or files of one folder.

    Returns:
        Content by name, and the names that were asked for; None for the whole folder.

    Raises:
        UsageError: A path is not there or can't be read, or they lie in several folders.
    """
    if len(paths) == 1 and paths[0].is_dir():
        found = sorted(path for path in paths[0].iterdir())
        if odd := next((path for path in found if not path.is_file() or path.is_symlink()), None):
            raise UsageError("got a link or a folder beside a release, expected its files only", context=str(odd))
        return {path.name: _read(path) for path in found}, None
    folders = {path.parent for path in paths}
    if len({folder.resolve() for folder in folders}) != 1:
        raise UsageError(
            "got files of several folders, expected one folder, or files beside their SHA256SUMS",
            context=", ".join(map(str, paths)),
            hint="Call it once for each folder.",
        )
    names = {path.name for path in paths}
    beside = [folder / name for folder in [folders.pop()] for name in (SUMS, SIGNATURE) if name not in names]
    files = {path.name: _read(path) for path in paths}
    return {**files, **{path.name: _read(path) for path in beside if path.is_file()}}, names


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"got '{error.strerror}', expected a file of a release", context=str(path)) from None
    if len(content) > MAX_BYTES:
        raise UsageError(f"got more than {MAX_BYTES} bytes, expected a file of a release", context=str(path))
    return content
