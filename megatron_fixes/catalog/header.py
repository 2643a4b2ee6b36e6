# SPDX-License-Identifier: Apache-2.0
"""The head of a patch file: DEP-3 fields, ours beside them, and what each may say.

Guards the form only; whether a header agrees with the matrix and the series is ``lint``'s question. Every fault
is collected with its line, so that one run shows them all.

Source: DEP-3 (field names and folding), Yocto's recipe style guide (the six Upstream-Status words).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

FIX_ID = re.compile(r"MF\d{4}")
RELEASE = re.compile(r"\d+\.\d+\.\d+")
UPSTREAM_STATUSES = ("Pending", "Submitted", "Backport", "Denied", "Inactive-Upstream", "Inappropriate")
NUMERICS = ("neutral", "changing", "gated")
PARAGRAPHS = ("Symptom:", "Cause:", "After this patch:")
TERMINATOR = "---"

_PATTERNS: dict[str, tuple[str, str]] = {
    "Description": (r".{10,100}", "a synopsis of 10 to 100 characters"),
    "Fix-Id": (r"MF\d{4}", "MF and four digits"),
    "Applies-To": (r"\d+\.\d+\.\d+( \d+\.\d+\.\d+)*", "exact releases, separated by single spaces"),
    "Fixed-In": (r"open|\d+\.\d+\.\d+ \(commit [0-9a-f]{10,40}(, .+)?\)", "'open', or 'X.Y.Z (commit <hex>, …)'"),
    "Upstream-Status": (rf"({'|'.join(UPSTREAM_STATUSES)})( \[.+\])?", "one of " + ", ".join(UPSTREAM_STATUSES)),
    "Numerics": ("|".join(NUMERICS), "one of " + ", ".join(NUMERICS)),
    "Requires": (r"(MF\d{4}( MF\d{4})*)?", "fix ids, separated by single spaces, or nothing"),
    "Proof": (r"megatron_fixes\.proofs\.mf\d{4}", "megatron_fixes.proofs.mfNNNN"),
    "Origin": (r".+", "a DEP-3 origin, such as 'vendor' or 'backport, <address>'"),
    "Bug": (r"none|https://\S+", "'none' or an https address"),
    "Forwarded": (r"no|not-needed|https://\S+", "'no', 'not-needed' or an https address"),
    "Last-Update": (r"\d{4}-\d\d-\d\d", "a date, YYYY-MM-DD"),
}
_FIELD = re.compile(r"([A-Z][A-Za-z-]*):(?: (.*))?")


@dataclass(frozen=True)
class Fault:
    """One broken rule, with the place it was broken in."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


@dataclass(frozen=True)
class PatchHeader:
    """A well-formed head. ``paragraphs`` maps ``Symptom``, ``Cause`` and ``After this patch`` to their text."""

    description: str
    paragraphs: dict[str, str]
    fix_id: str
    applies_to: tuple[str, ...]
    fixed_in: str
    upstream_status: str
    numerics: str
    requires: tuple[str, ...]
    proof: str
    origin: str
    bug: str
    forwarded: str
    last_update: str
    lines: dict[str, int] = field(default_factory=dict, compare=False)

    @property
    def fixed_release(self) -> str | None:
        """The first release that has the fix upstream, or None while it is open."""
        match = RELEASE.match(self.fixed_in)
        return match.group() if match else None


def parse_header(text: str, path: str) -> tuple[PatchHeader | None, list[Fault]]:
    """Parse a patch file's head.

    Args:
        text: The whole file; what follows the ``---`` line is not looked at.
        path: Named in the faults.

    Returns:
        The header, or None if anything is wrong with it, and every fault found.
    """
    faults: list[Fault] = []
    values: dict[str, str] = {}
    lines: dict[str, int] = {}
    body: list[str] = []
    last, terminated, number = "", False, 0
    for number, line in enumerate(text.split("\n"), start=1):
        if line == TERMINATOR:
            terminated = True
            break
        if line.startswith("diff --git "):
            break
        if line.startswith(" ") and last:
            if last != "Description":
                faults.append(Fault(path, number, f"{last} goes on over a second line, expected one line"))
            body.append(line[1:])
            continue
        match = _FIELD.fullmatch(line)
        if not match:
            faults.append(Fault(path, number, f"got {line!r}, expected 'Field: value' or a folded line"))
            continue
        last, value = match.group(1), match.group(2) or ""
        if last not in _PATTERNS:
            faults.append(Fault(path, number, f"unknown field {last}, expected one of {', '.join(_PATTERNS)}"))
        elif last in values:
            faults.append(Fault(path, number, f"field {last} a second time, first in line {lines[last]}"))
        else:
            values[last], lines[last] = value, number
            pattern, expected = _PATTERNS[last]
            if not re.fullmatch(pattern, value):
                faults.append(Fault(path, number, f"{last}: got {value!r}, expected {expected}"))
    if not terminated:
        faults.append(Fault(path, number, f"no '{TERMINATOR}' line between head and diff"))
    faults += [Fault(path, 1, f"field {name} is missing") for name in _PATTERNS if name not in values]
    paragraphs = _paragraphs(body)
    for name in PARAGRAPHS:
        if not paragraphs.get(name.rstrip(":")):
            faults.append(Fault(path, lines.get("Description", 1), f"Description has no paragraph '{name}'"))
    if faults:
        return None, faults
    return _header(values, paragraphs, lines), []


def _paragraphs(body: list[str]) -> dict[str, str]:
    paragraphs = {}
    for paragraph in "\n".join(body).split("\n.\n"):
        text = " ".join(paragraph.split())
        for name in PARAGRAPHS:
            if text.startswith(name):
                paragraphs[name.rstrip(":")] = text[len(name) :].strip()
    return paragraphs


def _header(values: dict[str, str], paragraphs: dict[str, str], lines: dict[str, int]) -> PatchHeader:
    return PatchHeader(
        description=values["Description"],
        paragraphs=paragraphs,
        fix_id=values["Fix-Id"],
        applies_to=tuple(values["Applies-To"].split()),
        fixed_in=values["Fixed-In"],
        upstream_status=values["Upstream-Status"],
        numerics=values["Numerics"],
        requires=tuple(values["Requires"].split()),
        proof=values["Proof"],
        origin=values["Origin"],
        bug=values["Bug"],
        forwarded=values["Forwarded"],
        last_update=values["Last-Update"],
        lines=lines,
    )
