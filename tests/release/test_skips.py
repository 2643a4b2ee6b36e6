# SPDX-License-Identifier: Apache-2.0
"""Every reason for which a test of this suite may be skipped is known to the rule of releases, one way or the other.

A reason that nobody held against the rule would first be seen when a release is refused. Here the sources of all tests
are read: each reason is allowed, or stands below as one that refuses a release. Not found: a skip under another name
than pytest's, and one inside a text that a test writes to a file.
"""

from __future__ import annotations

import ast

import pytest

from tests.loading import ROOT, load_program

MAY_BE_SKIPPED = load_program("scripts/release_rules.py").MAY_BE_SKIPPED
# What can be had by a setup, so that a release is refused without it.
REFUSES = {
    "import-linter needs Python 3.11",
    "needs tomllib (Python 3.11)",
    "python -P came with 3.11",
    "PYTHONSAFEPATH needs Python 3.11",
    "releases are built on Python 3.11 or later",
    "needs setuptools >= 77",
    "needs cyclonedx-python-lib",
    "could not import 'torch'",
    "needs ssh-keygen",
    "git is not installed",
    "no C compiler",
    "{name} is not installed",
    "{release} is not in the cache",
    "NVML is here, and can't be taken away",
}
FILLED = {"{needed}": "2", "{found}": "0", "{devices}": "devices"}


def text_of(node: ast.expr | None) -> str:
    """A reason as it stands in the source, with the names of what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            f"{{{ast.unparse(part.value)}}}" if isinstance(part, ast.FormattedValue) else text_of(part)
            for part in node.values
        )
    return f"not a text: {ast.unparse(node)}" if node else "no reason"


def reasons(source: str) -> list[str]:
    """The reasons of all skips in a source."""
    found = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        kind = ast.unparse(call.func)
        named = {keyword.arg: keyword.value for keyword in call.keywords}
        at = call.args[0] if call.args else None
        if kind in ("pytest.skip", "pytest.mark.skip"):
            found.append(text_of(named.get("reason", at)))
        elif kind == "pytest.mark.skipif":
            found.append(text_of(named.get("reason")))
        elif kind == "pytest.importorskip":
            found.append(text_of(named["reason"]) if "reason" in named else f"could not import '{text_of(at)}'")
    return found


def allowed(reason: str) -> bool:
    """Whether the rule lets a test be skipped for it."""
    for name, value in FILLED.items():
        reason = reason.replace(name, value)
    return MAY_BE_SKIPPED.fullmatch(reason) is not None


FOUND = {
    reason: path.relative_to(ROOT)
    for path in sorted((ROOT / "tests").rglob("*.py"))
    for reason in reasons(path.read_text(encoding="utf-8"))
}


@pytest.mark.parametrize("reason", FOUND)
def test_every_reason_to_skip_is_allowed_or_known_to_refuse_a_release(reason: str) -> None:
    assert allowed(reason) != (reason in REFUSES), f"{FOUND[reason]}: {reason}"


def test_only_reasons_that_there_are_stand_here() -> None:
    assert set(FOUND) >= REFUSES
    # One of each kind is read.
    assert {"needs {needed} CUDA {devices}, found {found}", "there is CUDA here", "needs ssh-keygen"} <= set(FOUND)


def test_a_skip_without_a_reason_that_can_be_read_is_neither() -> None:
    source = "pytest.skip(text)\npytest.mark.skipif(True)\npytest.importorskip('x')\npytest.skip(reason='y')\n"
    found = reasons(source)
    assert found == ["not a text: text", "no reason", "could not import 'x'", "y"]
    assert not any(allowed(reason) or reason in REFUSES for reason in found)
