# SPDX-License-Identifier: Apache-2.0
"""What our archives are, to the byte, and that every other archive is refused."""

from __future__ import annotations

import gzip
import io
import subprocess
import tarfile
import zlib
from pathlib import Path

import pytest

from megatron_fixes.errors import RefusedError
from megatron_fixes.release import archive
from megatron_fixes.release.archive import name_fault, pack, unpack

FILES = {"root/b.txt": b"b" * 1000, "root/a.sh": b"#!/bin/sh\n", "root/empty": b"", "top": b"\0" * 70_000}
MTIME = 1_767_225_600
GOOD = pack(FILES, mtime=MTIME, executable=["root/a.sh"])


def test_an_archive_is_read_back_whole() -> None:
    assert unpack(GOOD, source="x") == dict(sorted(FILES.items()))


def test_the_order_of_the_files_does_not_matter() -> None:
    assert pack(dict(reversed(FILES.items())), mtime=MTIME, executable=["root/a.sh"]) == GOOD


def test_other_programs_read_it(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(GOOD), mode="r:gz") as opened:
        entries = opened.getmembers()
        assert {entry.name: opened.extractfile(entry).read() for entry in entries} == FILES  # type: ignore[union-attr]
    assert {(e.uid, e.gid, e.uname, e.gname, e.mtime) for e in entries} == {(0, 0, "", "", MTIME)}
    assert {entry.name: entry.mode for entry in entries} == {
        name: 0o755 if name.endswith(".sh") else 0o644 for name in FILES
    }
    subprocess.run(["tar", "-xzf", "-", "-C", str(tmp_path)], input=GOOD, check=True)
    assert {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()} == set(FILES)


def test_it_does_not_depend_on_the_version_of_zlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zlib, "compressobj", None)
    monkeypatch.setattr(zlib, "compress", None)
    assert pack(FILES, mtime=MTIME, executable=["root/a.sh"]) == GOOD


@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 131_070])
def test_the_gzip_is_sound_at_the_edges_of_its_blocks(size: int) -> None:
    assert gzip.decompress(archive._gzip(b"x" * size)) == b"x" * size


