# SPDX-License-Identifier: Apache-2.0
"""What is printed where: a terminal, a pipe, a stream without UTF-8, NO_COLOR."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fixes import catalog
from megatron_fixes.cli.output import plain_lines

Cli = Callable[..., Any]
ROOT = Path(__file__).resolve().parents[2]
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7]m")
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def on_terminal(*arguments: object, columns: int = 100, **variables: str) -> tuple[int, str]:
    """Run the command line with a terminal as its stdout and stderr; return exit code and text."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES", "FORCE_COLOR")}
    environment = {**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **variables}
    command = [sys.executable, "-m", "megatron_fixes", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, stdin=theirs, env=environment)
    os.close(theirs)
    text = b""
    try:
        while chunk := os.read(ours, 65536):
            text += chunk
    except OSError:
        pass  # Linux says EIO when the last writer is gone
    os.close(ours)
    return process.wait(timeout=60), text.decode("utf-8").replace("\r\n", "\n")


def test_a_terminal_gets_a_coloured_table_within_its_width(tree: Path) -> None:
    code, text = on_terminal("scan", tree, columns=90)
    assert code == 0
    assert COLOUR.search(text) and "─" in text
    lines = ESCAPE.sub("", text).splitlines()
    table = lines[next(at for at, line in enumerate(lines) if line.startswith("fix ")) : lines.index("", 4)]
    assert len(table) > 4 and max(map(len, table)) <= 90
    assert lines[-1] == f"next: megatron-fixes apply {tree}"


def test_no_color_is_respected(tree: Path) -> None:
    code, text = on_terminal("scan", tree, NO_COLOR="1")
    assert code == 0 and "─" in text
    assert not COLOUR.search(text)


def test_a_dumb_terminal_gets_no_escapes(tree: Path) -> None:
    code, text = on_terminal("scan", tree, TERM="dumb")
    assert code == 0 and "\x1b" not in text


def test_errors_are_in_colour_on_a_terminal_too() -> None:
    code, text = on_terminal("explain", "MF9999")
    assert code == 2 and COLOUR.search(text)
    assert ESCAPE.sub("", text).startswith("error: got MF9999")


@pytest.mark.parametrize("command", ["list", "list --release all", "explain MF0003", "scan", "apply --dry-run"])
def test_a_pipe_gets_no_escapes_and_no_boxes(process: Cli, tree: Path, command: str) -> None:
    where = [tree] if command.split(maxsplit=1)[0] in ("scan", "apply") else []
    done = process(*command.split(), *where, COLUMNS="40")
    assert done.code == 0
    assert "\x1b" not in done.out and not set("│─┌┃━…") & set(done.out)


def test_a_row_in_a_pipe_is_one_line_whatever_the_width(process: Cli) -> None:
    done = process("list", COLUMNS="40")
    for fix_id, fix in catalog.load().matrix.fixes.items():
        (line,) = [line for line in done.out.splitlines() if line.startswith(fix_id)]
        assert fix.slug in line and line.endswith(fix.symptom)


@pytest.mark.parametrize(
    "variables", [{"LC_ALL": "C"}, {"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}]
)
def test_a_stream_without_utf8_does_not_crash(process: Cli, tree: Path, variables: dict[str, str]) -> None:
    odd = tree.rename(tree.with_name("Mégatron-\udcff"))
    for arguments in (["scan", odd], ["scan", odd, "--json"], ["apply", odd, "--dry-run"], ["scan", odd / "nowhere"]):
        done = process(*arguments, **variables)
        assert done.code == (2 if arguments[1] != odd else 0), done.err
        assert "Traceback" not in done.err and "bug" not in done.err
    code, text = on_terminal("scan", odd, **variables)
    assert code == 0 and "MF0001" in text


def test_bytes_of_a_name_that_are_not_utf8_can_be_pasted(process: Cli, tree: Path) -> None:
    odd = tree.rename(tree.with_name("b\udcff"))
    done = process("scan", odd)
    word = f"$'{odd.parent}/b\\xff'"
    assert f"target   {word}\n" in done.out
    assert done.out.splitlines()[-1] == f"next: megatron-fixes apply {word}"
    command = done.out.splitlines()[-1].removeprefix("next: megatron-fixes ")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = ["bash", "-c", f"{sys.executable} -m megatron_fixes {command}"]
    assert subprocess.run(run, env=environment, capture_output=True, timeout=60).returncode == 0
    assert f"  where: $'{odd.parent}/b\\xff/nope'\n" in process("scan", odd / "nope").err


@pytest.mark.parametrize("columns", [30, 45, 59, 70])
@pytest.mark.parametrize("command", ["scan", "list", "list --release all"])
def test_a_narrow_terminal_gets_blocks_and_no_thin_columns(tree: Path, columns: int, command: str) -> None:
    code, text = on_terminal(*command.split(), *([tree] if command == "scan" else []), columns=columns)
    assert code == 0
    rows = [
        line
        for line in ESCAPE.sub("", text).splitlines()
        # Commands are left whole, to be pasted.
        if not line.startswith(("next: ", "only by name: ", "what each does: ", "target ", "release "))
    ]
    assert max(map(len, rows)) <= columns
    symptom = catalog.load().matrix.fixes["MF0001"].symptom
    wide = [line for line in rows if len(line.split()) > 2 and any(word in line for word in symptom.split())]
    assert wide and " ".join(symptom.split()[:2]) in text


def test_what_doctor_says_is_wrapped_on_a_terminal_and_whole_in_a_pipe(process: Cli, tree: Path) -> None:
    variables = {"PYTHONPATH": f"{tree}:{ROOT}", "MEGATRON_FIXES": "MF0001,MF9999"}
    _, text = on_terminal("doctor", columns=80, **variables)
    lines = ESCAPE.sub("", text).splitlines()
    assert any(line.startswith(" " * 27) for line in lines)
    # What is longer is one word, such as a path, and is left whole.
    assert not [line for line in lines if len(line) > 80 and len(line[27:].split()) > 1]
    assert not [line for line in process("doctor", **variables).out.splitlines() if line.startswith(" " * 27)]


def test_plain_lines_are_aligned_and_mark_empty_cells() -> None:
    assert plain_lines(("a", "bb"), [("xyz", ""), ("", "1\n2")]) == ["A    BB", "xyz  -", "-    1 | 2"]
