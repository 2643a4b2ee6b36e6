# SPDX-License-Identifier: Apache-2.0
"""What is said of a machine: one sentence with its verdict, and whether it stops ``apply``.

The verdicts:

* ``fits``: the matrix has it as something that ran;
* ``untested``: nothing speaks against it, and nobody has seen it run;
* ``unfit``: got something else than what is expected; the sentence says why;
* ``unknown``: what decides could not be read;
* ``note``: no judgement, and worth knowing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

Verdict = Literal["fits", "untested", "unfit", "unknown", "note"]
_WORST_FIRST: tuple[Verdict, ...] = ("unfit", "unknown", "untested", "fits")


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One sentence about one subject.

    Attributes:
        subject: What it is about: ``driver``, or the name of a GPU.
        source: The address that the rule is from, or empty.
        todo: What to do, one imperative sentence, or empty.
        stops: Whether training can't work so, whatever else is right.
    """

    subject: str
    verdict: Verdict
    sentence: str
    source: str = ""
    todo: str = ""
    stops: bool = False

    @property
    def line(self) -> str:
        """Subject and sentence, to be printed."""
        return printable(f"{self.subject}: {self.sentence}")


def printable(text: str) -> str:
    """Text of a driver or a file for a terminal: what can't be printed, such as control characters, as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def worst(findings: Iterable[Finding]) -> Verdict:
    """The verdict on the whole machine; ``note`` where there was nothing to judge."""
    verdicts = {finding.verdict for finding in findings}
    return next((verdict for verdict in _WORST_FIRST if verdict in verdicts), "note")
