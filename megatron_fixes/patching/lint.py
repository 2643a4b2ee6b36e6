# SPDX-License-Identifier: Apache-2.0
"""Holds every rule of patch heads, patch bodies and series; shows all faults of all files in one run.

``python -m megatron_fixes.patching.lint [PATCHES]`` prints ``file:line: fault`` and ends with 1 if there is
any. Rules:

* Head: form (``catalog.header``), and agreement with the file's name, its line, the matrix and the proofs there
  are.
* Body: UTF-8, edits of ``megatron/core/…py`` only, full index hashes, three lines of context, at most 100
  changed lines, and in added lines no ``assert`` (``python -O`` drops it), no trailing space and no tab.
* Series: lists every patch of its folder once, after what it requires.
* Matrix: a patch's ``Applies-To`` names exactly the releases of its line that need the fix.

Whether a patch *applies* is not asked here; the tests apply every closed subset to every release.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from megatron_fixes.catalog.data import matrix_path, patches_root
from megatron_fixes.catalog.header import FIX_ID, Fault, PatchHeader, parse_header
from megatron_fixes.catalog.matrix import Matrix, load_matrix
from megatron_fixes.catalog.series import listed
from megatron_fixes.errors import DataError, MegatronFixesError
from megatron_fixes.patching.unified import parse_patch

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_CHANGED_LINES = 100
CONTEXT_LINES = 3
_LINE_FOLDER = re.compile(r"core_v\d+\.\d+")
_FILE_NAME = re.compile(rf"({FIX_ID.pattern})-([a-z0-9-]+)\.patch")
_GIT_LINE = re.compile(r"diff --git a/(?P<old>\S+) b/(?P<new>\S+)")
_INDEX_LINE = re.compile(r"index [0-9a-f]{40}\.\.[0-9a-f]{40} 100644")
_HUNK_LINE = re.compile(r"@@ -(?P<old>\d+)(,\d+)? \+\d+(,\d+)? @@.*")
_ASSERT = re.compile(r"\s*assert\b")


# So that whoever applies a series with plain git can leave it out.
GATED = "# gated"


def lint(root: Path, matrix: Matrix) -> list[Fault]:
    """Check every line's folder below ``patches/`` against the rules and the matrix.

    Args:
        root: The ``patches/`` folder.
        matrix: What the heads must agree with.
    """
    faults: list[Fault] = []
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        if not _LINE_FOLDER.fullmatch(folder.name):
            faults.append(Fault(str(folder), 1, f"got folder {folder.name}, expected core_vX.Y"))
            continue
        faults += _lint_line(folder, matrix)
    return faults


def _lint_line(folder: Path, matrix: Matrix) -> Iterator[Fault]:
    series = folder / "series"
    names = listed(series) if series.is_file() else []
    if not series.is_file():
        yield Fault(str(series), 1, "no series file, expected one that lists the patches of the line in order")
    present = {path.name for path in folder.iterdir() if path.name not in ("series", "README.md")}
    before: set[str] = set()
    first: dict[str, int] = {}
    for number, name in names:
        place = (str(series), number)
        if first.setdefault(name, number) != number:
            yield Fault(*place, f"{name} is listed a second time, first in line {first[name]}")
            continue
        if name not in present:
            yield Fault(*place, f"{name} is listed but not there")
            continue
        header, faults = _lint_patch(folder / name, folder.name, matrix)
        yield from faults
        gated = header is not None and header.numerics == "gated"
        if header and gated != (GATED in series.read_text("utf-8").split("\n")[number - 1]):
            yield Fault(
                *place, f"{name} has Numerics {header.numerics}, expected {GATED!r} behind gated ones, and only there"
            )
        for required in header.requires if header else ():
            if required not in before:
                yield Fault(*place, f"{name} requires {required}, expected it earlier in the series")
        before.add(name[:6])
    for name in sorted(present - {name for _, name in names}):
        yield Fault(str(folder / name), 1, "is not listed in the series")


def _lint_patch(path: Path, line: str, matrix: Matrix) -> tuple[PatchHeader | None, list[Fault]]:
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        return None, [Fault(str(path), 1, f"is not UTF-8: {error.reason} at byte {error.start}")]
    header, faults = parse_header(text, str(path))
    if header:
        faults += _agreement(path, line, header, matrix)
    faults += _body(path, text)
    return header, faults


def _agreement(path: Path, line: str, header: PatchHeader, matrix: Matrix) -> Iterator[Fault]:
    def fault(field: str, message: str) -> Fault:
        return Fault(str(path), header.lines[field], f"{field}: {message}")

    name = _FILE_NAME.fullmatch(path.name)
    if not name:
        yield Fault(str(path), 1, f"got file name {path.name}, expected MFNNNN-<slug>.patch")
    elif name.group(1) != header.fix_id:
        yield fault("Fix-Id", f"got {header.fix_id}, expected {name.group(1)} as in the file's name")
    fix = matrix.fixes.get(header.fix_id)
    if fix is None:
        yield fault("Fix-Id", f"{header.fix_id} has no row in {matrix_path().name}")
        return
    if name and name.group(2) != fix.slug:
        yield Fault(str(path), 1, f"got slug {name.group(2)} in the file's name, expected {fix.slug} as in the matrix")
    expected = tuple(r for r in fix.affected() if matrix.releases[r].line == line)
    if header.applies_to != expected:
        yield fault(
            "Applies-To",
            f"got {' '.join(header.applies_to)}, expected {' '.join(expected) or 'no patch here'} as in the matrix",
        )
    if header.fixed_release != fix.first_fixed():
        yield fault("Fixed-In", f"got {header.fixed_in}, expected {fix.first_fixed() or 'open'} as in the matrix")
    status = header.upstream_status.split(" ")[0]
    if (status == "Backport") != (header.fixed_release is not None):
        yield fault(
            "Upstream-Status",
            f"got {status} with Fixed-In: {header.fixed_in}; Backport goes with a release, and only with one",
        )
    if header.proof != f"megatron_fixes.proofs.{header.fix_id.lower()}":
        yield fault("Proof", f"got {header.proof}, expected megatron_fixes.proofs.{header.fix_id.lower()}")
    elif not (Path(__file__).parent.parent / "proofs" / f"{header.fix_id.lower()}.py").is_file():
        yield fault("Proof", f"there is no module {header.proof}")
    if list(header.applies_to) != sorted(header.applies_to, key=Version):
        yield fault("Applies-To", "expected the releases in order of version")


def _body(path: Path, text: str) -> Iterator[Fault]:
    try:
        files = parse_patch(text, source=str(path))
    except DataError as error:
        where, _, at = error.context.rpartition(":")
        yield Fault(where or str(path), int(at) if at.isdigit() else 1, error.message)
        return
    changed = 0
    in_hunk = False
    for number, line in enumerate(text.split("\n"), start=1):
        if match := _GIT_LINE.fullmatch(line):
            in_hunk = False
            if match["old"] != match["new"] or not re.fullmatch(r"megatron/core/\S+\.py", match["old"]):
                yield Fault(str(path), number, f"got {line!r}, expected one Python file below a/megatron/core/")
        elif line.startswith("index ") and not in_hunk:
            if not _INDEX_LINE.fullmatch(line):
                yield Fault(
                    str(path), number, f"got {line!r}, expected 40-digit hashes and mode 100644 (git diff --full-index)"
                )
        elif _HUNK_LINE.fullmatch(line):
            in_hunk = True
        elif in_hunk and line[:1] in "+-" and line:
            changed += 1
            if line[0] == "+":
                yield from _added(path, number, line[1:])
    if changed > MAX_CHANGED_LINES:
        yield Fault(str(path), 1, f"got {changed} changed lines, expected at most {MAX_CHANGED_LINES}: split the fix")
    for file in files:
        for hunk in file.hunks:
            leading = next((i for i, (a, b) in enumerate(zip(hunk.old, hunk.new, strict=False)) if a != b), 0)
            if (leading != CONTEXT_LINES and hunk.old_start > CONTEXT_LINES) or hunk.trailing != CONTEXT_LINES:
                message = f"hunk {hunk.number} of {file.path} has {leading} and {hunk.trailing} lines of context"
                yield Fault(str(path), 1, f"{message}, expected {CONTEXT_LINES} and {CONTEXT_LINES}")


def _added(path: Path, number: int, line: str) -> Iterator[Fault]:
    if _ASSERT.match(line):
        yield Fault(str(path), number, "adds an assert; python -O drops it: raise instead")
    if line != line.rstrip() or "\t" in line:
        yield Fault(str(path), number, "adds a trailing space or a tab")


def main(arguments: list[str]) -> int:
    """Print all faults; 1 if there is any, the error's exit code if the matrix can't be read."""
    root = Path(arguments[0]) if arguments else patches_root()
    try:
        faults = lint(root, load_matrix(matrix_path()))
    except MegatronFixesError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    for fault in faults:
        print(fault)
    count = sum(1 for _ in root.glob("*/*.patch"))
    print(f"{count} patches, {len(faults)} faults", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
