#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the GitHub release of a tag with ``gh``: as a draft with all its files, and public in one last step.

So nobody sees half a release. A draft that a failed run has left is deleted and made anew; a release that is public is
never touched: the same version can't have two contents. Not handled: PyPI, where trusted publishing does it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import release_dist
import release_notes
from release_rules import is_prerelease

from megatron_fixes.catalog import load
from megatron_fixes.errors import MegatronFixesError, RefusedError
from megatron_fixes.release import folder, layout, signature, verify

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
State = Literal["none", "draft", "public"]


def commands(version: str, files: Sequence[Path], notes: Path, state: State) -> list[list[str]]:
    """What ``gh`` is asked for, in order.

    Raises:
        RefusedError: The release is public already.
    """
    tag = f"v{version}"
    if state == "public":
        raise RefusedError(
            f"got a release {tag} that is public already, expected none or a draft",
            hint="Leave it as it is; what is wrong with it is mended by the next version (docs/releasing.md).",
        )
    kind = ["--prerelease"] if is_prerelease(version) else []
    create = ["gh", "release", "create", tag, "--draft", "--verify-tag", "--title", f"megatron-fixes {version}", *kind]
    found = [["gh", "release", "delete", tag, "--yes"]] if state == "draft" else []
    found.append([*create, "--notes-file", str(notes), *map(str, files)])
    latest = ["--latest=false"] if kind else ["--latest"]
    return [*found, ["gh", "release", "edit", tag, "--draft=false", *latest]]


def state_of(version: str) -> State:
    """What GitHub has for the version's tag.

    Raises:
        RefusedError: ``gh`` can't tell.
    """
    command = ["gh", "release", "view", f"v{version}", "--json", "isDraft"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return "draft" if json.loads(done.stdout)["isDraft"] else "public"
    if "release not found" in done.stderr:
        return "none"
    raise RefusedError(f"gh release view: {done.stderr.strip() or done.returncode}")


def publish(version: str, dist: Path) -> None:
    """Verify the files once more, and make the release of them.

    Raises:
        RefusedError: The files are not sound, the release is public, or ``gh`` failed.
    """
    files, _ = folder.read_release([dist])
    report = verify.check(files, None, allow_unsigned=True)
    if report.findings or report.version != version:
        found = "; ".join(map(str, report.findings)) or f"version {report.version}"
        raise RefusedError(f"got {found}, expected the files of {version}", context=str(dist))
    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    signed = not signature.is_unsigned(files[layout.SIGNATURE])
    with tempfile.TemporaryDirectory(prefix="megatron-fixes-notes-") as place:
        notes = Path(place, "notes.md")
        notes.write_text(release_notes.notes(load(), version, log, signed=signed), encoding="utf-8")
        for command in commands(version, [dist / name for name in sorted(files)], notes, state_of(version)):
            if code := subprocess.run(command, check=False).returncode:
                raise RefusedError(f"{' '.join(command[:4])} ended with {code}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the arguments and publish."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("version", metavar="VERSION", nargs="?", help="such as v0.1.0 (default: the tag that is here)")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder with the files (default: dist)")
    given = parser.parse_args(arguments)
    try:
        publish(release_dist.version_of(ROOT, given.version), given.dist)
    except MegatronFixesError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