def entry(name: str, content: bytes = b"x", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    made = tarfile.TarInfo(name)
    made.size, made.mtime, made.mode = len(content), MTIME, 0o644
    for field, value in fields.items():
        setattr(made, field, value)
    return made, content if made.isreg() else b""


def tar_of(*entries: tuple[tarfile.TarInfo, bytes], format: int = tarfile.USTAR_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=format) as made:
        for info, content in entries:
            info.size = len(content)
            made.addfile(info, io.BytesIO(content))
    return archive._gzip(buffer.getvalue())


def with_header_bytes(at: int, new: bytes) -> bytes:
    """An archive of one file in whose header some bytes are others, with a checksum that fits."""
    tar = bytearray(gzip.decompress(pack({"name": b"x"}, mtime=MTIME)))
    tar[at : at + len(new)] = new
    tar[148:156] = b" " * 8
    tar[148:156] = b"%06o\0 " % sum(tar[:512])
    return archive._gzip(bytes(tar))


UNSAFE: dict[str, tuple[bytes, str]] = {
    "absolute": (tar_of(entry("/etc/passwd")), "is absolute"),
    "escape": (tar_of(entry("root/../../x")), "leaves its folder"),
    "escape at the end": (tar_of(entry("root/..")), "leaves its folder"),
    "dot": (tar_of(entry("./x")), "not in normal form"),
    "double slash": (tar_of(entry("a//x")), "not in normal form"),
    "backslash": (tar_of(entry("a\\x")), "a NUL or a backslash"),
    "space": (tar_of(entry("a x")), "other characters"),
    "newline": (tar_of(entry("a\nx")), "other characters"),
    "option": (tar_of(entry("-rf")), "begins with -"),
    "option in a folder": (tar_of(entry("a/-rf")), "begins with -"),
    "symbolic link": (tar_of(entry("x", type=tarfile.SYMTYPE, linkname="/etc/passwd")), "a symbolic link"),
    "hard link": (tar_of(entry("x", type=tarfile.LNKTYPE, linkname="y")), "a hard link"),
    "character device": (tar_of(entry("x", type=tarfile.CHRTYPE)), "a character device"),
    "block device": (tar_of(entry("x", type=tarfile.BLKTYPE)), "a block device"),
    "fifo": (tar_of(entry("x", type=tarfile.FIFOTYPE)), "a fifo"),
    "directory": (tar_of(entry("x", type=tarfile.DIRTYPE)), "a directory entry"),
    "old kind of file": (tar_of(entry("x", type=tarfile.AREGTYPE)), "an entry of type"),
    "unknown kind": (with_header_bytes(156, b"Z"), "an entry of type"),
    "long name of GNU": (tar_of(entry("a/" * 120 + "x"), format=tarfile.GNU_FORMAT), "a long name of GNU tar"),
    "long name of pax": (tar_of(entry("a/" * 150 + "x"), format=tarfile.PAX_FORMAT), "a pax header"),
    "too long": (tar_of(entry("a" * 110 + "/" + "b" * 90)), "has 201 characters"),
    "not UTF-8": (with_header_bytes(0, b"\xff\xfe"), "other than ASCII"),
    "UTF-8": (tar_of(entry("\u00e9")), "other than ASCII"),
    "twice": (tar_of(entry("x"), entry("x", b"y")), "twice"),
    "file and folder": (tar_of(entry("x"), entry("x/y")), "as a file and as a folder"),
    "set-uid": (tar_of(entry("x", mode=0o4755)), "with mode 4755"),
    "for all to write": (tar_of(entry("x", mode=0o666)), "with mode 666"),
    "owner": (tar_of(entry("x", uid=1000)), "of our form"),
    "owner's name": (tar_of(entry("x", uname="me")), "of our form"),
    "link name of a file": (with_header_bytes(157, b"y"), "of our form"),
    "two times": (tar_of(entry("x"), entry("y", mtime=1)), "several times"),
    "unsorted": (tar_of(entry("y"), entry("x")), "of our form"),
    "size that is no number": (with_header_bytes(124, b"zzzzzzzzzzz"), "octal numbers"),
    "negative size": (with_header_bytes(124, b"-0000000001"), "cut off"),
    "negative time": (with_header_bytes(136, b"-0000000001"), "of our form"),
    "size beyond the end": (with_header_bytes(124, b"77777777777"), "cut off"),
    "empty": (tar_of(), "no file"),
    "compressed": (gzip.compress(gzip.decompress(GOOD), mtime=0), "of our form"),
    "name of the gzip": (GOOD[:3] + b"\x08" + GOOD[4:10] + b"name\0" + GOOD[10:], "of our form"),
    "time of the gzip": (GOOD[:4] + b"\x01" + GOOD[5:], "of our form"),
    "cut off": (GOOD[:-1], "cut off"),
    "cut off in the middle": (GOOD[: len(GOOD) // 2], "cut off"),
    "bytes after the end": (GOOD + b"x", "after the end"),
    "a second member": (GOOD + GOOD, "after the end"),
    "files after the end of the tar": (
        archive._gzip(gzip.decompress(GOOD) + gzip.decompress(pack({"late": b"x"}, mtime=MTIME))),
        "of our form",
    ),
    "no gzip": (b"PK\x03\x04", "no gzip file"),
    "nothing": (b"", "cut off"),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNSAFE)
def test_an_unsafe_archive_is_refused(kind: str) -> None:
    data, reason = UNSAFE[kind]
    with pytest.raises(RefusedError, match=f"(?s){reason}") as caught:
        unpack(data, source="some.tar.gz")
    assert caught.value.context == "some.tar.gz"


def test_a_bomb_is_refused_before_it_is_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_BYTES", 2**20)
    bomb = gzip.compress(b"\0" * 2**24)
    with pytest.raises(RefusedError, match="got more than 1048576 bytes once unpacked"):
        unpack(bomb, source="bomb")


def test_too_many_files_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_FILES", 3)
    with pytest.raises(RefusedError, match="more than 3 files"):
        unpack(GOOD, source="x")


@pytest.mark.parametrize("name", ["/x", "a/../b", "", "a//b", "a b", "-x", "a/./b", "x" * 201, "\u00e9", "a\0b"])
def test_no_such_name_is_written(name: str) -> None:
    assert name_fault(name)
    with pytest.raises(ValueError, match="got the name"):
        pack({name: b""}, mtime=0)


def test_no_byte_of_an_archive_changes_unnoticed() -> None:
    small = pack({"a": b"some text", "b/c": b""}, mtime=MTIME)
    for at in range(len(small)):
        changed = bytearray(small)
        changed[at] ^= 1
        with pytest.raises(RefusedError):
            unpack(bytes(changed), source="x")
