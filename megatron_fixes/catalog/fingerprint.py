# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of functions: a hash of the normalised AST, so that comments, docstrings and layout don't count.

The same text gives the same hash on every Python from 3.10 to 3.13: ``ast.dump`` and ``ast.unparse`` differ
between them, so the tree is written out here, leaving out what a version adds or drops (``None``, empty lists,
``ctx``, ``kind``, ``type_comment``, and the empty string constants inside f-strings).

A statement outside functions (an import, a constant of a module or a class) is known by its own hash, under the name
``OUTSIDE`` + hash: what matters is whether it is there.

Beside the hash of the whole, each statement has a short hash of its own (a compound statement without its
body), by which a drifted function is compared with the nearest known one without keeping any upstream code.
"""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

OUTSIDE = "="
_IGNORED_FIELDS = {"ctx", "kind", "type_comment"}
_BODIES = {"body", "orelse", "finalbody", "handlers", "cases"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_WITH_DOCSTRING = (*_FUNCTIONS, ast.ClassDef, ast.Module)


@dataclass(frozen=True)
class Statement:
    """One statement of a function: its short hash and where it starts, 1-based."""

    hash: str
    line: int


@dataclass(frozen=True)
class FunctionPrint:
    """What is known of one function by its text alone."""

    qualname: str
    hash: str
    line: int
    statements: tuple[Statement, ...]


def _without_docstring(node: ast.AST, body: list[ast.stmt]) -> list[ast.stmt]:
    if isinstance(node, _WITH_DOCSTRING) and body:
        first = body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            return body[1:]
    return body


def _dump(node: object, *, bodies: bool = True) -> str:
    if isinstance(node, ast.AST):
        parts = [type(node).__name__]
        for name, value in ast.iter_fields(node):
            if name in _IGNORED_FIELDS or value is None or value == []:
                continue
            if name in _BODIES and isinstance(value, list):
                if not bodies:
                    continue
                kept = _without_docstring(node, value) if name == "body" else value
            elif isinstance(node, ast.JoinedStr) and name == "values":
                kept = [v for v in value if not (isinstance(v, ast.Constant) and v.value == "")]
            else:
                kept = value
            parts.append(f"{name}={_dump(kept)}")
        return f"({' '.join(parts)})"
    if isinstance(node, list):
        return f"[{' '.join(_dump(item) for item in node)}]"
    return repr(node)


def _hash(text: str, length: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def _statements(function: ast.AST) -> Iterator[Statement]:
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        block = getattr(function, name, [])
        for node in _without_docstring(function, block) if name == "body" else block:
            line = getattr(node, "lineno", 0) or getattr(getattr(node, "pattern", None), "lineno", 0)
            yield Statement(_hash(_dump(node, bodies=False), 8), line)
            yield from _statements(node)


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    """Functions by qualified name, and under ``OUTSIDE`` the simple statements around them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _FUNCTIONS):
            yield f"{prefix}{child.name}", child
        elif isinstance(child, ast.ClassDef):
            yield from _definitions(child, f"{prefix}{child.name}.")
        elif isinstance(child, (ast.stmt, ast.ExceptHandler)):
            if isinstance(child, ast.stmt) and not any(hasattr(child, name) for name in _BODIES):
                yield OUTSIDE, child
            yield from _definitions(child, prefix)


def functions(source: str | bytes, only: Collection[str] | None = None) -> dict[str, list[FunctionPrint]]:
    """Fingerprint functions and methods of a module, and the statements around them.

    Functions inside functions belong to the outer one.

    Args:
        source: The module's text.
        only: Names of those that are wanted; None for all.

    Returns:
        Qualified name, or ``OUTSIDE`` + hash, to its definitions in order of text; more than one where the text defines
        a function more than once.

    Raises:
        SyntaxError: The text is not Python.
        ValueError: The text holds null bytes.
    """
    found: dict[str, list[FunctionPrint]] = {}
    statements = only is None or any(name.startswith(OUTSIDE) for name in only)
    for qualname, node in _definitions(ast.parse(source), ""):
        if qualname == OUTSIDE:
            if statements:
                hash_ = _hash(_dump(node), 16)
                # It may be there several times.
                found[f"{OUTSIDE}{hash_}"] = [FunctionPrint(f"{OUTSIDE}{hash_}", hash_, node.lineno, ())]
        elif only is None or qualname in only:
            found.setdefault(qualname, []).append(
                FunctionPrint(qualname, _hash(_dump(node), 16), node.lineno, tuple(_statements(node)))
            )
    return found
