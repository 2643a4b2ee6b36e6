# SPDX-License-Identifier: Apache-2.0
"""Reads a work tree's git directory, HEAD and release tags as files, so that no git binary is needed.

Rules:

- ``.git`` is a directory, or a file ``gitdir: PATH`` as in worktrees and submodules.
- HEAD and loose refs are the work tree's own; tags and packed refs lie in the common directory.
- An annotated tag is peeled through ``packed-refs`` (``^`` lines) or its loose object.
- Of several release tags on one commit the highest version counts (a release candidate is often tagged too).

Not handled: annotated tags whose object is packed while the ref is loose, and the reftable format. Both read as
"no tag", never as a wrong one.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from packaging.version import InvalidVersion, Version

from megatron_fixes.regular import read_regular

_TAG_PREFIX = "core_v"
_OBJECT_ID = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?\Z")
_MAX_LINKS = 5


def git_directory(root: Path) -> Path | None:
    """Return the git directory of a work tree whose top is ``root``, or None if it is not one."""
    marker = root / ".git"
    if marker.is_dir():
        found = marker
    else:
        text = _read(marker)
        if text is None or not text.startswith("gitdir:"):
            return None
        found = root / text[len("gitdir:") :].strip()
    found = found.resolve()
    return found if (found / "HEAD").is_file() else None


def release_tag(git_dir: Path) -> str | None:
    """Return the ``core_v...`` tag of the commit that is checked out, or None if it has none."""
    common = _common_directory(git_dir)
    packed, peeled = _packed_refs(common)
    head = _head_commit(git_dir, common, packed)
    if head is None:
        return None
    tags = {name: peeled.get(name, commit) for name, commit in packed.items() if name.startswith("refs/tags/")}
    tag_dir = common / "refs" / "tags"
    for file in sorted(tag_dir.glob(f"{_TAG_PREFIX}*")):
        if commit := _peel(common, (_read(file) or "").strip()):
            tags[f"refs/tags/{file.name}"] = commit
        else:
            tags.pop(f"refs/tags/{file.name}", None)
    names = [name[len("refs/tags/") :] for name, commit in tags.items() if commit == head]
    versions = [(version, name) for name in names if (version := tag_version(name)) is not None]
    return max(versions)[1] if versions else None


def is_sparse(git_dir: Path | None) -> bool:
    """Whether the work tree of a git directory is, or was, checked out in part."""
    return git_dir is not None and (git_dir / "info" / "sparse-checkout").is_file()


def tag_version(tag: str) -> Version | None:
    """Return the version that a ``core_v...`` tag names, or None if it names none."""
    if not tag.startswith(_TAG_PREFIX):
        return None
    try:
        return Version(tag[len(_TAG_PREFIX) :])
    except InvalidVersion:
        return None


def _read(file: Path) -> str | None:
    try:
        return read_regular(file).decode("utf-8", "replace")
    except OSError:
        return None


def _common_directory(git_dir: Path) -> Path:
    text = _read(git_dir / "commondir")
    return (git_dir / text.strip()).resolve() if text else git_dir


def _packed_refs(common: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return the packed refs by name, and what the annotated tags among them peel to."""
    refs: dict[str, str] = {}
    peeled: dict[str, str] = {}
    name = ""
    for line in (_read(common / "packed-refs") or "").split("\n"):
        if line.startswith("^") and name:
            peeled[name] = line[1:].strip()
        elif not line.startswith("#") and " " in line:
            object_id, name = line.strip().split(" ", 1)
            refs[name] = object_id
    return refs, peeled


def _head_commit(git_dir: Path, common: Path, packed: dict[str, str]) -> str | None:
    text = _read(git_dir / "HEAD")
    for _ in range(_MAX_LINKS):
        if text is None:
            return None
        text = text.strip()
        if not text.startswith("ref:"):
            return text if _OBJECT_ID.match(text) else None
        name = text[len("ref:") :].strip()
        if not name.startswith("refs/") or ".." in name.split("/"):
            return None
        text = _read(git_dir / name) or _read(common / name) or packed.get(name)
    return None


def _peel(common: Path, object_id: str) -> str | None:
    """Return the commit that a loose tag ref stands for, or None if that can't be told from loose objects."""
    for _ in range(_MAX_LINKS):
        if not _OBJECT_ID.match(object_id):
            return None
        try:
            data = zlib.decompress(read_regular(common / "objects" / object_id[:2] / object_id[2:]))
        except OSError:
            # A packed object. A lightweight tag is then still equal to HEAD, an annotated one never is.
            return object_id
        except zlib.error:
            return None
        if not data.startswith(b"tag "):
            return object_id
        found = re.search(rb"\0object ([0-9a-f]+)\n", data)
        if found is None:
            return None
        object_id = found[1].decode()
    return None
