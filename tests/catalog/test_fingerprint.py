# SPDX-License-Identifier: Apache-2.0
"""Fingerprints see what a function does and not how it is laid out, and find every definition of it."""

from __future__ import annotations

import pytest

from megatron_fixes.catalog.fingerprint import OUTSIDE, functions

BASE = '''
class Group:
    def reset(self, force=False):
        """Reset."""
        if force:
            self.count = {}  # all of it
        self.ready = f"{self.count}"
        return self.ready
'''


def only(source: str, name: str = "Group.reset") -> str:
    (found,) = functions(source)[name]
    return found.hash


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('        """Reset."""\n', ""),
        ("  # all of it", ""),
        ("force=False", "force = False"),
        ('f"{self.count}"', "f'{self.count}'"),
        ("        return self.ready\n", "\n\n        return (\n            self.ready\n        )\n"),
    ],
)
def test_layout_comments_and_docstrings_do_not_count(old: str, new: str) -> None:
    assert old in BASE
    assert only(BASE.replace(old, new)) == only(BASE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("if force:", "if not force:"),
        ("force=False", "force=True"),
        ("{}", "{1: 2}"),
        ("self.ready = f", "self.other = f"),
        ("    def reset", "    @staticmethod\n    def reset"),
        ("    def reset", "    async def reset"),
        ("        return self.ready\n", "        return self.ready, None\n"),
        (
            "            self.count = {}  # all of it\n",
            "            self.count = {}\n        else:\n            pass\n",
        ),
    ],
)
def test_every_change_of_meaning_counts(old: str, new: str) -> None:
    assert old in BASE
    assert only(BASE.replace(old, new)) != only(BASE)


def test_a_method_and_a_function_of_the_same_name_are_told_apart() -> None:
    found = functions(BASE + "\ndef reset():\n    def inner():\n        pass\n")
    assert set(found) == {"Group.reset", "reset"}


def test_a_function_that_is_defined_twice_has_two_definitions() -> None:
    source = (
        "try:\n    import a\n    def f():\n        return a\nexcept ImportError:\n    def f():\n        return None\n"
    )
    assert len(functions(source)["f"]) == 2


def test_statements_keep_their_lines_and_a_changed_header_changes_one_statement() -> None:
    (before,) = functions(BASE)["Group.reset"]
    (after,) = functions(BASE.replace("if force:", "if self.force:"))["Group.reset"]
    differing = [a for a, b in zip(before.statements, after.statements, strict=True) if a.hash != b.hash]
    assert [statement.line for statement in differing] == [5]
    assert [statement.line for statement in before.statements] == [5, 6, 7, 8]


@pytest.mark.parametrize("source", ["def f(:\n", "x = '\0'"])
def test_text_that_is_not_python_is_an_error(source: str) -> None:
    with pytest.raises((SyntaxError, ValueError)):
        functions(source)


def test_statements_outside_functions_are_told_by_what_they_say_and_not_by_where_they_stand() -> None:
    one = "import a\nX = 1\nclass C:\n    y = 2\n    def f(self):\n        import b\nif X:\n    import c\n"
    other = "if X:\n    import c  # why\nX = 1\nX = 1\nimport a\nclass D:\n    y = 2\n"
    statements = {name for name in functions(one) if name.startswith(OUTSIDE)}
    assert len(statements) == 4
    assert statements == {name for name in functions(other) if name.startswith(OUTSIDE)}
    assert set(functions(one, {"C.f"})) == {"C.f"}
