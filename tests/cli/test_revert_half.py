# SPDX-License-Identifier: Apache-2.0
"""A fix in two files, of which one was edited before a further apply: ``revert`` never leaves half of it unsaid."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .. import synthetic
from ..synthetic import EDITS, FIRST, SECOND, edited, patched

Cli = Callable[..., Any]
EDIT = b"def mine(total):\n    return total\n\n\n"


@pytest.fixture
def small(distribution: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    synthetic.use(distribution, monkeypatch)
    return synthetic.write_tree(tmp_path / "tree")


def with_edit(files: dict[str, bytes]) -> dict[str, bytes]:
    return {**files, FIRST: EDIT + files[FIRST]}


def test_it_stays_whole_is_named_and_comes_out_by_the_command(cli: Cli, small: Path) -> None:
    assert cli("apply", small, "--only", "MF9001").code == 0
    (small / FIRST).write_bytes(EDIT + (small / FIRST).read_bytes())
    done = cli("apply", small)
    assert f"{FIRST} was edited after an earlier apply" in done.out
    assert f"{SECOND} shares a fix with an edited file" in done.out
    done = cli("revert", small)
    assert done.code == 0 and "MF9001 stayed: applied before a file was edited" in done.out
    assert "in part" not in done.out
    assert edited(small) == with_edit(patched("MF9001"))
    verdicts = {fix["id"]: fix["verdict"] for fix in cli("scan", small, "--json").json["fixes"]}
    assert verdicts == {"MF9001": "applied", "MF9002": "needed", "MF9003": "needed"}
    command = done.out.split("take out with: ")[1].splitlines()[0]
    subprocess.run(command, shell=True, check=True, timeout=60)
    assert edited(small) == with_edit(patched())


def test_what_a_hand_took_out_in_one_file_is_named_as_there_in_part(cli: Cli, small: Path) -> None:
    assert cli("apply", small, "--only", "MF9001").code == 0
    old, new = EDITS["MF9001"][FIRST]
    (small / FIRST).write_bytes(EDIT + (small / FIRST).read_bytes().replace(new.encode(), old.encode()))
    assert cli("apply", small, "--only", "MF9002").code == 0
    done = cli("revert", small)
    assert done.code == 0 and "MF9001 may be in the tree in part" in done.out
    assert "half applied: wait has the fix, launch has not" in done.out
    assert edited(small) == {FIRST: EDIT + patched()[FIRST], SECOND: patched("MF9001")[SECOND]}


def test_a_file_of_another_release_is_named_too(cli: Cli, small: Path) -> None:
    """The tree moved on and kept one half, as ``git checkout --merge`` may leave it."""
    assert cli("apply", small, "--only", "MF9001").code == 0
    info = small / "megatron/core/package_info.py"
    info.write_text(info.read_text().replace("PATCH = 1", "PATCH = 2"))
    (small / FIRST).write_bytes(EDIT + (small / FIRST).read_bytes())
    assert "revert knows the new bytes only" in cli("apply", small, "--only", "MF9002").out
    done = cli("revert", small, "--json")
    assert done.code == 0
    assert any(note.startswith("MF9001 may be in the tree in part") for note in done.json["notes"])
    assert edited(small) == {FIRST: EDIT + patched("MF9001")[FIRST], SECOND: patched()[SECOND]}
