# SPDX-License-Identifier: Apache-2.0
"""The journal directory on disk: one lock, ``journal.json``, and the bytes it may need, named by their sha256.

Invariants:

- ``journal.json`` is replaced whole; a reader sees the old or the new one.
- Bytes are durable before a journal names them, and are dropped only after no journal names them.
- Bytes are there only while a journal is: one that says nothing is written before the first bytes and goes after
  the last. So bytes without a journal mean that it was lost. They may be the only originals: all is refused and kept.
- A directory with neither is a leftover: nothing was done, and it may be removed.
- Whoever writes holds the lock. The lock file goes away with the directory, so a holder checks that the file it
  locked is still the one that others would open.

Reading needs no lock. Not handled: file systems without ``flock``, which are refused.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from megatron_fixes.errors import RefusedError
from megatron_fixes.patching.journal import Journal, decode, encode
from megatron_fixes.patching.replace import read_file, require_writable_directory, sync_directory, write_all
from megatron_fixes.patching.shell import quote

_ATTEMPTS = 20
_NOTHING_DONE = encode(Journal())


def digest(content: bytes) -> str:
    """Return the name under which bytes are stored."""
    return hashlib.sha256(content).hexdigest()


class Store:
    """A journal directory.

    Args:
        directory: Where it is, or will be.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.journal_file = directory / "journal.json"
        self._blobs = directory / "blobs"
        self._lock_file = directory / "lock"

    def exists(self) -> bool:
        """Tell whether the directory is there, be it a leftover.

        Raises:
            RefusedError: Something else has its name.
        """
        # One look: another process may make or remove it meanwhile.
        try:
            mode = self.directory.lstat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return False
        if stat.S_ISDIR(mode) or (stat.S_ISLNK(mode) and self.directory.is_dir()):
            return True
        if stat.S_ISLNK(mode):
            message = f"got a symbolic link to {os.readlink(self.directory)}, which is no directory"
        else:
            message = "got something that is no directory"
        hint = "put back what it stood for, or remove it if no fix was applied from here"
        raise RefusedError(f"{message}, expected the journal's directory", context=str(self.directory), hint=hint)

    def read(self) -> Journal | None:
        """Return the journal, or None if there is none or it says that nothing was done.

        Raises:
            RefusedError: There is one that can't be read or trusted, or it was lost.
        """
        if not self.exists():
            return None
        data = read_file(self.journal_file)
        if data is None and self.has_bytes():
            data = read_file(self.journal_file)  # between the two looks another process may have begun
            if data is None:
                raise self._lost()
        return None if data in (None, _NOTHING_DONE) else decode(data, self.journal_file)

    def has_bytes(self) -> bool:
        """Tell whether bytes are stored."""
        try:
            return any(self._blobs.iterdir())
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _lost(self) -> RefusedError:
        return RefusedError(
            "got stored bytes but no journal.json, expected both: they may be the only copies of the files from before "
            "the fixes, so nothing was changed",
            context=str(self._blobs),
            hint=f"put journal.json back; or copy what you need out of {quote(self._blobs)}, where each file is named "
            f"by its sha256, then remove it: rm -r {quote(self.directory)}",
        )

    def begin(self) -> None:
        """Write a journal that says nothing if there is none, before bytes are stored."""
        if self.read() is None:
            self.write(Journal())

    def write(self, journal: Journal) -> None:
        """Replace the journal durably."""
        self._put(self.journal_file, encode(journal))

    def prepare(self, journal: Journal) -> None:
        """Write a journal durably beside the one in force, so that ``publish`` needs no space."""
        self._write_new(self.journal_file, encode(journal))

    def publish(self) -> None:
        """Put the prepared journal in force, durably."""
        self._swap_in(self.journal_file)

    def add(self, content: bytes) -> str:
        """Store bytes durably and return their name."""
        name = digest(content)
        if read_file(self._blobs / name) != content:
            self._put(self._blobs / name, content)
        return name

    def get(self, name: str) -> bytes:
        """Return stored bytes.

        Raises:
            RefusedError: They are missing, or not the bytes that their name says.
        """
        content = read_file(self._blobs / name)
        if content is None or digest(content) != name:
            got = "no stored bytes" if content is None else "damaged stored bytes"
            hint = f"restore the files from the release or from git, then: rm -r {quote(self.directory)}"
            raise RefusedError(f"got {got}, expected the journal's", context=str(self._blobs / name), hint=hint)
        return content

    def path_of(self, name: str) -> Path:
        """Return where bytes are stored."""
        return self._blobs / name

    def drop_unused(self, journal: Journal) -> None:
        """Remove stored bytes that the journal does not name."""
        used = journal.digests()
        with contextlib.suppress(OSError):
            for file in sorted(self._blobs.iterdir()) if self._blobs.is_dir() else []:
                if file.name not in used:
                    os.unlink(file)

    def forget(self) -> None:
        """Make the journal durably say that nothing was done to the target; on a full disk, remove it at once."""
        try:
            self.write(Journal())
        except RefusedError:
            self._remove_bytes()
            os.unlink(self.journal_file)
            sync_directory(self.directory)

    def _remove_bytes(self) -> None:
        if self._blobs.is_dir():
            shutil.rmtree(self._blobs)
            sync_directory(self.directory)

    def _clear(self) -> None:
        """Remove a directory whose journal says nothing, or that has neither journal nor bytes; the lock last."""
        data = read_file(self.journal_file)
        if self.has_bytes() if data is None else data != _NOTHING_DONE:
            return
        self._remove_bytes()
        for name in ("journal.json", "journal.json.new", ".gitignore", ".gitignore.new", "lock"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.directory / name)
        with contextlib.suppress(OSError):  # not empty: another process is beginning, or somebody put a file there
            os.rmdir(self.directory)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock; on leaving, a directory in which nothing is kept is removed.

        Raises:
            RefusedError: Another process holds it, or the directory can't be written. Nothing was changed.
        """
        descriptor = self._acquire()
        try:
            try:
                self._hide()
                yield
            finally:
                with contextlib.suppress(OSError):  # what is left says nothing, and the next command clears it
                    self._clear()
        finally:
            os.close(descriptor)

    def _acquire(self) -> int:
        for _ in range(_ATTEMPTS):
            if not self.exists():
                require_writable_directory(self.directory.parent)
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self.directory)
            else:
                require_writable_directory(self.directory)
            try:
                descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:  # the holder before us has just removed the directory
                continue
            except OSError:
                with contextlib.suppress(OSError):  # made for nothing; not empty if it is not ours
                    os.rmdir(self.directory)
                raise
            if self._take(descriptor):
                return descriptor
            os.close(descriptor)
        raise RefusedError("got a journal directory that keeps vanishing", context=str(self.directory))

    def _take(self, descriptor: int) -> bool:
        """Lock an open lock file; False if it is no longer the one that others would open."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            here, named = os.fstat(descriptor), os.stat(self._lock_file)
        except FileNotFoundError:
            return False
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                message, hint = "got a lock that another megatron-fixes holds", "wait until it has ended, then repeat"
            else:
                message, hint = f"got '{error.strerror}' from flock", "put the target on a file system with locks"
            raise RefusedError(f"{message}, expected to be alone", context=str(self.directory), hint=hint) from None
        return os.path.samestat(here, named)

    def _hide(self) -> None:
        """Keep git from seeing a directory beside ``megatron/``: an unpacked tree may lie in somebody's work tree."""
        ignore = self.directory / ".gitignore"
        if self.directory.name.startswith(".") and not ignore.exists():
            self._put(ignore, b"*\n")

    def _put(self, file: Path, content: bytes) -> None:
        self._write_new(file, content)
        self._swap_in(file)

    def _write_new(self, file: Path, content: bytes) -> None:
        with _unwritten(file):
            file.parent.mkdir(exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            descriptor = os.open(_new(file), flags | os.O_NONBLOCK, 0o666)  # a fifo there is not waited for
            try:
                write_all(descriptor, content)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _swap_in(self, file: Path) -> None:
        with _unwritten(file):
            os.replace(_new(file), file)
            sync_directory(file.parent)


def _new(file: Path) -> Path:
    return file.with_name(file.name + ".new")


@contextlib.contextmanager
def _unwritten(file: Path) -> Iterator[None]:
    """Turn a failure to write a file of the journal into a refusal, and leave no temporary."""
    try:
        yield
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(_new(file))
        message = f"got '{error.strerror or error}' while writing the journal"
        raise RefusedError(message, context=str(file), hint="See to the cause, then repeat.") from error
