#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws ``docs/demo.svg``: what ``scan``, ``apply`` and ``prove`` print on a terminal.

They are run for real on megatron-core 0.16.1. ``python scripts/render_demo.py`` (needs torch, as ``prove``
does). The picture is as true as its last run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import program
from rich.console import Console
from rich.text import Text

from megatron_fixes.catalog.data import matrix_path
from megatron_fixes.catalog.matrix import load_matrix
from megatron_fixes.proofs.releases import fetch

RELEASE, COLUMNS = "0.16.1", 116
ROOT = Path(__file__).resolve().parent.parent
COMMANDS = (["scan", "Megatron-LM"], ["apply", "Megatron-LM"], ["prove", "MF0003", "--release", RELEASE])


def on_terminal(arguments: list[str], folder: str) -> str:
    """What a command prints to a terminal of COLUMNS columns."""
    leader, follower = os.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "megatron_fixes", *arguments]
    process = subprocess.Popen(command, stdout=follower, stderr=subprocess.DEVNULL, cwd=folder, env=environment)
    os.close(follower)
    chunks = []
    while True:
        try:
            chunks.append(os.read(leader, 65536))
        except OSError:  # the other end was closed
            break
    process.wait()
    os.close(leader)
    return b"".join(chunks).decode().replace("\r\n", "\n").replace(str(Path(folder)) + "/", "~/")


@program.tells_errors
def main() -> int:
    """Run the commands on a copy of the release and draw what they said."""
    program.parser(__doc__).parse_args()
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(
            fetch(RELEASE, load_matrix(matrix_path())) / "megatron", Path(folder) / "Megatron-LM" / "megatron"
        )
        for arguments in COMMANDS:
            console.print(Text.assemble(("$ ", "bold green"), ("megatron-fixes " + " ".join(arguments), "bold")))
            console.print(Text.from_ansi(on_terminal(arguments, os.path.realpath(folder))))
            console.print()
    picture = ROOT / "docs" / "demo.svg"
    console.save_svg(str(picture), title="megatron-fixes")
    print(f"wrote {picture.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
