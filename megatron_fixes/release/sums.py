# SPDX-License-Identifier: Apache-2.0
"""``SHA256SUMS``: what ``sha256sum -c`` reads, in one form only, so that no two texts say the same.

A line is 64 hexadecimal digits, two spaces and a plain file name; lines are sorted by name, each name is there once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from megatron_fixes.errors import RefusedError
from megatron_fixes.release.layout import SUMS

_LINE = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9_][A-Za-z0-9_.+-]*)")


def digest(content: bytes) -> str:
    """The sha256 of some bytes, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def contradictions(claimed: Mapping[str, str], digests: Mapping[str, str]) -> list[str]:
    """What another file that names digests says otherwise than the sums, by name; a sentence for each."""
    return [
        f"says {claimed.get(name, 'nothing')} of {name}, expected {digests.get(name, 'no such file')} as in the sums"
        for name in sorted({*claimed, *digests})
        if claimed.get(name) != digests.get(name)
    ]


def write_sums(digests: Mapping[str, str]) -> bytes:
    """Return the file's bytes for digests by file name."""
    return "".join(f"{digests[name]}  {name}\n" for name in sorted(digests)).encode("ascii")


def read_sums(data: bytes, *, source: str = SUMS) -> dict[str, str]:
    """Return digests by file name.

    Raises:
        RefusedError: The bytes are not what ``write_sums`` writes.
    """
    found: dict[str, str] = {}
    for number, line in enumerate(data.decode("ascii", "replace").split("\n")[:-1], 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise RefusedError(f"got {line!r}, expected '<sha256>  <file name>'", context=f"{source}:{number}")
        found[match[2]] = match[1]
    if not found or write_sums(found) != data:
        raise RefusedError("got other than one line a file, sorted by name, each with a line end", context=source)
    return found
