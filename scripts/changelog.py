# SPDX-License-Identifier: Apache-2.0
"""Reads ``CHANGELOG.md`` and moves what is unreleased under a version. Pure: text in, text out.

A section is ``## 0.1.0 - 2026-12-01`` and all below it up to the next; the first is ``## Unreleased``. Not handled:
what is written in them.
"""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass

from megatron_fixes.errors import RefusedError

UNRELEASED = "Unreleased"
_HEAD = re.compile(r"^## (?P<name>\S+)(?P<rest>.*)$", re.MULTILINE)
_DATE = re.compile(r" - ([0-9]{4}-[0-9]{2}-[0-9]{2})")


@dataclass(frozen=True)
class Section:
    """What one version changed; ``date`` is empty where the heading names no day."""

    date: str
    body: str


def sections(text: str) -> dict[str, Section]:
    """The sections by version, in their order.

    Raises:
        RefusedError: Two sections have one name.
    """
    heads = list(_HEAD.finditer(text))
    found: dict[str, Section] = {}
    for head, after in zip(heads, [*heads[1:], None], strict=True):
        date = _DATE.fullmatch(head["rest"].rstrip())
        try:
            day = datetime.date.fromisoformat(date[1]).isoformat() if date else ""
        except ValueError:
            day = ""
        if head["name"] in found:
            raise RefusedError(f"got two sections {head['name']}, expected one", context="CHANGELOG.md")
        body = text[head.end() : after.start() if after else len(text)].strip("\n")
        found[head["name"]] = Section(day, body)
    return found


def released(text: str, version: str, date: str) -> str:
    """The text with what is unreleased under a version; the section Unreleased stays, empty.

    Raises:
        RefusedError: Nothing is unreleased, or the version has a section already.
    """
    known = sections(text)
    if version in known:
        raise RefusedError(f"got a section {version} already, expected none", context="CHANGELOG.md")
    if UNRELEASED not in known or not known[UNRELEASED].body:
        raise RefusedError("got nothing under Unreleased, expected what the version changes", context="CHANGELOG.md")
    return text.replace(f"## {UNRELEASED}\n", f"## {UNRELEASED}\n\n## {version} - {date}\n", 1)
