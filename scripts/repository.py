# SPDX-License-Identifier: Apache-2.0
"""Asks git about a checkout, for the scripts that make releases; what goes wrong is one sentence.

The answers do not depend on the person's settings: no signature is shown among them, and untracked files count. A file
that git was told to take for unchanged could hold anything, so a tree with one is not clean. Standard library only.
Not handled: files that git ignores, which no release holds.
"""

from __future__ import annotations

import re
import subprocess
from typing import TYPE_CHECKING

from megatron_fixes.errors import RefusedError, UsageError
from megatron_fixes.release.layout import parse_version

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = ("-c", "log.showSignature=false", "--no-replace-objects")
PACKAGE = "megatron_fixes/__init__.py"
VERSION_LINE = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)


def git(root: Path, *arguments: str, may_fail: bool = False) -> str:
    """What git says, without the spaces around it.

    Raises:
        UsageError: There is no git, or this is no checkout.
        RefusedError: The command failed and may not.
    """
    return git_bytes(root, *arguments, may_fail=may_fail).decode("utf-8").strip()


def git_bytes(root: Path, *arguments: str, may_fail: bool = False, given: bytes = b"") -> bytes:
    """What git says, to the byte; see ``git``."""
    if not (root / ".git").exists():  # git itself would go on with a repository around it
        hint = "Clone the repository; a release is built from a commit."
        raise UsageError("got no git checkout, expected one", context=str(root), hint=hint)
    command = ["git", "-C", str(root), *SETTINGS, *arguments]
    try:
        done = subprocess.run(command, input=given, capture_output=True, check=False)
    except FileNotFoundError:
        raise UsageError("got no git on PATH, expected one", context=str(root), hint="Install git.") from None
    if done.returncode and not may_fail:
        raise RefusedError(f"git {arguments[0]}: {done.stderr.decode('utf-8', 'replace').strip()}", context=str(root))
    return done.stdout


def commit_of(root: Path, reference: str) -> str | None:
    """The commit of a full name such as ``refs/tags/v0.1.0``; None if there is none of that name."""
    return git(root, "rev-parse", "--verify", "--quiet", f"{reference}^{{commit}}", may_fail=True) or None


def version_of(root: Path, given: str | None) -> str:
    """The version that is asked for, or that of the tag on what is checked out.

    Raises:
        UsageError: None was given and there is no such tag, or several.
    """
    if given:
        return parse_version(given)
    tags = [tag for tag in git(root, "tag", "--points-at", "HEAD").split() if tag.startswith("v")]
    if len(tags) != 1:
        raise UsageError(
            f"got no VERSION and {len(tags)} version tags here, expected one", hint="make … VERSION=v0.1.0"
        )
    return parse_version(tags[0])


def package_version(text: str) -> str:
    """The version that the package's first module gives itself; a text that is no version if not just one."""
    said = VERSION_LINE.findall(text)
    return said[0] if len(said) == 1 else f"{len(said)} lines with __version__"


def require_clean(root: Path, hint: str) -> None:
    """Refuse a work tree whose files are not those of its commit; ``hint`` says what to do then.

    Raises:
        RefusedError: A file is changed or untracked, or git was told not to look at it.
    """
    if changed := git(root, "status", "--porcelain", "--untracked-files=normal"):
        message = f"got a work tree with changes ({changed.splitlines()[0].strip()}), expected a clean one"
        raise RefusedError(message, context=str(root), hint=hint)
    listed = git_bytes(root, "ls-files", "-v", "-z").decode("utf-8").split("\0")[:-1]
    if unseen := [line[2:] for line in listed if not line.startswith("H ")]:
        raise RefusedError(
            f"got {unseen[0]}, which git was told not to look at, expected files that it compares",
            context=str(root),
            hint="Undo it (git update-index --no-skip-worktree --no-assume-unchanged), or clone it anew.",
        )
