# SPDX-License-Identifier: Apache-2.0
"""Paths as words that a person can read and paste into a shell, whatever bytes they hold.

A name of printable characters is quoted where a POSIX shell needs it. One with other characters, or with bytes that
are not UTF-8 (which Python carries as lone surrogates), is written ``$'...'`` with ``\\xHH`` for each such byte, as
bash, zsh and ksh read it. Not handled: a shell without ``$'...'`` (older dash) and such names.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path


def quote(path: str | Path) -> str:
    """Return a path as one word for a shell."""
    text = str(path)
    if text.isprintable():
        return shlex.quote(text)
    return f"$'{escape(text)}'"


def shown(path: str | Path) -> str:
    """Return a path to be read: as it is if every character can be printed, else as a word for a shell."""
    text = str(path)
    return text if text.isprintable() else quote(text)


def escape(text: str) -> str:
    """Return text for between ``$'`` and ``'``: what can't be printed as the escapes of its bytes."""
    marked = {"\\": r"\\", "'": r"\'"}
    return "".join(marked.get(c, c) if c.isprintable() else "".join(f"\\x{b:02x}" for b in _bytes(c)) for c in text)


def _bytes(character: str) -> bytes:
    try:
        return os.fsencode(character)
    except UnicodeEncodeError:
        return character.encode("utf-8", "surrogatepass")
