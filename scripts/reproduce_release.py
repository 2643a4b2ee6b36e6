#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds a release again and names the first byte that differs: from published files, or from a build of its own.

Each build is a process in a clone of its own, of the tag if there is one, else of HEAD. With ``--against`` the files of
that folder are what is expected. Without it there are two builds that have nothing in common but the commit:
path, umask, date, time zone, user, home, hash seed, git's own settings that could change what is checked out, and the
locale if this system has another than C; which one it was is said.
The signature is not compared: it needs the key. What else has a name like a release's is left out, and named.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import program
from repository import version_of

from megatron_fixes.errors import RefusedError
from megatron_fixes.release.compare import differences
from megatron_fixes.release.folder import read_release
from megatron_fixes.release.layout import SIGNATURE, Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[1]
# A sitecustomize that moves the date of a Python process.
ANOTHER_DAY, AHEAD_DAYS = ROOT / "scripts" / "another_day", 400
_GIT_SETTINGS = "[core]\n\tautocrlf = true\n[tar]\n\tumask = 0077\n[status]\n\tshowUntrackedFiles = no\n"


@dataclass(frozen=True)
class Conditions:
    """Under what a build runs."""

    place: str
    umask: int
    variables: tuple[tuple[str, str], ...]
    git_settings: str = ""
    another_day: bool = False


PLAIN = Conditions("a", 0o022, (("TZ", "UTC"), ("LC_ALL", "C.UTF-8"), ("USER", "a"), ("PYTHONHASHSEED", "1")))


def other_locale() -> str:
    """A locale that this system has, not C: Turkish if it is here, whose capitals are the oddest; else C itself."""
    try:
        listed = subprocess.run(["locale", "-a"], capture_output=True, text=True, check=False).stdout.split()
    except FileNotFoundError:
        listed = []
    others = [name for name in listed if name.partition(".")[0] not in ("C", "POSIX")]
    return min(others, key=lambda name: ("utf" not in name.lower(), not name.startswith("tr_"), name), default="C")


def other_conditions() -> Conditions:
    """Nothing as in ``PLAIN`` that can be had otherwise here."""
    variables = (
        ("TZ", "Pacific/Kiritimati"),
        ("LC_ALL", other_locale()),
        ("USER", "somebody"),
        ("LOGNAME", "somebody"),
        ("PYTHONHASHSEED", "2"),
        ("SOURCE_DATE_EPOCH", "1"),
    )
    return Conditions("another folder/with a longer path", 0o077, variables, _GIT_SETTINGS, another_day=True)


def build_under(root: Path, version: str, work: Path, conditions: Conditions) -> Path:
    """Clone ``root`` below ``work``, build there, and return the folder with the files.

    Raises:
        RefusedError: Cloning or building failed.
    """
    place = work / conditions.place
    home = place / "home"
    home.mkdir(parents=True)
    (home / ".gitconfig").write_text(conditions.git_settings, encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "GIT_", "PYTHON"))}
    clone, out = place / "clone", place / "out"
    environment = {**kept, "HOME": str(home), "XDG_CONFIG_HOME": str(home), **dict(conditions.variables)}
    _run(["git", "clone", "--quiet", "--no-hardlinks", str(root), str(clone)], environment, conditions)
    tag = f"v{version}"
    if _run(["git", "-C", str(clone), "tag", "--list", tag], environment, conditions):
        _run(["git", "-C", str(clone), "checkout", "--quiet", "--detach", f"refs/tags/{tag}"], environment, conditions)
    path = f"{ANOTHER_DAY}:{clone}" if conditions.another_day else str(clone)
    environment |= {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    if conditions.another_day:
        _require_another_day(environment, conditions)
    _run([sys.executable, str(clone / "scripts" / "build_release.py"), tag, "--out", str(out)], environment, conditions)
    return out


def _require_another_day(environment: dict[str, str], conditions: Conditions) -> None:
    """Refuse to build with a date that was not moved: the comparison would say more than it knows."""
    said = _run([sys.executable, "-c", "import time; print(int(time.time()))"], environment, conditions)
    ahead = round((int(said) - time.time()) / 86_400)
    if ahead != AHEAD_DAYS:
        raise RefusedError(
            f"got a date {ahead} days ahead for the other build, expected {AHEAD_DAYS}", context=str(ANOTHER_DAY)
        )


def reproduce(root: Path, version: str, against: Path | None) -> tuple[list[str], list[str]]:
    """Build again; return a sentence for each file that differs, and the names of what was not compared.

    Raises:
        MegatronFixesError: A build failed, or the folder to compare with can't be read.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-fixes-reproduce-") as folder:
        work = Path(folder)
        got = read_release(build_under(root, version, work, other_conditions()))
        expected = read_release(against or build_under(root, version, work, PLAIN))
    ours = set(Layout(version).files) - {SIGNATURE}
    left_out = sorted(set(expected) - ours)
    return differences(*({name: files[name] for name in ours & set(files)} for files in (got, expected))), left_out


def _run(command: Sequence[str], environment: dict[str, str], conditions: Conditions) -> str:
    try:
        done = subprocess.run(
            command,
            env=environment,
            umask=conditions.umask,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except FileNotFoundError:
        raise RefusedError(f"got no {command[0]} on PATH, expected one") from None
    if done.returncode:
        raise RefusedError(f"{' '.join(command[:3])} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout.strip()


@program.tells_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Read the arguments, build, and say what differs."""
    parser = program.parser(__doc__)
    parser.add_argument("version", metavar="VERSION", nargs="?", help="such as v0.1.0 (default: the tag that is here)")
    parser.add_argument("--against", type=Path, help="folder with published files; without: a second build")
    given = parser.parse_args(arguments)
    version = version_of(ROOT, given.version)
    found, left_out = reproduce(ROOT, version, given.against)
    locale = other_locale()
    print(f"built with a date {AHEAD_DAYS} days ahead and the locale {locale}", end="")
    print(": this system has no other" if locale == "C" else "")
    for sentence in [*(f"left out: {name}" for name in left_out), *found]:
        print(sentence)
    print(f"{'DIFFERENT' if found else 'the same bytes'}: megatron-fixes {version}, {given.against or 'two builds'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
