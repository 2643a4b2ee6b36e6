# SPDX-License-Identifier: Apache-2.0
"""Replaces one file so that a reader, or a kill at any moment, sees its old or its new bytes and nothing else.

Order: staged, that is a temporary file beside the real one -> bytes -> owner, mode, attributes -> fsync; then put in
place, that is renamed over it -> fsync of the directory. What needs space is done when a file is staged.

- A symbolic link is resolved and the file it names is replaced, not the link.
- A hard link is not written through: the other names keep the old bytes (package caches share files this way).
- The mode is kept; the owner, extended attributes and ACLs where the system lets us. The modification time is new, and
  differs in whole seconds: Python takes a ``.pyc`` for valid by size and whole seconds alone (Source: importlib,
  ``_validate_timestamp_pyc``; docs/decisions/0004).
- A file or directory whose owner may not write it counts as read-only, for root as well.

Not handled: files that another process holds mapped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

from megatron_fixes.errors import RefusedError
from megatron_fixes.patching.shell import quote
from megatron_fixes.regular import read_regular

# What a file system or a user's rights may not allow for an attribute of another file.
_NOT_OURS_TO_SET = {errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EINVAL, errno.ENODATA}


def real_file(root: Path, path: str) -> Path:
    """Return the file that a path below the root names, links resolved."""
    return Path(os.path.realpath(root / path))


def read_file(file: Path) -> bytes | None:
    """Return a file's bytes, or None if there is no such file.

    Raises:
        RefusedError: It is there and can't be read.
    """
    try:
        return read_regular(file)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RefusedError(f"got '{error.strerror}', expected a readable file", context=str(file)) from error


def require_writable(file: Path) -> None:
    """Refuse unless the file, which exists, can be replaced.

    Raises:
        RefusedError: The file or its directory is read-only, or it is no regular file. Nothing was changed.
    """
    try:
        mode = file.stat().st_mode
    except OSError as error:
        raise RefusedError(f"got '{error.strerror}', expected a file to replace", context=str(file)) from error
    if not stat.S_ISREG(mode):
        raise RefusedError("got something that is no regular file, expected one", context=str(file))
    if not mode & stat.S_IWUSR or not os.access(file, os.W_OK):
        message = "got a read-only file, expected a writable one"
        raise RefusedError(message, context=str(file), hint=_make_writable(file, mode))
    require_writable_directory(file.parent)


def require_writable_directory(directory: Path) -> None:
    """Refuse unless files can be made in the directory.

    Raises:
        RefusedError: It is absent, read-only, or no directory. Nothing was changed.
    """
    mode = directory.stat().st_mode if directory.is_dir() else 0
    if not mode & stat.S_IWUSR or not os.access(directory, os.W_OK | os.X_OK):
        message = "got a read-only directory, expected a writable one"
        raise RefusedError(message, context=str(directory), hint=_make_writable(directory, mode))


def _make_writable(path: Path, mode: int) -> str:
    """What to do about a path that can't be written; the mode may say that it can."""
    if mode & stat.S_IWUSR:
        return (
            f"see whose it is, whether it is immutable, and how it is mounted: ls -ld {quote(path)}; lsattr -d; mount"
        )
    return f"make it writable first: chmod u+w {quote(path)}"


def stage_file(file: Path, content: bytes, temporary: Path) -> None:
    """Write a file's new bytes beside it, durably, with all that is kept of the old file.

    Args:
        file: The real file, links resolved; only read.
        content: Its new bytes.
        temporary: Name to write them under, in the same directory; a leftover of that name is removed.

    Raises:
        OSError: The system refused. The temporary may be left.
    """
    old = file.stat()
    remove_leftover(temporary)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        write_all(descriptor, content)
        made = os.fstat(descriptor)
        if (made.st_uid, made.st_gid) != (old.st_uid, old.st_gid):
            with contextlib.suppress(PermissionError):
                os.fchown(descriptor, old.st_uid, old.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(old.st_mode))
        _copy_attributes(file, descriptor)
        if int(made.st_mtime) == int(old.st_mtime):
            os.utime(descriptor, ns=(made.st_atime_ns, made.st_mtime_ns + 1_000_000_000))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(file: Path, temporary: Path) -> None:
    """Put what was staged in place of a file.

    Raises:
        OSError: The system refused. The file holds its old or its new bytes; the temporary may be left.
    """
    os.replace(temporary, file)
    sync_directory(file.parent)


def _copy_attributes(file: Path, descriptor: int) -> None:
    """Copy extended attributes, ACLs among them; those that the system does not let us set are left out."""
    if not hasattr(os, "listxattr"):
        return
    try:
        for name in os.listxattr(file):
            try:
                os.setxattr(descriptor, name, os.getxattr(file, name))
            except OSError as error:
                if error.errno not in _NOT_OURS_TO_SET:
                    raise
    except OSError as error:
        if error.errno not in _NOT_OURS_TO_SET:
            raise


def remove_leftover(temporary: Path) -> None:
    """Remove a temporary file if it is there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary)


def write_all(descriptor: int, content: bytes) -> None:
    """Write all the bytes; one ``write`` may take only a part."""
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_directory(directory: Path) -> None:
    """Make renames in a directory durable, so that a crash can't undo them."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
