# SPDX-License-Identifier: Apache-2.0
"""How things are printed: tables and colours on a terminal, aligned plain text in a pipe, JSON where asked for.

In a pipe a row is one line, nothing is cut to a width, and no character but the data's own is outside ASCII, so
that ``grep`` and ``awk`` can read it. rich is imported only on a terminal; it respects NO_COLOR and TERM=dumb.
What a stream's encoding can't express is written as the escapes of its bytes and never raises. What is said to a
stream that was closed goes nowhere, and not to the other one. Not handled: what is said (each command's own file).
"""

from __future__ import annotations

import codecs
import contextlib
import functools
import io
import json
import os
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, TextIO

from megatron_fixes.errors import MegatronFixesError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rich.console import Console

STYLES = {
    "needed": "bold red",
    "drifted": "bold yellow",
    "applied": "green",
    "fixed-upstream": "green",
    "not-affected": "green",
    "patch": "green",
    "none": "yellow",
    "does-not-fit": "bold yellow",
    "defect": "red",
    "clean": "green",
    "not-runnable": "yellow",
    "timeout": "yellow",
    "yes": "green",
    "NO": "bold red",
}
_GAP = "  "
_ESCAPE = "megatron_fixes.bytes"
_MIN_TABLE_COLUMNS = 60
_MIN_LAST_COLUMN = 24
_MAX_PROSE_COLUMNS = 100


class UntoldError(MegatronFixesError):
    """The work was done, but what there was to say of it could not be written."""

    exit_code = 1


def settle_streams() -> None:
    """Make all streams fit to be used.

    A stream that was closed becomes one that goes nowhere: else a file opened later would get its number and what is
    printed. What an encoding can't express, such as odd bytes in a file name, is written as an escape.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, _nowhere(number))
    codecs.register_error(_ESCAPE, _escape_bytes)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ESCAPE)


def _nowhere(number: int) -> TextIO:
    try:
        os.fstat(number)
    except OSError:
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != number:
            os.dup2(opened, number)
            os.close(opened)
    return open(os.devnull, "r" if number == 0 else "w", encoding="utf-8")


def _escape_bytes(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    content = b"".join(
        bytes([ord(c) - 0xDC00]) if "\udc80" <= c <= "\udcff" else c.encode("utf-8", "surrogatepass") for c in text
    )
    return "".join(f"\\x{byte:02x}" for byte in content), error.end


@contextlib.contextmanager
def telling(done: str) -> Iterator[None]:
    """Say something of work that is done; if that can't be written, the error says that the work is done all the same.

    Args:
        done: What was done; empty if nothing was.

    Raises:
        UntoldError: The output could not be written.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        if not done:
            raise
        raise UntoldError(
            f"got '{error.strerror or error}' while writing the output, but the work is done: {done}",
            hint="See to the output, then look with `megatron-fixes scan`; there is nothing to repeat.",
        ) from error


def flush_or_forget() -> None:
    """Flush stdout; if its reader is gone or it can't be written, point it at nothing, so that exit stays quiet."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_terminal(stream: TextIO | None = None) -> bool:
    """Whether a person looks at the stream (stdout if None)."""
    return (stream or sys.stdout).isatty()


@functools.cache
def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def say(text: str = "", style: str = "") -> None:
    """Print a line, never cut or wrapped; the style counts on a terminal only."""
    if style and is_terminal():
        from rich.text import Text

        _console().print(Text(text, style), soft_wrap=True)
    else:
        print(text)


def note(text: str) -> None:
    """Print a line beside the answer, to stderr."""
    print(text, file=sys.stderr, flush=True)


def prose_width() -> int:
    """Columns for prose: the terminal's, at most 100."""
    return min(shutil.get_terminal_size((_MAX_PROSE_COLUMNS, 24)).columns, _MAX_PROSE_COLUMNS)


def labelled(label: str, text: str, label_width: int, *, wrap: bool = True) -> None:
    """Print a label and its text, wrapped beneath itself unless it is something to copy."""
    width = max(prose_width() - label_width, 30)
    lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) if wrap else [text]
    for at, line in enumerate(lines or [""]):
        head = (label if at == 0 else "").ljust(label_width)
        if at == 0 and label and is_terminal():
            from rich.text import Text

            _console().print(Text.assemble((head, "bold"), line), soft_wrap=True)
        else:
            print((head + line).rstrip())


def fact(label: str, text: str, label_width: int) -> None:
    """Print a label and what is known of it: wrapped beneath itself on a terminal, and one line in a pipe."""
    labelled(label, text, label_width, wrap=is_terminal())


