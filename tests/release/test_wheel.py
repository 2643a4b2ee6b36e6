# SPDX-License-Identifier: Apache-2.0
"""Wheels are zipped in one form, with every file as the backend wrote it, and no other form is read."""

from __future__ import annotations

import io
import zipfile

import pytest

from megatron_fixes.errors import RefusedError
from megatron_fixes.release.wheel import read_wheel, zip_again

FILES = {"x-1.dist-info/RECORD": b"r", "pkg/b.py": b"b" * 500, "x-1.dist-info/WHEEL": b"w", "pkg/a.py": b""}


def zipped(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


GOOD = zip_again(zipped(FILES), mtime=1_767_225_600)


def test_files_stay_and_the_record_is_last() -> None:
    with zipfile.ZipFile(io.BytesIO(GOOD)) as archive:
        assert archive.namelist() == ["pkg/a.py", "pkg/b.py", "x-1.dist-info/WHEEL", "x-1.dist-info/RECORD"]
        assert {entry.date_time for entry in archive.infolist()} == {(2026, 1, 1, 0, 0, 0)}
        assert {entry.external_attr >> 16 for entry in archive.infolist()} == {0o100644}
    assert read_wheel(GOOD, source="x") == FILES


def test_it_depends_on_the_files_alone() -> None:
    assert zip_again(zipped(dict(reversed(FILES.items())), zipfile.ZIP_STORED), mtime=1_767_225_600) == GOOD


def test_a_time_before_zip_was_made_becomes_its_first() -> None:
    with zipfile.ZipFile(io.BytesIO(zip_again(zipped(FILES), mtime=0))) as archive:
        assert archive.infolist()[0].date_time == (1980, 1, 1, 0, 0, 0)


OTHERS = {
    "compressed": zipped(FILES),
    "unsorted": zipped(FILES, zipfile.ZIP_STORED),
    "absolute": zipped({"/x": b""}, zipfile.ZIP_STORED),
    "escape": zipped({"a/../../x": b""}, zipfile.ZIP_STORED),
    "folder": zipped({"a/": b""}, zipfile.ZIP_STORED),
    "prepended": b"x" + GOOD,
    "appended": GOOD + b"x",
    "cut off": GOOD[:-1],
    "no zip": b"x",
    "nothing": b"",
    "no file": zipped({}),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_another_form_is_refused(kind: str) -> None:
    with pytest.raises(RefusedError) as caught:
        read_wheel(OTHERS[kind], source="x.whl")
    assert caught.value.context == "x.whl"


def test_no_byte_changes_unnoticed() -> None:
    for at in range(len(GOOD)):
        changed = GOOD[:at] + bytes([GOOD[at] ^ 1]) + GOOD[at + 1 :]
        with pytest.raises(RefusedError):
            read_wheel(changed, source="x")
