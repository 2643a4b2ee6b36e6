# SPDX-License-Identifier: Apache-2.0
"""Reads a git diff into hunks of exact bytes, and refuses whatever is not a plain edit of existing files.

Rules:

- Everything before the first ``diff --git`` line is the patch's head and is skipped.
- Lines end at ``\\n`` only. ``\\r``, form feeds, ``\\x0b`` and U+2028 are ordinary bytes of a line.
- A line followed by a ``\\ No newline at end of file`` marker has no ``\\n``, and must be its side's last.
- The counts of a hunk's header must be met exactly, and nothing but blank lines or a mail signature may follow.

Not handled, and refused with a ``DataError`` that says so: new and deleted files, renames, copies, mode changes,
binary patches, quoted (non-ASCII) paths, paths that leave the target, and text without a ``diff --git`` line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import AnyStr

from unidiff.errors import UnidiffParseError
from unidiff.patch import Hunk as ParsedHunk
from unidiff.patch import PatchSet

from megatron_fixes.errors import DataError
from megatron_fixes.patching.relative import escape_reason

_UNSUPPORTED = {
    "new file mode": "creates a file",
    "deleted file mode": "deletes a file",
    "old mode": "changes a file mode",
    "new mode": "changes a file mode",
    "similarity index": "renames or copies a file",
    "dissimilarity index": "rewrites a file whole",
    "rename ": "renames a file",
    "copy ": "copies a file",
    "Binary files ": "is binary",
    "GIT binary patch": "is binary",
}


@dataclass(frozen=True)
class Hunk:
    """One hunk.

    Attributes:
        number: 1-based place of the hunk in its file's diff.
        old_start: Line number at which the old side begins, as written in the header.
        new_start: The same for the new side.
        old: Lines of the old side (context and removed), each with its line end.
        new: Lines of the new side (context and added), each with its line end.
        trailing: How many context lines follow the last change.
    """

    number: int
    old_start: int
    new_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]
    trailing: int

    def reversed(self) -> Hunk:
        """Return the hunk that undoes this one."""
        return Hunk(self.number, self.new_start, self.old_start, self.new, self.old, self.trailing)


@dataclass(frozen=True)
class FilePatch:
    """The hunks of one file.

    Attributes:
        path: Path below the target's root, without ``a/`` or ``b/``.
        hunks: The hunks in the order of the patch.
    """

    path: str
    hunks: tuple[Hunk, ...]


def split_lines(text: AnyStr, end: AnyStr) -> list[AnyStr]:
    """Split at ``end`` only, ``\\n`` of the text's kind, and keep it (``splitlines`` splits at ``\\r`` and more)."""
    lines = text.split(end)
    last = lines.pop()
    return [line + end for line in lines] + ([last] if last else [])


def parse_patch(patch_text: str | bytes, *, source: str) -> tuple[FilePatch, ...]:
    """Read a patch.

    Args:
        patch_text: The patch as written, line ends untouched (``Path.read_text`` would change them; bytes are
            decoded here as UTF-8).
        source: Name of the patch for messages.

    Returns:
        One entry for each ``diff --git`` section, in order.

    Raises:
        DataError: The patch is malformed, or does something other than editing existing files.
    """
    lines = split_lines(_text(patch_text, source), "\n")
    starts = [at for at, line in enumerate(lines) if line.startswith("diff --git ")]
    if not starts:
        raise DataError("got no 'diff --git' line, expected at least one", context=source)
    if not lines[-1].endswith("\n"):
        raise DataError("got a last line without a line end, expected a whole patch: it is cut off", context=source)
    for at, line in enumerate(lines[: starts[0]], 1):
        if line.startswith("@@ -"):
            raise DataError("got a hunk before the first 'diff --git' line", context=f"{source}:{at}")
    ends = [*starts[1:], len(lines)]
    return tuple(_Section(lines[start:end], start, source).parse() for start, end in zip(starts, ends, strict=True))


def touched_paths(patch_text: str | bytes, *, source: str = "patch") -> tuple[str, ...]:
    """Return the paths a patch edits, in order, each once.

    Raises:
        DataError: As ``parse_patch``.
    """
    return tuple(dict.fromkeys(entry.path for entry in parse_patch(patch_text, source=source)))


def _text(patch_text: str | bytes, source: str) -> str:
    try:
        if isinstance(patch_text, bytes):
            return patch_text.decode("utf-8")
        patch_text.encode("utf-8")
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        message = f"got bytes that are not UTF-8, expected a UTF-8 patch ({error.reason})"
        raise DataError(message, context=source) from None
    return patch_text


