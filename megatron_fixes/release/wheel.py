# SPDX-License-Identifier: Apache-2.0
"""Wheels with the same bytes wherever they are made, and a reader that accepts no other wheel.

The build backend decides what is in a wheel; how it is zipped depends on the zlib at hand. So they are zipped again
here: not compressed, for the reason that ``archive`` gives, sorted, ``RECORD`` last, one time, mode 644. Every name and
every byte stays, so ``RECORD`` stays true. Not handled: files that have to be executable; a wheel of ours has none.
"""

from __future__ import annotations

import io
import struct
import time
import zipfile
import zlib
from collections.abc import Mapping

from megatron_fixes.errors import RefusedError
from megatron_fixes.release.archive import MAX_BYTES, MAX_FILES, name_fault

_FIRST_YEAR = 1980
_REGULAR_644 = 0o100644 << 16
_UNIX = 3


def zip_again(data: bytes, *, mtime: int) -> bytes:
    """Return a freshly built wheel in our form."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return _zip({name: archive.read(name) for name in archive.namelist()}, _moment(mtime))


def read_wheel(data: bytes, *, source: str) -> dict[str, bytes]:
    """Read a wheel of our form.

    Returns:
        Content by name.

    Raises:
        RefusedError: It is any other wheel.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
            faults = [f"got the name {e.filename!r}: {fault}" for e in entries if (fault := name_fault(e.filename))]
            if len(entries) > MAX_FILES or sum(entry.file_size for entry in entries) > MAX_BYTES:
                faults.append("got more files or bytes than a wheel of ours has")
            if not entries or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                faults.append("got compressed files or none, expected files that are stored as they are")
            if faults:
                raise RefusedError(f"{faults[0]}; nothing of it was used", context=source)
            files = {entry.filename: archive.read(entry) for entry in entries}
            again = _zip(files, entries[0].date_time)
    except (zipfile.BadZipFile, struct.error, zlib.error, OSError, ValueError, RuntimeError, EOFError) as error:
        raise RefusedError(f"got what is no wheel ({error})", context=source) from None
    if again != data:
        message = "got other bytes than zipping its files again gives, expected a wheel of our form"
        raise RefusedError(message, context=source)
    return files


def _moment(seconds: int) -> tuple[int, int, int, int, int, int]:
    year, month, day, hour, minute, second = time.gmtime(seconds)[:6]
    return (year, month, day, hour, minute, second) if year >= _FIRST_YEAR else (_FIRST_YEAR, 1, 1, 0, 0, 0)


def _zip(files: Mapping[str, bytes], moment: tuple[int, int, int, int, int, int]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files, key=lambda name: (name.endswith(".dist-info/RECORD"), name)):
            entry = zipfile.ZipInfo(name, moment)
            entry.create_system, entry.external_attr = _UNIX, _REGULAR_644
            archive.writestr(entry, files[name])
    return buffer.getvalue()
