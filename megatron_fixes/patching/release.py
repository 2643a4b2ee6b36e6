# SPDX-License-Identifier: Apache-2.0
"""Tells which Megatron-LM release a tree is, from files alone, and which file said so.

Order: ``megatron/core/package_info.py`` (read as a syntax tree, never run), then the one ``megatron_core``
dist-info beside ``megatron/``, then the git tag of the commit that is checked out. A source that is absent,
unreadable or contradicts itself is passed over; when none is left the release is unknown, not guessed. Not
handled: the ``+sha`` that Megatron adds to its version at run time.
"""

from __future__ import annotations

import ast
from pathlib import Path

from packaging.version import InvalidVersion, Version

from megatron_fixes.patching.gitfiles import release_tag, tag_version
from megatron_fixes.regular import read_regular

PACKAGE_INFO = "megatron/core/package_info.py"


def find_release(root: Path, git_dir: Path | None) -> tuple[str | None, str]:
    """Find the release of the tree below ``root``.

    Args:
        root: Directory that holds ``megatron/core``.
        git_dir: Git directory if ``root`` is the top of a work tree.

    Returns:
        The release in normal form and the source that named it; None and an empty text if no source did.
    """
    if (release := _from_package_info(root / PACKAGE_INFO)) is not None:
        return release, PACKAGE_INFO
    info = dist_info(root)
    if info is not None and (release := _from_metadata(info / "METADATA")) is not None:
        return release, info.name
    tag = release_tag(git_dir) if git_dir is not None else None
    if tag is not None:
        return str(tag_version(tag)), f"git tag {tag}"
    return None, ""


def dist_info(root: Path) -> Path | None:
    """Return the dist-info of megatron-core beside ``megatron/``, or None if there is none or more than one."""
    found = [entry for entry in root.glob("megatron_core-*.dist-info") if entry.is_dir()]
    return found[0] if len(found) == 1 else None


def _normal(text: str) -> str | None:
    try:
        return str(Version(text))
    except InvalidVersion:
        return None


def _from_package_info(file: Path) -> str | None:
    try:
        tree = ast.parse(read_regular(file))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    values: dict[str, object] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name):
                values[target.id] = _constant(value, values)
    parts = [values.get(name) for name in ("MAJOR", "MINOR", "PATCH")]
    suffix = values.get("PRE_RELEASE", "")
    if not all(type(part) is int for part in parts):
        version = values.get("VERSION")
        if not isinstance(version, tuple) or len(version) < 3:
            return None
        parts, suffix = list(version[:3]), "".join(map(str, version[3:]))
    if not all(type(part) is int for part in parts) or not isinstance(suffix, str):
        return None
    return _normal(".".join(map(str, parts)) + suffix)


def _constant(node: ast.expr, values: dict[str, object]) -> object:
    """Return the value of a constant, a known name, or a tuple of these; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return values.get(node.id)
    if isinstance(node, ast.Tuple):
        return tuple(_constant(element, values) for element in node.elts)
    return None


def _from_metadata(file: Path) -> str | None:
    try:
        text = read_regular(file).decode("utf-8", "replace")
    except OSError:
        return None
    for line in text.split("\n"):
        if not line.strip():
            return None
        name, _, value = line.partition(":")
        if name.lower() == "version":
            return _normal(value.strip())
    return None
