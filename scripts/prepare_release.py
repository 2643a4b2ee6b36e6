#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Commits what a release needs in the tree: its version in the package, and its section in ``CHANGELOG.md``.

The date of the section is today's in UTC. Tagging is left to a person, as is all that is published.
"""

from __future__ import annotations

import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import changelog
import program
from repository import PACKAGE, VERSION_LINE, git, require_clean

from megatron_fixes.errors import RefusedError
from megatron_fixes.release.layout import parse_version

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]


def prepare(root: Path, version: str, date: str) -> list[Path]:
    """Write the version and the section; return the files that changed.

    Raises:
        RefusedError: The work tree is not clean, or the changelog has nothing to release.
    """
    require_clean(root, "Commit them first, so that the release commit holds the version and nothing else.")
    package, log = root / PACKAGE, root / "CHANGELOG.md"
    log_text = changelog.released(log.read_text(encoding="utf-8"), version, date)
    text, count = VERSION_LINE.subn(f'__version__ = "{version}"', package.read_text(encoding="utf-8"))
    if count != 1:
        raise RefusedError(f"got {count} lines with __version__, expected one", context=PACKAGE)
    package.write_text(text, encoding="utf-8")
    log.write_text(log_text, encoding="utf-8")
    return [package, log]


@program.tells_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Read the arguments, write, commit, and say what comes next."""
    parser = program.parser(__doc__)
    parser.add_argument("version", metavar="VERSION", help="such as v0.1.0 or v0.2.0rc1")
    given = parser.parse_args(arguments)
    version = parse_version(given.version)
    changed = prepare(ROOT, version, datetime.now(timezone.utc).strftime("%Y-%m-%d"))
    git(ROOT, "commit", "--quiet", "-m", f"Release {version}", "--", *map(str, changed))
    print(f"committed: Release {version}. Have it reviewed; then: make evidence && make dist VERSION=v{version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
