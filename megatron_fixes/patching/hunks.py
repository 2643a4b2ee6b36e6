# SPDX-License-Identifier: Apache-2.0
"""Applies the hunks of a patch to bytes in memory: exactly, or not at all.

The result is byte-equal to ``git apply``'s. Its rules (Source: git 2.39, apply.c, ``find_pos`` and
``match_fragment``):

- A hunk is sought at the line its new side names, in the text as changed so far, then at +1, -1, +2, -2, ...
- All context and removed lines must be equal, bytes and line ends included. No fuzz, no white space leniency.
- A hunk whose old side begins at line 0 or 1 fits only at the beginning, one without trailing context only at the
  end of the file.
- Lines that an earlier hunk of the same diff produced, its context included, are not matched again.

Stricter than git in one case: git compares a pre-image that ends without a newline as a prefix, so it "applies"
to a file that goes on after that line and glues two lines together; here that does not fit. CRLF files don't fit
an LF patch, as with git; the hint says so. Files on disk are not handled here (``transaction``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_fixes.errors import DoesNotFitError
from megatron_fixes.patching.unified import FilePatch, Hunk, parse_patch, split_lines, touched_paths

__all__ = ["apply_patch", "reverse_patch", "touched_paths"]


def apply_patch(patch_text: str | bytes, files: Mapping[str, bytes], *, source: str) -> dict[str, bytes]:
    """Apply a patch to files in memory.

    Args:
        patch_text: The patch with its line ends untouched; head text before ``diff --git`` is skipped.
        files: Content by path below the target's root; only read.
        source: Name of the patch for messages.

    Returns:
        New content of the files whose content changed.

    Raises:
        DoesNotFitError: A file is absent or a hunk's pre-image is not there. No result is produced.
        DataError: The patch is malformed or does something other than editing existing files.
    """
    return _apply(parse_patch(patch_text, source=source), files, source)


def reverse_patch(patch_text: str | bytes, files: Mapping[str, bytes], *, source: str) -> dict[str, bytes]:
    """Undo a patch in memory, as ``git apply --reverse``; arguments and errors are those of ``apply_patch``."""
    entries = [
        FilePatch(entry.path, tuple(hunk.reversed() for hunk in entry.hunks))
        for entry in parse_patch(patch_text, source=source)
    ]
    return _apply(entries, files, source)


def _apply(entries: Sequence[FilePatch], files: Mapping[str, bytes], source: str) -> dict[str, bytes]:
    results: dict[str, bytes] = {}
    for entry in entries:
        before = results.get(entry.path, files.get(entry.path))
        if before is None:
            raise DoesNotFitError(
                f"got no such file, expected the file that {source} edits",
                context=entry.path,
                hint="Check that the target's release is one that this patch applies to.",
            )
        image = _Image.of(before)
        for hunk in entry.hunks:
            at = image.find(hunk)
            if at is None:
                raise _misfit(image, hunk, entry.path, source)
            image.replace(at, hunk)
        results[entry.path] = b"".join(image.lines)
    return {path: after for path, after in results.items() if after != files[path]}


@dataclass
class _Image:
    """A file's lines while hunks are applied, and which of them an earlier hunk produced."""

    lines: list[bytes]
    taken: list[bool] = field(default_factory=list)

    @classmethod
    def of(cls, content: bytes) -> _Image:
        lines = split_lines(content, b"\n")
        return cls(lines, [False] * len(lines))

    def find(self, hunk: Hunk) -> int | None:
        """Return the index at which the hunk fits, or None."""
        last = len(self.lines) - len(hunk.old)
        must_begin = hunk.old_start <= 1
        must_end = hunk.trailing == 0
        if last < 0:
            return None
        if must_begin or must_end:
            at = 0 if must_begin else last
            return at if (not must_end or at == last) and self._fits(hunk, at) else None
        start = min(_expected_index(hunk), len(self.lines))
        for distance in range(len(self.lines) + 1):
            for at in (start + distance, start - distance) if distance else (start,):
                if 0 <= at <= last and self._fits(hunk, at):
                    return at
        return None

    def _fits(self, hunk: Hunk, at: int) -> bool:
        end = at + len(hunk.old)
        return tuple(self.lines[at:end]) == hunk.old and not any(self.taken[at:end])

    def replace(self, at: int, hunk: Hunk) -> None:
        """Put the hunk's new side in place of its old one."""
        end = at + len(hunk.old)
        self.lines[at:end] = hunk.new
        self.taken[at:end] = [True] * len(hunk.new)


def _expected_index(hunk: Hunk) -> int:
    return max(hunk.new_start - 1, 0)


def _misfit(image: _Image, hunk: Hunk, path: str, source: str) -> DoesNotFitError:
    expected_line = _expected_index(hunk) + 1
    return DoesNotFitError(
        f"hunk {hunk.number} of {source}, expected at line {expected_line}, is not in the file; "
        f"{_nearest(image, hunk)}",
        context=f"{path}:{expected_line}",
        hint=_line_end_hint(image, hunk)
        or _already_hint(image, hunk)
        or "look at the named line: the target's text differs from the release's",
    )


def _nearest(image: _Image, hunk: Hunk) -> str:
    """Describe the place that agrees with most of the pre-image, nearest to the expected line."""
    start = _expected_index(hunk)

    def agreement(at: int) -> tuple[int, int]:
        equal = sum(have == want for have, want in zip(image.lines[at:], hunk.old, strict=False))
        return equal, -abs(at - start)

    at = max(range(len(image.lines) + 1), key=agreement)
    if agreement(at)[0] == 0:
        at = min(start, len(image.lines))
    for index, want in enumerate(hunk.old, at):
        have = image.lines[index] if index < len(image.lines) else None
        if have != want:
            got = "the end of the file" if have is None else _show(have)
            return f"nearest: got {got} at line {index + 1}, expected {_show(want)}"
    if any(image.taken[at : at + len(hunk.old)]):
        return f"its lines are at line {at + 1}, but an earlier hunk of the patch made them"
    place = "beginning" if hunk.old_start <= 1 and at else "end"
    return f"its lines are at line {at + 1}, expected them at the {place} of the file"


def _show(line: bytes) -> str:
    text = line.decode("utf-8", "backslashreplace")
    if text.endswith("\n") and not text.endswith("\r\n"):
        return repr(text[:-1])
    return repr(text) if text.endswith("\n") else f"{text!r} without a line end"


def _already_hint(image: _Image, hunk: Hunk) -> str:
    if image.find(hunk.reversed()) is None:
        return ""
    return (
        "the hunk is in the file already, so a part of the patch is: put the file back as the release has it, with git "
        "say, or take a pristine tree; then apply"
    )


def _line_end_hint(image: _Image, hunk: Hunk) -> str:
    file_crlf = sum(line.endswith(b"\r\n") for line in image.lines)
    hunk_crlf = sum(line.endswith(b"\r\n") for line in hunk.old)
    if 2 * file_crlf > len(image.lines) and 2 * hunk_crlf < len(hunk.old):
        return "the file has CRLF line ends and the patch LF: convert the file to LF, as the release has it"
    if hunk_crlf and not file_crlf:
        return "the patch has CRLF line ends and the file LF: fetch the patch without line-end conversion"
    return ""
