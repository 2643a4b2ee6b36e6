# SPDX-License-Identifier: Apache-2.0
"""One Megatron tree as the overlay sees it: the files that fixes touch, the release, and the key of it all.

The key covers the bytes of every touched file and of ``package_info.py``, what was asked for, our version with its
tables, and the Python version (which decides what parses). Where another file names the release there is no key, and
nothing is cached.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from megatron_fixes.catalog import Catalog
    from megatron_fixes.overlay.decision import Decision

PACKAGE_INFO = "megatron/core/package_info.py"


class Tree:
    """The files below a root, as they were when this was made.

    Raises:
        OSError: A touched file is there but can't be read.
    """

    def __init__(self, root: str, paths: Iterable[str]) -> None:
        self.root = root
        self.files: dict[str, bytes] = {}
        for path in sorted(paths):
            content = _read(os.path.join(root, path))
            if content is not None:
                self.files[path] = content
        self.package_info = _read(os.path.join(root, PACKAGE_INFO))

    def key(self, asked: Sequence[str], tables: str) -> str:
        """The name of this tree's entry in the cache.

        Args:
            asked: Ids, and ``all``.
            tables: Version and hash of the distribution's own tables.
        """
        python = f"{sys.version_info[0]}.{sys.version_info[1]}"
        parts = [tables.encode(), python.encode(), ",".join(sorted(asked)).encode(), self.package_info or b""]
        for path, content in self.files.items():
            parts += [path.encode(), content]
        whole = hashlib.sha256()
        for part in parts:
            whole.update(hashlib.sha256(part).digest())
        return whole.hexdigest()[:32]

    def decide(self, catalog: Catalog, asked: Sequence[str]) -> tuple[Decision, dict[str, bytes]]:
        """Find the release and decide, from the files alone."""
        from megatron_fixes.overlay.rules import decide
        from megatron_fixes.patching.gitfiles import git_directory
        from megatron_fixes.patching.release import find_release

        root = Path(self.root)
        release, source = find_release(root, git_directory(root))
        return decide(catalog, self.files, release, source, asked)


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None


def in_two_places(root: str, module: str, packages: dict[str, Sequence[str]]) -> str:
    """Why a module's packages don't lie in one tree; empty if they do.

    Args:
        root: The tree that the module's file lies in.
        module: Its dotted name.
        packages: Dotted name of every package that is loaded to its ``__path__``.
    """
    parts = module.split(".")
    for end in range(2, len(parts)):
        name = ".".join(parts[:end])
        expected = os.path.realpath(os.path.join(root, *parts[:end]))
        for place in packages.get(name, ()):
            if os.path.realpath(place) != expected:
                return f"{name} is in {place} and {module} below {root}"
    return ""
