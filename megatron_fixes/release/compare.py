# SPDX-License-Identifier: Apache-2.0
"""Where two builds of one release differ: the first byte of each file, and whose it is inside an archive. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_fixes.errors import RefusedError
from megatron_fixes.release.archive import unpack
from megatron_fixes.release.wheel import read_wheel


def differences(got: Mapping[str, bytes], expected: Mapping[str, bytes]) -> list[str]:
    """One sentence for each file that is not the same in both, or only in one."""
    found = []
    for name in sorted({*got, *expected}):
        if name not in got or name not in expected:
            found.append(f"{name}: is {'missing' if name not in got else 'not expected'}")
        elif got[name] != expected[name]:
            found.append(f"{name}: {_first(got[name], expected[name])}{_inside(name, got[name], expected[name])}")
    return found


def _first(got: bytes, expected: bytes) -> str:
    """The first byte that differs, counted from 0."""
    shorter = min(len(got), len(expected))
    at = next((at for at in range(shorter) if got[at] != expected[at]), shorter)
    said, wanted = (f"0x{data[at]:02x}" if at < len(data) else "the end" for data in (got, expected))
    return f"byte {at}: got {said}, expected {wanted}"


def _inside(name: str, got: bytes, expected: bytes) -> str:
    read = unpack if name.endswith(".tar.gz") else read_wheel if name.endswith(".whl") else None
    if read is None:
        return ""
    try:
        found = differences(read(got, source=name), read(expected, source=name))
    except RefusedError as error:
        return f" ({error.message})"
    more = f", and {len(found) - 1} more files" if found[1:] else ""
    return f" (inside: {found[0]}{more})" if found else ""
