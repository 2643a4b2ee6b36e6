# SPDX-License-Identifier: Apache-2.0
"""The table of known functions: fingerprint -> the releases it is found in, and the fixes it carries there.

Generated (``scripts/record_fingerprints.py``) by applying every closed subset of every series to every release,
so that a function is recognised with any set of our fixes in it. Holds hashes only, no upstream text.
"""

from __future__ import annotations

import difflib
import hashlib
from typing import TYPE_CHECKING, Literal

import msgspec

from megatron_fixes.errors import DataError
from megatron_fixes.regular import read_regular

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SCHEMA = 1
# Stands for the hash of a function that a file does not define: fixes add functions, and so do releases.
ABSENT = "absent"


class Place(msgspec.Struct, frozen=True, order=True):
    """A release, and the fixes among those that touch the function which are present in it."""

    release: str
    fixes: tuple[str, ...]


class KnownFunction(msgspec.Struct, frozen=True):
    """One text of a function, as ``fingerprint`` sees it, and where it is found; ``ABSENT`` where it is not."""

    hash: str
    places: tuple[Place, ...]
    statements: tuple[str, ...]


class Known(msgspec.Struct, frozen=True):
    """The whole table.

    Attributes:
        patches: Patch name below ``patches/`` to the sha256 of its bytes.
        touches: Fix to the functions it changes in any line, as ``path::qualname``, and to the statements that it adds
            outside functions, as ``path::`` + ``OUTSIDE`` + hash.
        functions: ``path::qualname`` to every known text of it.
        files: Path to the sha256 of contents whose place is known as a whole, so that they need not be parsed: the
            file as published, and with the whole series in it.
    """

    schema: Literal[1]
    patches: dict[str, str]
    touches: dict[str, tuple[str, ...]]
    functions: dict[str, tuple[KnownFunction, ...]]
    files: dict[str, dict[str, Place]] = {}

    def find(self, function: str, hash: str) -> KnownFunction | None:
        """The known text with this hash, or None."""
        return next((known for known in self.functions.get(function, ()) if known.hash == hash), None)

    def place_of(self, path: str, content: bytes) -> Place | None:
        """Where a whole file is found as it is here, or None."""
        return self.files.get(path, {}).get(hashlib.sha256(content).hexdigest())

    def hash_at(self, function: str, place: Place) -> str:
        """The hash of a function in a file that stands at a place; ``ABSENT`` if the file does not define it."""
        own = Place(place.release, tuple(fix_id for fix_id in place.fixes if function in self.touches[fix_id]))
        return next((text.hash for text in self.functions[function] if own in text.places), ABSENT)

    def releases_of(self, function: str, hash: str) -> set[str]:
        """The releases that have this text of a function, whichever fixes are in it."""
        text = self.find(function, hash)
        return {place.release for place in text.places} if text else set()

    def nearest(self, function: str, statements: Sequence[str], release: str | None = None) -> KnownFunction | None:
        """The known text whose statements are most like these; None if the function has no known text.

        Args:
            function: ``path::qualname``.
            statements: Their hashes.
            release: Of texts that are alike as much, one of this release is taken.
        """
        matcher = difflib.SequenceMatcher(b=list(statements), autojunk=False)

        def likeness(known: KnownFunction) -> tuple[float, bool]:
            matcher.set_seq1(list(known.statements))
            return matcher.ratio(), any(place.release == release for place in known.places)

        present = (known for known in self.functions.get(function, ()) if known.hash != ABSENT)
        return max(present, key=likeness, default=None)


def load_known(path: Path) -> Known:
    """Read the table.

    Raises:
        DataError: Missing, or not of this version's form.
    """
    try:
        return msgspec.json.decode(read_regular(path), type=Known)
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(str(error), context=str(path), hint="Run `python scripts/record_fingerprints.py`.") from error
