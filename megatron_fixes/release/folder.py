# SPDX-License-Identifier: Apache-2.0
"""The files of a release on disk: which ones a person means, and their bytes.

A folder means the whole release in it, a file that one file; ``SHA256SUMS`` and its signature are those beside it. All
files are read once, so what is checked is what was read. What lies in a folder under a name that nobody takes for a
release's (a key, notes) is named and not read. Not handled: what happens to the files afterwards.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from megatron_fixes import regular
from megatron_fixes.errors import RefusedError, UsageError
from megatron_fixes.release.archive import MAX_BYTES
from megatron_fixes.release.layout import SIGNATURE, SUMS, looks_like_ours


def read_release(folder: Path) -> dict[str, bytes]:
    """Read the whole release in a folder: content by name, without what ``left_out`` names.

    Raises:
        UsageError: There is no such folder, or it can't be read.
        RefusedError: Something else than a file has a name of a release's, or a file is larger than any of ours.
    """
    if not folder.is_dir():
        raise UsageError("got no folder, expected one with the files of a release", context=str(folder))
    found = sorted(path for path in folder.iterdir() if looks_like_ours(path.name))
    if odd := next((path for path in found if not stat.S_ISREG(path.lstat().st_mode)), None):
        raise RefusedError(
            f"got {_kind(odd.lstat().st_mode)} under a name like a release's, expected files only",
            context=str(odd),
            hint="Take it away; what a tarball holds belongs into another, new folder.",
        )
    return {path.name: _read(path) for path in found}


def read_files(paths: Sequence[Path]) -> dict[str, bytes]:
    """Read some files of one release, and the sums and the signature that lie beside them: content by name.

    Raises:
        UsageError: A path is not there or can't be read, or they lie in several folders.
        RefusedError: What is there is no file, or larger than any of ours.
    """
    if len({path.parent.resolve() for path in paths}) != 1:
        raise UsageError(
            "got files of several folders, expected one folder, or files beside their SHA256SUMS",
            context=", ".join(map(str, paths)),
            hint="Call it once for each folder.",
        )
    if missing := next((path for path in paths if not os.path.lexists(path)), None):
        raise UsageError(
            "got no such file or folder, expected a folder with a release, or files of one",
            context=str(missing),
            hint="Name one that is there; in a clone, `make dist` builds a release into dist/.",
        )
    names = {path.name for path in paths}
    beside = [paths[0].parent / name for name in (SUMS, SIGNATURE) if name not in names]
    return {path.name: _read(path) for path in (*paths, *filter(os.path.lexists, beside))}


def left_out(folder: Path) -> list[str]:
    """What lies in a folder and is not read with the release in it, since nobody takes it for a release's file."""
    others = [path for path in sorted(folder.iterdir()) if not looks_like_ours(path.name)]
    return [f"{path.name}/" if path.is_dir() else path.name for path in others]


def read_regular(path: Path, limit: int, expected: str) -> bytes:
    """Read a file that has an end: a fifo would wait for its writer, and a device may go on for ever.

    Args:
        path: Of the file; a link to one will do.
        limit: The most bytes it may have.
        expected: What it should be, for messages.

    Raises:
        UsageError: It is not there, can't be read, is no regular file, or has more bytes.
    """
    try:
        content = regular.read_regular(path, limit + 1)
    except regular.NotRegularError:
        message = f"got a fifo or a device, expected {expected} as a regular file"
        raise UsageError(message, context=str(path)) from None
    except OSError as error:
        raise UsageError(f"got '{error.strerror}', expected {expected}", context=str(path)) from None
    if len(content) > limit:
        raise UsageError(f"got more than {limit} bytes, expected {expected}", context=str(path))
    return content


def _kind(mode: int) -> str:
    """What lies under a name, by its mode."""
    kinds = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a fifo", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def _read(path: Path) -> bytes:
    """Read a file of a release, where the wrong thing under its name is the release's fault and not the caller's."""
    expected, wrong = "a file of a release", ""
    if path.is_symlink() and not path.exists():
        wrong = "a link to what is not there"
    elif path.exists() and not path.is_file():
        wrong = _kind(path.stat().st_mode)
    elif path.is_file() and path.stat().st_size > MAX_BYTES:
        wrong = f"more than {MAX_BYTES >> 20} MiB"
    if wrong:
        hint = "Don't use these files; fetch the release again, into a new folder."
        raise RefusedError(f"got {wrong}, expected {expected}", context=str(path), hint=hint)
    return read_regular(path, MAX_BYTES, expected)
