# SPDX-License-Identifier: Apache-2.0
"""Tar archives with the same bytes wherever they are made, and a reader that accepts no other archive.

Written: ustar, files only, sorted by name, owner 0 without a name, mode 644 or 755, one time for all; gzip without a
name or a time. The gzip holds *stored* blocks that are framed here and not by zlib: zlib-ng and other versions of zlib
compress to other bytes, and then nobody could tell a tampered archive from one made elsewhere. So the archive is as
large as what is in it (docs/decisions/0011).

Read: an archive is taken only if writing its content again gives the same bytes. So there is no room for anything odd;
what is met most (absolute names, ``..``, links, devices, duplicates, long or non-ASCII names, a bomb, bytes after the
end) is refused by its own sentence. Not handled: archives that other programs have made; all of them are refused.
"""

from __future__ import annotations

import io
import re
import struct
import tarfile
import zlib
from collections.abc import Collection, Mapping

from megatron_fixes.errors import RefusedError
from megatron_fixes.patching.relative import escape_reason

MAX_BYTES = 256 * 2**20
MAX_FILES = 10_000
MAX_NAME = 200
_BLOCK = 512
_PART = re.compile(r"[A-Za-z0-9_.+][A-Za-z0-9_.+-]*")
_GZIP_HEAD = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_STORED = 65_535
_KINDS = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"5": "a directory entry",
    b"6": "a fifo",
    b"L": "a long name of GNU tar",
    b"K": "a long link name of GNU tar",
    b"S": "a sparse file",
    b"g": "a global pax header",
    b"x": "a pax header",
}


def name_fault(name: str) -> str:
    """Tell why a name may not stand in an archive; empty if it may."""
    if len(name) > MAX_NAME:
        return f"it has {len(name)} characters, expected at most {MAX_NAME}"
    if reason := escape_reason(name):
        return reason
    if not all(_PART.fullmatch(part) for part in name.split("/")):
        return "it holds other characters than letters, digits and _.+-, or a part that begins with -"
    return ""


def pack(files: Mapping[str, bytes], *, mtime: int, executable: Collection[str] = ()) -> bytes:
    """Write an archive.

    Args:
        files: Content by name.
        mtime: Seconds since 1970, the time of every file.
        executable: Names of files with mode 755.

    Raises:
        ValueError: A name may not stand in an archive.
    """
    for name in files:
        if fault := name_fault(name):
            raise ValueError(f"got the name {name!r}: {fault}")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in sorted(files):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = len(files[name]), mtime
            entry.mode = 0o755 if name in executable else 0o644
            archive.addfile(entry, io.BytesIO(files[name]))
    return _gzip(buffer.getvalue())


def unpack(data: bytes, *, source: str) -> dict[str, bytes]:
    """Read an archive that ``pack`` has written.

    Args:
        data: The archive.
        source: Its name for messages.

    Returns:
        Content by name.

    Raises:
        RefusedError: It is any other archive.
    """
    return _Reader(data, source).read()


def _gzip(data: bytes) -> bytes:
    """Frame bytes as a gzip file of stored blocks (Source: RFC 1951, 3.2.4; RFC 1952, 2.3)."""
    parts = [_GZIP_HEAD]
    for start in range(0, len(data), _STORED) or (0,):
        block = data[start : start + _STORED]
        last = start + _STORED >= len(data)
        parts += [struct.pack("<BHH", last, len(block), len(block) ^ 0xFFFF), block]
    parts.append(struct.pack("<II", zlib.crc32(data), len(data) & 0xFFFFFFFF))
    return b"".join(parts)


class _Reader:
    """Reads one archive; ``executable`` is known afterwards."""

    def __init__(self, data: bytes, source: str) -> None:
        self.data = data
        self.source = source
        self.executable: set[str] = set()

    def error(self, message: str) -> RefusedError:
        return RefusedError(f"{message}; nothing of it was used", context=self.source)

    def read(self) -> dict[str, bytes]:
        tar = self._gunzip()
        files: dict[str, bytes] = {}
        times: set[int] = set()
        at = 0
        while at + _BLOCK <= len(tar) and (head := tar[at : at + _BLOCK]).strip(b"\0"):
            name, size, mtime = self._head(head)
            if name in files:
                raise self.error(f"got the name {name!r} twice, expected each once")
            if len(files) == MAX_FILES:
                raise self.error(f"got more than {MAX_FILES} files")
            content = tar[at + _BLOCK : at + _BLOCK + size]
            if len(content) != size:
                raise self.error(f"got {len(content)} bytes of {name!r}, expected {size}: the archive is cut off")
            files[name] = content
            times.add(mtime)
            at += _BLOCK + -(-size // _BLOCK) * _BLOCK
        for name in files:
            if folder := next((f for f in _folders(name) if f in files), None):
                raise self.error(f"got {folder!r} as a file and as a folder")
        if not files or len(times) != 1:
            raise self.error("got no file, or files of several times, expected the files of one release")
        try:
            again = pack(files, mtime=times.pop(), executable=self.executable)
        except ValueError:
            again = b""
        if again != self.data:
            raise self.error("got other bytes than writing its files again gives, expected an archive of our form")
        return files

    def _gunzip(self) -> bytes:
        stream = zlib.decompressobj(wbits=31)
        try:
            tar = stream.decompress(self.data, MAX_BYTES + 1)
        except zlib.error as error:
            raise self.error(f"got bytes that are no gzip file ({error})") from None
        if len(tar) > MAX_BYTES:
            raise self.error(f"got more than {MAX_BYTES} bytes once unpacked")
        if not stream.eof:
            raise self.error("got a gzip file that is cut off")
        if stream.unused_data:
            raise self.error(f"got {len(stream.unused_data)} bytes after the end of the gzip file, expected none")
        return tar

    def _head(self, head: bytes) -> tuple[str, int, int]:
        """Return name, size and time of the entry with this header block."""
        kind = head[156:157]
        if kind != b"0":
            raise self.error(f"got {_KINDS.get(kind, f'an entry of type {kind!r}')}, expected files only")
        try:
            prefix, last = (_text(head[a:b]) for a, b in ((345, 500), (0, 100)))
            size, mtime, mode = (int(_text(head[a:b]), 8) for a, b in ((124, 136), (136, 148), (100, 108)))
        except ValueError:
            raise self.error("got a header with other than ASCII text and octal numbers") from None
        name = f"{prefix}/{last}" if prefix else last
        if fault := name_fault(name):
            raise self.error(f"got the name {name!r}: {fault}")
        if mode not in (0o644, 0o755):
            raise self.error(f"got {name!r} with mode {mode:o}, expected 644 or 755")
        if mode == 0o755:
            self.executable.add(name)
        return name, size, mtime


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode("ascii")


def _folders(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]
