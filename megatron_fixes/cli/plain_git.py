# SPDX-License-Identifier: Apache-2.0
"""The command that does with plain git what ``apply`` and ``revert`` do, for the user to type.

Many patches of one folder are named by their fixes, in a loop that any shell of the POSIX kind takes: the paths of
all would fill screens. Inside another repository's work tree git passes over every file in silence and exits with 0,
so there the search for a repository is stopped above the target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_fixes.patching.shell import quote

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from megatron_fixes.patching.target import Target


_MAX_NAMED = 3


def git_apply(target: Target, patches: Iterable[Path], *, reverse: bool = False) -> str:
    """Return the shell command that applies patch files to a target, or takes them out.

    Args:
        target: The tree.
        patches: In the order in which they were, or are to be, applied.
        reverse: Take them out, the last one first.
    """
    files = list(patches)
    if reverse:
        files.reverse()
    words = ["git", "-C", str(target.root), "apply", *(["-R"] if reverse else [])]
    command = " ".join(quote(word) for word in words)
    if target.git_dir is None and any((parent / ".git").exists() for parent in target.root.parents):
        command = f"GIT_CEILING_DIRECTORIES={quote(target.root.parent)} {command}"
    folders = {file.parent for file in files}
    if len(files) > _MAX_NAMED and len(folders) == 1:
        fixes = " ".join(quote(file.name.partition("-")[0]) for file in files)
        return f"(for fix in {fixes}; do {command} {quote(folders.pop())}/$fix-*.patch || exit 1; done)"
    return " ".join([command, *map(quote, files)])