class _Section:
    """The lines from one ``diff --git`` to the next."""

    def __init__(self, lines: Sequence[str], offset: int, source: str) -> None:
        self.lines = lines
        self.offset = offset
        self.source = source

    def error(self, message: str, at: int = 0, hint: str = "") -> DataError:
        return DataError(message, context=f"{self.source}:{self.offset + at + 1}", hint=hint)

    def parse(self) -> FilePatch:
        body = next((at for at, line in enumerate(self.lines) if line.startswith("@@ -")), len(self.lines))
        path = self._path(body)
        if body == len(self.lines):
            raise self.error(f"got no hunk for {path}, expected at least one")
        try:
            parsed = PatchSet(self.lines)
        except UnidiffParseError as error:
            raise self.error(f"got a malformed diff of {path}: {str(error).strip()}") from None
        if len(parsed) != 1:
            raise self.error(f"got text between the hunks of {path}, expected hunks only")
        hunks: list[Hunk] = []
        for number, raw in enumerate(parsed[0], 1):
            hunk, end = self._hunk(raw, number)
            self._check_tail(end, last=number == len(parsed[0]))
            hunks.append(hunk)
        return FilePatch(path, tuple(hunks))

    def _path(self, body: int) -> str:
        """Read the section's head and return the one path it names."""
        names: dict[str, str] = {}
        for at, line in enumerate(self.lines[:body]):
            if line.endswith("\r\n"):
                raise self.error(
                    "got a patch file with CRLF line ends, expected LF",
                    at,
                    "fetch the patch file again without line-end conversion",
                )
            for start, what in _UNSUPPORTED.items():
                if line.startswith(start):
                    raise self.error(f"got a diff that {what}, expected edits of existing text files only", at)
            if line.startswith(("--- ", "+++ ")):
                names[line[:3]] = line[4:].rstrip("\n").split("\t", 1)[0]
            elif at and not line.startswith("index "):
                raise self.error(f"got {line.rstrip()!r} in the head of a diff, expected 'index', '---' or '+++'", at)
        if body == len(self.lines) and not names:
            raise self.error("got a diff without hunks, expected edits of existing text files only")
        old, new = names.get("---", ""), names.get("+++", "")
        if old.startswith('"') or new.startswith('"'):
            raise self.error("got a quoted path, expected a plain one: such names are not supported")
        if "/dev/null" in (old, new):
            raise self.error("got /dev/null as a side, expected edits of existing text files only")
        if not old.startswith("a/") or not new.startswith("b/") or old[2:] != new[2:]:
            raise self.error(f"got paths {old!r} and {new!r}, expected 'a/PATH' and 'b/PATH' of one file")
        if reason := escape_reason(old[2:]):
            raise self.error(f"got the path {old[2:]!r}, expected one below the target: {reason}")
        if self.lines[0] != f"diff --git {old} {new}\n":
            raise self.error(f"got {self.lines[0].rstrip()!r}, expected 'diff --git {old} {new}' as the lines below it")
        return old[2:]

    def _hunk(self, raw: ParsedHunk, number: int) -> tuple[Hunk, int]:
        """Turn unidiff's hunk into ours; also return the index of the line after it."""
        old: list[bytes] = []
        new: list[bytes] = []
        trailing, changes, end = 0, 0, 0
        for kind, value, at in self._body(raw):
            for side, wanted in ((old, " -"), (new, " +")):
                if kind in wanted:
                    if side and not side[-1].endswith(b"\n"):
                        raise self.error("got lines after a 'No newline at end of file' marker, expected none", at)
                    side.append(value)
            trailing = trailing + 1 if kind == " " else 0
            changes += kind != " "
            end = at + 1
        if len(old) != raw.source_length or len(new) != raw.target_length:
            raise self.error(
                f"got {len(old)} old and {len(new)} new lines in hunk {number}, expected "
                f"{raw.source_length} and {raw.target_length}",
                end,
            )
        if not changes:
            raise self.error(f"got no change in hunk {number}, expected at least one", end)
        if end < len(self.lines) and self.lines[end].startswith("\\"):
            end += 1
        return Hunk(number, raw.source_start, raw.target_start, tuple(old), tuple(new), trailing), end

    def _body(self, raw: ParsedHunk) -> Iterator[tuple[str, bytes, int]]:
        """Yield kind, bytes and index of each line that the hunk's counts cover.

        unidiff appends blank lines that follow a hunk to it, so the counts decide where it ends.
        """
        left_old, left_new = raw.source_length, raw.target_length
        for line in raw:
            if left_old <= 0 and left_new <= 0:
                return
            if line.diff_line_no is None or line.line_type == "\\":
                continue
            at = line.diff_line_no - 1
            text = self.lines[at]
            kind, value = (" ", "\n") if text == "\n" else (text[0], text[1:])
            if kind not in " +-":
                raise self.error(f"got a line that begins with {kind!r}, expected ' ', '+' or '-'", at)
            left_old -= kind in " -"
            left_new -= kind in " +"
            if at + 1 < len(self.lines) and self.lines[at + 1].startswith("\\"):
                value = value[:-1]
            yield kind, value.encode("utf-8"), at

    def _check_tail(self, end: int, *, last: bool) -> None:
        if not last:
            if not self.lines[end].startswith("@@ -"):
                raise self.error("got more lines than the hunk's header counts, expected the next hunk", end)
            return
        for at in range(end, len(self.lines)):
            if self.lines[at] == "-- \n":
                return
            if self.lines[at].strip(" \n"):
                raise self.error("got text after the last hunk, expected its header's count of lines to end it", at)
