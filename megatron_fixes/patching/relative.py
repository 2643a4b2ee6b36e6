# SPDX-License-Identifier: Apache-2.0
"""Relative paths that come from a patch, a journal or an archive, checked before anything is opened.

Rule: a path is written with ``/``, is relative, is in normal form (no ``.``, ``..`` or empty part) and holds no
NUL or backslash. Whatever breaks the rule could leave its folder, so it is refused by all readers. Symbolic links
inside the folder are not handled here: they are resolved where a file is replaced.
"""

from __future__ import annotations


def escape_reason(path: str) -> str:
    """Tell why a relative path may not be used.

    Args:
        path: The path as written in what was read.

    Returns:
        Empty when the path is fine, else what is wrong with it.
    """
    if not path:
        return "the path is empty"
    if "\0" in path or "\\" in path:
        return "the path holds a NUL or a backslash"
    if path.startswith("/"):
        return "the path is absolute"
    parts = path.split("/")
    if ".." in parts:
        return "the path leaves its folder through '..'"
    if "." in parts or "" in parts:
        return "the path is not in normal form"
    return ""
