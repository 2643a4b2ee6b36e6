# SPDX-License-Identifier: Apache-2.0
"""The cache: decisions, patched copies and their bytecode, in a folder that nobody else can write to.

Only a folder of mode 0700 that belongs to this user and is no symbolic link is used: what lies in it is run. It is
opened once an operation and all names are looked up below that handle, so it can't be exchanged in between.

An entry is a folder named by its key (hash of the tree's files, what was asked for, and our version). It is written
beside its place and moved there in one rename: it stands there whole or not at all, whoever is killed meanwhile and
however many start at once. Every text and bytecode is checked by its hash when it is read, and a damaged entry is
replaced.

Without such a folder nothing is lost but time: ``UnusableError`` says why, and the caller works from memory. Not
handled: the size of the cache; an entry is some 200 kB, and removing any of it at any time is fine.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from megatron_fixes.errors import RefusedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = "overlay"
DECISION = "decision.json"
_TEMPORARY = ".writing-"
STALE_S = 3600.0


class UnusableError(RefusedError):
    """The cache can't be used; ``foreign`` if its folder is there and is not ours alone."""

    def __init__(self, reason: str, *, foreign: bool = False) -> None:
        super().__init__(reason)
        self.foreign = foreign


@dataclass(frozen=True)
class Entry:
    """What an entry holds: the decision's bytes, and each patched text by its path below the root."""

    decision: bytes
    texts: dict[str, bytes]


class Store:
    """The overlay's folder in the cache.

    Args:
        cache: The cache folder; None where there is none.
    """

    def __init__(self, cache: Path | None) -> None:
        self.folder = None if cache is None else cache / FOLDER

    def check(self) -> None:
        """Look whether the folder can be used, making it if it is absent.

        Raises:
            UnusableError: It can't be.
        """
        with self._opened(make=True):
            pass

    def path(self, key: str, name: str) -> str:
        """Where a file of an entry lies."""
        return str(Path(str(self.folder), key, name))

    def read(self, key: str) -> Entry | None:
        """Read an entry; None if there is none, or it is damaged.

        Raises:
            UnusableError: The folder can't be used.
        """
        with self._opened(make=False) as folder:
            try:
                index = _read(f"{key}/index", folder).decode()
                texts = {}
                for line in index.splitlines():
                    digest, _, name = line.partition(" ")
                    content = _read(f"{key}/{name}", folder)
                    if hashlib.sha256(content).hexdigest() != digest:
                        return None
                    texts[name] = content
                return Entry(texts.pop(DECISION), texts)
            except (OSError, UnicodeDecodeError, KeyError):
                return None

    def write(self, key: str, entry: Entry) -> None:
        """Write an entry, unless a sound one stands there already.

        Raises:
            UnusableError: The folder can't be used or written to; nothing is left behind.
        """
        files = {DECISION: entry.decision, **entry.texts}
        index = "".join(f"{hashlib.sha256(content).hexdigest()} {name}\n" for name, content in files.items())
        temporary = f"{_TEMPORARY}{key}-{os.getpid()}-{os.urandom(4).hex()}"
        with self._opened(make=True) as folder:
            _sweep(folder)
            try:
                for name, content in {**files, "index": index.encode()}.items():
                    _write(f"{temporary}/{name}", content, folder)
                self._move(temporary, key, folder)
            except OSError as error:
                raise UnusableError(f"{error.strerror or error}") from None
            finally:
                _remove(temporary, folder)

    def _move(self, temporary: str, key: str, folder: int) -> None:
        for _ in range(3):
            try:
                os.rename(temporary, key, src_dir_fd=folder, dst_dir_fd=folder)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
            if self.read(key) is not None:
                return
            aside = f"{temporary}-damaged"
            try:
                os.rename(key, aside, src_dir_fd=folder, dst_dir_fd=folder)
            except FileNotFoundError:
                continue
            _remove(aside, folder)
            _remove_file(aside, folder)

    def read_code(self, key: str, name: str) -> bytes | None:
        """Read bytecode that belongs to an entry; None if there is none, it is damaged, or the folder is not ours."""
        try:
            with self._opened(make=False) as folder:
                content = _read(f"{key}/{name}", folder)
        except (OSError, UnusableError):
            return None
        digest, code = content[:32], content[32:]
        return code if hashlib.sha256(code).digest() == digest else None

    def write_code(self, key: str, name: str, code: bytes) -> None:
        """Write bytecode beside its text; where that can't be done, it isn't."""
        temporary = f"{name}.{os.getpid()}-{os.urandom(4).hex()}"
        try:
            with self._opened(make=False) as folder:
                try:
                    _write(f"{key}/{temporary}", hashlib.sha256(code).digest() + code, folder, folders=False)
                    os.rename(f"{key}/{temporary}", f"{key}/{name}", src_dir_fd=folder, dst_dir_fd=folder)
                except OSError:
                    _remove_file(f"{key}/{temporary}", folder)
        except (OSError, UnusableError):
            return

    @contextmanager
    def _opened(self, *, make: bool) -> Iterator[int]:
        if self.folder is None:
            raise UnusableError("no home folder, and MEGATRON_FIXES_CACHE is not set")
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
        try:
            if make:
                os.makedirs(self.folder.parent, exist_ok=True)
                with suppress(FileExistsError):
                    os.mkdir(self.folder, 0o700)
            folder = os.open(self.folder, flags)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and os.path.islink(self.folder):
                raise UnusableError("it is a symbolic link", foreign=True) from None
            raise UnusableError(f"{error.strerror or error}") from None
        try:
            _check_ours(folder)
            yield folder
        finally:
            os.close(folder)


def _check_ours(folder: int) -> None:
    seen = os.fstat(folder)
    mode = stat.S_IMODE(seen.st_mode)
    if seen.st_uid != os.geteuid():
        raise UnusableError(f"it belongs to user {seen.st_uid}, not to user {os.geteuid()}", foreign=True)
    if mode & 0o077:
        raise UnusableError(f"it has mode {mode:03o}, expected 700", foreign=True)


def _read(name: str, folder: int) -> bytes:
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
    with open(descriptor, "rb") as file:
        return file.read()


def _write(name: str, content: bytes, folder: int, *, folders: bool = True) -> None:
    """Write a new file, and have it on the disk before this returns."""
    parts = name.split("/")
    for depth in range(1, len(parts) if folders else 1):
        with suppress(FileExistsError):
            os.mkdir("/".join(parts[:depth]), 0o700, dir_fd=folder)
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sweep(folder: int) -> None:
    """Remove what killed writers left, once it is old enough to be nobody's work."""
    for name in os.listdir(folder):
        if name.startswith(_TEMPORARY):
            try:
                age_s = time.time() - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
            except OSError:
                continue
            if age_s > STALE_S:
                _remove(name, folder)


def _remove(name: str, folder: int) -> None:
    """Remove a folder that may not be there."""
    try:
        below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    except OSError:
        return
    try:
        for entry in os.listdir(below):
            _remove(entry, below)
            _remove_file(entry, below)
    finally:
        os.close(below)
    try:
        os.rmdir(name, dir_fd=folder)
    except OSError:
        return


def _remove_file(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except OSError:
        return
