# SPDX-License-Identifier: Apache-2.0
"""``MANIFEST.json`` in the tarball of patches: what it is, what it was built from, and the sha256 of each file.

It names version and commit inside what is signed, so an old tarball under a new name is found out. What each release of
Megatron-LM needs, and on which GPUs that was seen, stands in ``compat_matrix.json`` beside it: the whole matrix, which
this file covers like any other; ``lines`` is its short form. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from megatron_fixes.errors import RefusedError
from megatron_fixes.release import form
from megatron_fixes.release.form import Digest
from megatron_fixes.release.sums import digest

FILE = "MANIFEST.json"


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file's sha256 and size in bytes."""

    sha256: Digest
    size: int


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of Megatron-LM: its releases, and the fixes that it has patches for, in series order."""

    releases: tuple[str, ...]
    fixes: tuple[str, ...]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file.

    Attributes:
        version: Of megatron-fixes.
        commit: The git commit that everything was built from.
        source_date_epoch: The time of that commit, which is that of every file.
        python: The lowest version that ``apply.py`` runs on.
        lines: By name, such as ``core_v0.16``.
        files: Every file of the tarball but this one, by name below its folder.
    """

    schema: Literal[1]
    name: Literal["megatron-fixes-patches"]
    version: str
    commit: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{40}\Z")]
    source_date_epoch: int
    python: str
    lines: dict[str, Line]
    files: dict[str, Entry]


def entries(files: Mapping[str, bytes]) -> dict[str, Entry]:
    """Return what a manifest says of some files, in order of name."""
    return {name: Entry(digest(files[name]), len(files[name])) for name in sorted(files)}


def decode(data: bytes, *, source: str = FILE) -> Manifest:
    """Read the file's bytes; raises as ``form.decode``."""
    return form.decode(data, Manifest, "manifest", source=source)


def faults(manifest: Manifest, files: Mapping[str, bytes], *, source: str) -> list[RefusedError]:
    """Compare a manifest with the other files that are there; one error for each that differs.

    Args:
        manifest: What should be there.
        files: What is there, without the manifest.
        source: Put before each file's name.
    """
    found = []
    for name in sorted({*manifest.files, *files}):
        if name not in files:
            message = "is missing, expected it as the manifest has it"
        elif name not in manifest.files:
            message = "is not in the manifest, expected no such file"
        elif (got := digest(files[name])) != (expected := manifest.files[name].sha256):
            message = f"got sha256 {got}, expected {expected} as in the manifest"
        elif len(files[name]) != manifest.files[name].size:
            message = f"got {len(files[name])} bytes, expected {manifest.files[name].size} as in the manifest"
        else:
            continue
        found.append(RefusedError(message, context=f"{source}/{name}"))
    return found
