#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Takes a release to GitHub with ``gh``, in three steps: make the draft, fetch its files, make it public.

Between the first and the last a person may sign the files, so nobody sees half a release and no key has to be in a CI.
A draft that a failed run has left is deleted and made anew; a release that is public is never touched: the same version
can't have two contents. Standard library only, since these jobs may write to the repository. Not handled: PyPI, where
trusted publishing does it, and what the files hold, which ``megatron-fixes verify`` looks at before.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import program
from repository import version_of
from sign_release import require_signed, require_sound

from megatron_fixes.errors import RefusedError
from megatron_fixes.release import folder, layout, signature

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).resolve().parents[1]
State = Literal["none", "draft", "public"]


def draft_commands(version: str, files: Sequence[Path], notes: Path, state: State) -> list[list[str]]:
    """What ``gh`` is asked for to make a draft, in order.

    Raises:
        RefusedError: The release is public already.
    """
    tag = f"v{version}"
    if state == "public":
        raise RefusedError(
            f"got a release {tag} that is public already, expected none or a draft",
            hint="Leave it as it is; what is wrong with it is mended by the next version (docs/releasing.md).",
        )
    kind = ["--prerelease"] if layout.is_prerelease(version) else []
    create = ["gh", "release", "create", tag, "--draft", "--verify-tag", "--title", f"megatron-fixes {version}", *kind]
    found = [["gh", "release", "delete", tag, "--yes"]] if state == "draft" else []
    return [*found, [*create, "--notes-file", str(notes), *map(str, files)]]


def publish_command(version: str, notes: Path, public: Sequence[str]) -> list[str]:
    """What ``gh`` is asked for to make a draft public: the latest, if it is final and no final one comes after it."""
    number = _number(f"v{version}")
    later = [tag for tag in public if number and (other := _number(tag)) and other > number]
    answer = f"--latest={str(number is not None and not later).lower()}"
    return ["gh", "release", "edit", f"v{version}", "--draft=false", "--notes-file", str(notes), answer]


def _number(tag: str) -> list[int] | None:
    """A final version as numbers, to compare; None for any other tag."""
    version = tag.removeprefix("v")
    final = tag.startswith("v") and layout.VERSION.fullmatch(version) and not layout.is_prerelease(version)
    return [int(part) for part in version.split(".")] if final else None


def state_of(version: str) -> State:
    """What GitHub has for the version's tag.

    Raises:
        RefusedError: ``gh`` can't tell.
    """
    done = _gh(["gh", "release", "view", f"v{version}", "--json", "isDraft"])
    if done.returncode == 0:
        return "draft" if json.loads(done.stdout)["isDraft"] else "public"
    if "release not found" in done.stderr:
        return "none"
    raise RefusedError(f"gh release view: {done.stderr.strip() or done.returncode}")


def draft(version: str, dist: Path, notes: Path) -> str:
    """Make a draft of sound files, which may still be UNSIGNED; a signature has to be the committed key's."""
    files = _read(version, dist)
    unsigned = signature.is_unsigned(files[layout.SIGNATURE])
    if not unsigned:
        require_signed(files, ROOT)
    for command in draft_commands(version, [dist / name for name in sorted(files)], notes, state_of(version)):
        _run(command)
    how = "UNSIGNED: sign it by hand if there is a key, " if unsigned else ""
    return f"v{version} is a draft, {how}then: gh workflow run publish.yml --ref v{version} (docs/releasing.md)"


def fetch(version: str, dist: Path) -> str:
    """Download the files of a draft into a folder that is not there yet."""
    if dist.exists():
        raise RefusedError("is there already, expected none: it could hold other files", context=str(dist))
    if (state := state_of(version)) != "draft":
        raise RefusedError(f"got a release v{version} that is {state}, expected a draft", hint="Run release.yml first.")
    _run(["gh", "release", "download", f"v{version}", "--dir", str(dist)])
    return f"v{version}: {len(_read(version, dist))} files in {dist}"


def publish(version: str, dist: Path, notes: Path) -> str:
    """Make the draft public, if it holds what was verified, signed with the committed key where there is one."""
    files = _read(version, dist)
    signed = require_signed(files, ROOT)
    with tempfile.TemporaryDirectory(prefix="megatron-fixes-draft-") as place:
        fetch(version, Path(place, "dist"))
        if _read(version, Path(place, "dist")) != files:
            raise RefusedError("got a draft with other files than were verified", hint="Run publish.yml again.")
    listing = ["gh", "release", "list", "--exclude-drafts", "--limit", "1000", "--json", "tagName"]
    public = [one["tagName"] for one in json.loads(_run(listing))]
    _run(publish_command(version, notes, public))
    return f"v{version} is public, {'signed' if signed else 'UNSIGNED'}"


def _read(version: str, dist: Path) -> Mapping[str, bytes]:
    files = folder.read_release(dist)
    if (got := require_sound(files)) != version:
        raise RefusedError(f"got the files of {got}, expected those of {version}", context=str(dist))
    return files


def _gh(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RefusedError("got no gh on PATH, expected GitHub's command line") from None


def _run(command: Sequence[str]) -> str:
    done = _gh(command)
    if done.returncode:
        raise RefusedError(f"{' '.join(command[:4])} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


@program.tells_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Read the arguments and take one step."""
    parser = program.parser(__doc__)
    parser.add_argument("step", choices=("draft", "fetch", "publish"))
    parser.add_argument("version", metavar="VERSION", nargs="?", help="such as v0.1.0 (default: the tag that is here)")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder with the files (default: dist)")
    parser.add_argument("--notes", type=Path, default=ROOT / "build" / "notes" / "notes.md", help="file with the notes")
    given = parser.parse_args(arguments)
    version = version_of(ROOT, given.version)
    if given.step == "fetch":
        print(fetch(version, given.dist))
    else:
        print((draft if given.step == "draft" else publish)(version, given.dist, given.notes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
