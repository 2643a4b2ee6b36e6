#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes or remakes one patch file from an edited copy of a release.

``python scripts/refresh_patch.py start MF0042 some-slug 0.16.1 DIR`` unpacks the release with what the fix
requires into DIR, ready to be edited. ``python scripts/refresh_patch.py write MF0042 some-slug 0.16.1 DIR``
diffs DIR against that same base and writes the body of ``patches/core_v0.16/MF0042-some-slug.patch``; a head
that is there is kept (its Last-Update set to today), else one is begun for you to fill in, and the patch is
added to the end of the series. ``--requires MF0003`` says what a new patch is made on; later its head says so. An id
that the matrix does not know is a new fix, which is said; one that it knows has the slug that it has there.

Then: edit the head, add the row to ``compat_matrix.yaml``, run ``scripts/record_fingerprints.py`` and the lint.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import program

from megatron_fixes.catalog.data import matrix_path, patches_root
from megatron_fixes.catalog.matrix import load_matrix
from megatron_fixes.catalog.series import load_series
from megatron_fixes.errors import UsageError
from megatron_fixes.patching.hunks import apply_patch, touched_paths
from megatron_fixes.proofs.releases import fetch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_fixes.catalog.matrix import Matrix

HEAD = """Description: <one line of 10 to 100 characters>
 Symptom: <what a person sees>
 .
 Cause: <why>
 .
 After this patch: <what holds>
Fix-Id: {fix_id}
Applies-To: {release}
Fixed-In: open
Upstream-Status: Pending
Numerics: changing
Requires:{requires}
Proof: megatron_fixes.proofs.{module}
Origin: vendor
Bug: none
Forwarded: no
Last-Update: {today}
"""


def name_of(matrix: Matrix, fix_id: str, slug: str) -> str:
    """What is said of a fix before work on it begins: nothing of one that is known.

    Raises:
        UsageError: It is no id, or that of a fix with another slug, or the slug is that of another fix.
    """
    if not re.fullmatch(r"MF\d{4}", fix_id):
        raise UsageError(f"got the id {fix_id!r}, expected one such as MF0003")
    slugs = {name: fix.slug for name, fix in matrix.fixes.items()}
    for path in patches_root().glob("*/MF*.patch"):  # a new fix has a patch before it has a row
        slugs.setdefault(path.name[:6], path.stem[7:])
    if slugs.get(fix_id, slug) != slug:
        raise UsageError(f"got the slug {slug!r}, expected {slugs[fix_id]!r}, which {fix_id} has")
    if other := next((name for name, known in slugs.items() if known == slug and name != fix_id), None):
        raise UsageError(f"got the slug {slug!r} for {fix_id}, expected another: {other} has it")
    return "" if fix_id in matrix.fixes else f"{fix_id} is a new fix: compat_matrix.yaml has no row of it yet"


def base(folder: Path, release: str, line: str, fix_id: str, requires: Sequence[str]) -> None:
    """Lay the release with everything that the fix requires into an empty folder.

    Raises:
        UsageError: Something is there already, which may be somebody's work, or the folder can't be written.
    """
    if (folder / "megatron").exists():
        hint = "Go on with 'write', or name a new folder."
        raise UsageError("got a folder with a megatron in it, expected a new one", context=str(folder), hint=hint)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"got '{error.strerror}', expected a folder to write to", context=str(folder)) from None
    shutil.copytree(fetch(release, load_matrix(matrix_path())) / "megatron", folder / "megatron")
    series = load_series(patches_root(), line)
    own = series.get(fix_id)
    for patch in series.closure(own.header.requires if own else requires):
        files = {path: (folder / path).read_bytes() for path in touched_paths(patch.text)}
        for path, content in apply_patch(patch.text, files, source=patch.name).items():
            (folder / path).write_bytes(content)


def diff(release: str, line: str, fix_id: str, edited: Path, requires: Sequence[str]) -> str:
    """The difference between the base and the edited copy, as git writes it."""
    with tempfile.TemporaryDirectory() as scratch:
        base(Path(scratch), release, line, fix_id, requires)
        git = ["git", "-C", scratch, "-c", "core.autocrlf=false", "-c", "diff.noprefix=false"]
        subprocess.run([*git, "init", "-q"], check=True)
        subprocess.run([*git, "add", "--all", "--force"], check=True)
        for path in sorted((edited / "megatron").rglob("*.py")):
            shutil.copyfile(path, Path(scratch) / path.relative_to(edited))
        command = [*git, "diff", "--full-index", "--no-color", "--no-ext-diff", "--unified=3", "--diff-algorithm=myers"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def write(fix_id: str, slug: str, release: str, line: str, edited: Path, requires: Sequence[str]) -> Path:
    """Write the patch; see the module's docstring."""
    body = diff(release, line, fix_id, edited, requires)
    if not body:
        raise UsageError(
            "got no difference to the release", context=str(edited), hint="Edit a file below megatron/core."
        )
    folder = patches_root() / line
    folder.mkdir(parents=True, exist_ok=True)
    path, today = folder / f"{fix_id}-{slug}.patch", datetime.now(timezone.utc).strftime("%Y-%m-%d")
    if path.exists():
        lines = path.read_text("utf-8").split("\n---\n", 1)[0].splitlines()
        head = "\n".join(f"Last-Update: {today}" if row.startswith("Last-Update:") else row for row in lines) + "\n"
    else:
        required = "".join(f" {name}" for name in requires)
        head = HEAD.format(fix_id=fix_id, module=fix_id.lower(), release=release, requires=required, today=today)
        with (folder / "series").open("a", encoding="utf-8") as series:
            series.write(path.name + "\n")
    path.write_text(f"{head}---\n{body}", "utf-8", newline="\n")
    return path


@program.tells_errors
def main() -> int:
    """Parse and run one of the two steps."""
    parser = program.parser(__doc__)
    parser.add_argument("step", choices=("start", "write"))
    for name in ("fix_id", "slug", "release"):
        parser.add_argument(name)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requires", nargs="*", default=[], metavar="FIX")
    options = parser.parse_args()
    matrix = load_matrix(matrix_path())
    if options.release not in matrix.releases:
        parser.error(f"got release {options.release}, expected one of {', '.join(matrix.releases)}")
    line = matrix.releases[options.release].line
    if news := name_of(matrix, options.fix_id, options.slug):
        print(news, file=sys.stderr)
    if options.step == "start":
        base(options.folder, options.release, line, options.fix_id, options.requires)
        print(f"edit {options.folder}/megatron, then run this with 'write'")
    else:
        path = write(options.fix_id, options.slug, options.release, line, options.folder, options.requires)
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
