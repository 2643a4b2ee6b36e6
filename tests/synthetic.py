# SPDX-License-Identifier: Apache-2.0
"""A small distribution of our own, with fixes that edit one file or two, and the Megatron-LM tree that they are for.

The real fixes of a line may all lie in one file; what happens between files is tested with these. A distribution is a
checkout with the package, three patches, the matrix and the tables that are generated from them, so that it runs as a
process (``PYTHONPATH``) and, by ``use``, within this one.

MF9001 edits both files, MF9002 the first and MF9003 the second.
"""

from __future__ import annotations

import difflib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from megatron_fixes.catalog.matrix import load_matrix

from .loading import ROOT, load_program

FIRST = "megatron/core/first.py"
SECOND = "megatron/core/second.py"
_BODY = "".join(f"    total += {number}\n" for number in range(6))


def module(*names: str) -> str:
    """The text of a module with these functions, each long enough to hold a hunk of its own."""
    return "\n\n".join(f"def {name}(total):\n{_BODY}    return total - len('{name}')\n" for name in names)


FILES = {
    "megatron/core/__init__.py": "",
    "megatron/core/package_info.py": 'MAJOR = 0\nMINOR = 16\nPATCH = 1\nPRE_RELEASE = ""\n'
    "VERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)\n",
    FIRST: module("launch", "unrelated", "drain"),
    SECOND: module("wait", "apart", "finish"),
}
# Fix to what it puts in place of what, by path.
EDITS = {
    "MF9001": {FIRST: ("len('launch')", "len('mended')"), SECOND: ("len('wait')", "len('mended')")},
    "MF9002": {FIRST: ("len('drain')", "len('mended')")},
    "MF9003": {SECOND: ("len('finish')", "len('mended')")},
}
IDS = tuple(EDITS)
_HEAD = """Description: A fix of a synthetic tree
 Symptom: nobody sees it
 .
 Cause: there is none
 .
 After this patch: the text is another
Fix-Id: {fix_id}
Applies-To: 0.16.1
Fixed-In: open
Upstream-Status: Pending
Numerics: changing
Requires:
Proof: megatron_fixes.proofs.{module}
Origin: vendor
Bug: none
Forwarded: no
Last-Update: 2026-11-30
---
"""


def write_tree(root: Path) -> Path:
    """Lay the tree that the fixes are for."""
    for path, text in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def patched(*fix_ids: str, edits: Mapping[str, Mapping[str, tuple[str, str]]] = EDITS) -> dict[str, bytes]:
    """The two files with some fixes in them."""
    texts = {FIRST: FILES[FIRST], SECOND: FILES[SECOND]}
    for fix_id in fix_ids:
        for path, (old, new) in edits[fix_id].items():
            texts[path] = texts[path].replace(old, new)
    return {path: text.encode() for path, text in texts.items()}


def patch_text(fix_id: str, edits: Mapping[str, tuple[str, str]]) -> str:
    """A patch file."""
    text = _HEAD.format(fix_id=fix_id, module=fix_id.lower())
    for path, (old, new) in edits.items():
        before, after = FILES[path].splitlines(keepends=True), FILES[path].replace(old, new).splitlines(keepends=True)
        diff = "".join(difflib.unified_diff(before, after, f"a/{path}", f"b/{path}"))
        text += f"diff --git a/{path} b/{path}\n{diff}"
    return text


def _matrix(fix_ids: Sequence[str]) -> str:
    row = {"symptom": "Nothing is seen.", "hit": "Nobody is hit.", "since": "0.16.1", "links": []}
    cells = {"0.16.1": {"verdict": "needed", "tested": ["gloo"]}}
    releases = {"0.16.1": {"line": "core_v0.16", "python": "3.11", "torch": "2.13.0", "requires_torch": ""}}
    fixes = {fix_id: {"slug": f"synthetic-{fix_id.lower()}", **row, "cells": cells} for fix_id in fix_ids}
    return json.dumps({"schema": 1, "releases": releases, "fixes": fixes})


def build(folder: Path, edits: Mapping[str, Mapping[str, tuple[str, str]]] = EDITS) -> Path:
    """Make the distribution in a folder that is not there, and return it."""
    ours = shutil.ignore_patterns("__pycache__", "_data")
    shutil.copytree(ROOT / "megatron_fixes", folder / "megatron_fixes", ignore=ours)
    line = folder / "patches" / "core_v0.16"
    line.mkdir(parents=True)
    names = {fix_id: f"{fix_id}-synthetic-{fix_id.lower()}.patch" for fix_id in edits}
    (line / "series").write_text("".join(f"{name}\n" for name in names.values()))
    for fix_id, name in names.items():
        (line / name).write_text(patch_text(fix_id, edits[fix_id]))
    matrix = folder / "compat_matrix.yaml"  # JSON is YAML too
    matrix.write_text(_matrix(tuple(edits)))
    (folder / "megatron_fixes/catalog/matrix.json").write_text(_matrix(tuple(edits)))
    script, tree = load_program("scripts/record_fingerprints.py"), write_tree(folder / "tree")
    script.matrix_path, script.patches_root = (lambda: matrix), (lambda: folder / "patches")
    script.fetch = lambda *_: tree
    (folder / "megatron_fixes/catalog/fingerprints.json").write_bytes(msgspec.json.encode(script.record()))
    assert set(load_matrix(matrix).fixes) == set(edits)
    return folder


def use(distribution: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process take patches and tables from a distribution."""
    monkeypatch.setattr("megatron_fixes.catalog.data._PACKAGE", distribution / "megatron_fixes")


def edited(tree: Path) -> dict[str, bytes]:
    """The two files that the fixes edit, as a tree has them."""
    return {path: (tree / path).read_bytes() for path in (FIRST, SECOND)}