def conclude(text: str, style: str) -> None:
    """Print a sentence that ends what was said: wrapped on a terminal, and one line in a pipe."""
    for line in textwrap.wrap(text, prose_width(), break_long_words=False) if is_terminal() else [text]:
        say(line, style)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, stacked: int = 1, piped: int | None = None) -> None:
    """Print rows in columns.

    Args:
        headers: One for each column.
        rows: Cells; a line break in one stays on a terminal and becomes " | " in a pipe.
        stacked: So many of the last columns stand under one another on a terminal; the others keep to one line.
        piped: So many of the first columns go into a pipe, where a row is one line; all if None.
    """
    if is_terminal():
        first = len(headers) - stacked
        taken = sum(max(map(len, column)) + len(_GAP) for column in [*zip(headers, *rows, strict=True)][:first])
        columns = _console().width
        if columns < _MIN_TABLE_COLUMNS or columns - taken < _MIN_LAST_COLUMN:
            _print_blocks(headers, rows, first)
        else:
            _print_on_terminal(headers, rows, stacked)
    else:
        for line in plain_lines(headers[:piped], [row[:piped] for row in rows]):
            print(line)


def plain_lines(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lay out rows as aligned plain text, one line a row, upper-case headers first."""
    cells = [[header.upper() for header in headers]]
    cells += [[" | ".join(cell.splitlines()) or "-" for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headers))]
    return [_GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def _print_on_terminal(headers: Sequence[str], rows: Sequence[Sequence[str]], stacked: int) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), header_style="bold", show_edge=False)
    first = len(headers) - stacked
    for header in headers[:first]:
        shown.add_column(header, no_wrap=True)
    shown.add_column(headers[first], overflow="fold")
    for row in rows:
        last = Text("\n").join(
            Text(cell, "bold" if stacked > 1 and at == 0 else "") for at, cell in enumerate(row[first:]) if cell
        )
        shown.add_row(*(Text(cell, STYLES.get(cell.partition(":")[0], "")) for cell in row[:first]), last)
    _console().print(shown)


def _print_blocks(headers: Sequence[str], rows: Sequence[Sequence[str]], first: int) -> None:
    """Print each row as a block for a narrow terminal: its first cell, then the others indented beneath."""
    from rich.padding import Padding
    from rich.text import Text

    for at, row in enumerate(rows):
        if at:
            _console().print()
        _console().print(Text(row[0], "bold"))
        for column, cell in enumerate(row[1:], 1):
            if not cell:
                continue
            label = f"{headers[column]}: " if column < first else ""
            text = Text.assemble(label, (cell, STYLES.get(cell.partition(":")[0], "")), overflow="fold")
            _console().print(Padding(text, (0, 0, 0, len(_GAP))))


def diff(lines: Iterable[str]) -> None:
    """Print the lines of a diff, each with its line end; coloured on a terminal."""
    styles = {"+": "green", "-": "red", "@": "cyan"}
    for line in lines:
        text = line.removesuffix("\n")
        head = text.startswith(("diff ", "--- ", "+++ "))
        say(text, "bold" if head else styles.get(text[:1], ""))


def print_json(value: object) -> None:
    """Print a JSON document, in ASCII so that every terminal and pipe can carry it."""
    print(json.dumps(value, indent=2))


def failure(error: MegatronFixesError, *, as_json: bool, **beside: object) -> None:
    """Print an error: for a person on stderr, and as JSON on stdout where that was asked for.

    Args:
        error: What failed.
        as_json: Print JSON too.
        beside: More keys of the JSON document, left out if empty: what was done before it failed.
    """
    from megatron_fixes.patching.shell import shown

    if as_json:
        fields = {"message": error.message, "context": error.context, "hint": error.hint}
        with contextlib.suppress(OSError):
            print_json({"error": fields, **{key: value for key, value in beside.items() if value}})
    flush_or_forget()
    lines = [f"error: {error.message}"]
    lines += [f"  where: {shown(error.context)}"] if error.context else []
    lines += [f"  hint: {error.hint}"] if error.hint else []
    for at, line in enumerate(lines):
        if is_terminal(sys.stderr):
            from rich.text import Text

            head, _, rest = line.partition(": ")
            style = "bold red" if at == 0 else "bold"
            _console(stderr=True).print(Text.assemble((f"{head}: ", style), rest), soft_wrap=True)
        else:
            print(line, file=sys.stderr)
