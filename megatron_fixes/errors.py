# SPDX-License-Identifier: Apache-2.0
"""The one family of errors, so that every failure says what was seen, where, and what to do.

A message reads "got X, expected Y". ``context`` says where (file and line, rank, dotted path) and ``hint``
is one imperative sentence. ``exit_code`` is what the command line ends with: 1 the check failed or the
work was refused, 2 the user's mistake, 70 our own bug. Not handled here: how an error is printed
(``cli.output``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str:
    """The known name that a word was probably meant to be, whatever its case; empty if none is that near.

    The one name that starts with the word, else the first of those that are most alike.

    Args:
        word: As it was typed.
        known: The names.
        likeness: How near it must be, from 0 to 1: the part of both that they share.
    """
    from difflib import SequenceMatcher

    names, wanted = list(known), word.lower()
    longer = [name for name in names if wanted and name.lower().startswith(wanted)]
    if len(longer) == 1:
        return longer[0]
    shares = [SequenceMatcher(None, wanted, name.lower()).ratio() for name in names]
    share = max(shares, default=0.0)
    return names[shares.index(share)] if names and share >= likeness else ""


class MegatronFixesError(Exception):
    """Base of every error that this project raises on purpose.

    Args:
        message: What was got and what was expected.
        context: Where it was seen, as ``path:line``, a rank, or a dotted path.
        hint: One imperative sentence: what to do about it.
    """

    exit_code: ClassVar[int] = 70

    def __init__(self, message: str, *, context: str = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.context = context
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.context}: {self.message}" if self.context else self.message
        return f"{text}\n  hint: {self.hint}" if self.hint else text


class UsageError(MegatronFixesError):
    """The user's mistake: a path, name or option that can't be used as given."""

    exit_code = 2


class RefusedError(MegatronFixesError):
    """The request was understood, but carrying it out would guess or lose something; nothing was changed."""

    exit_code = 1


class DoesNotFitError(RefusedError):
    """A hunk's pre-image was not found in the target text; nothing was changed."""


class RanksDisagreeError(RefusedError):
    """Ranks of one job run different code; nothing was changed on any of them."""


class DataError(MegatronFixesError):
    """A file of this distribution (patch, series, matrix, fingerprints) breaks its own rules."""

    exit_code = 70
