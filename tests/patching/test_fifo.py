# SPDX-License-Identifier: Apache-2.0
"""A fifo in the place of a file is told at once and never waited for, whichever file it is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_fixes.catalog.series import load_series
from megatron_fixes.cli.main import main
from megatron_fixes.errors import DataError
from megatron_fixes.regular import read_regular

from .. import synthetic
from ..synthetic import FIRST, IDS, edited, patched

# One that is waited for ends the test by its alarm, and not after minutes.
pytestmark = [pytest.mark.timeout(20)]


@pytest.fixture
def tree(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    synthetic.use(synthetic.build(tmp_path_factory.mktemp("distribution") / "synthetic"), monkeypatch)
    return synthetic.write_tree(tmp_path / "tree")


def put_fifo(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.parametrize("command", ["scan", "apply"])
def test_in_place_of_a_file_that_fixes_touch(command: str, tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put_fifo(tree / FIRST)
    assert main([command, str(tree)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines()[:2] == [
        "error: can't read a file that fixes touch: a fifo or a device, and no regular file",
        f"  where: {tree / FIRST}",
    ]


@pytest.mark.parametrize("name", ["journal.json", "blobs"])
@pytest.mark.parametrize("command", ["apply", "revert"])
def test_in_place_of_a_file_of_the_journal(
    command: str, name: str, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["apply", str(tree), "--only", IDS[0]]) == 0
    journal = tree / ".megatron-fixes"
    stored = sorted((journal / "blobs").iterdir()) if name == "blobs" else [journal / name]
    for file in stored:
        put_fifo(file)
    before = edited(tree)
    capsys.readouterr()
    assert main([command, str(tree)]) == 1
    assert "a fifo or a device, and no regular file" in capsys.readouterr().err
    assert edited(tree) == before


def test_where_the_journal_is_to_be_written(tree: Path) -> None:
    assert main(["apply", str(tree), "--only", IDS[0]]) == 0
    put_fifo(tree / ".megatron-fixes" / "journal.json.new")
    assert main(["apply", str(tree)]) == 1
    assert edited(tree) == patched(IDS[0])
    assert main(["apply", str(tree)]) == 0
    assert edited(tree) == patched(*IDS)


@pytest.mark.parametrize("path", [".git", ".git/HEAD", ".git/packed-refs", "megatron/core/package_info.py"])
def test_where_a_release_is_looked_for(path: str, tree: Path) -> None:
    if path.endswith("packed-refs"):
        (tree / ".git").mkdir()
        (tree / ".git" / "HEAD").write_text("ref: refs/heads/main\n")
    put_fifo(tree / path)
    assert main(["scan", str(tree)]) == 0


def test_in_place_of_a_patch(tmp_path: Path) -> None:
    (tmp_path / "core_v0.16").mkdir()
    (tmp_path / "core_v0.16" / "series").write_text("MF0001-x.patch\n")
    put_fifo(tmp_path / "core_v0.16" / "MF0001-x.patch")
    with pytest.raises(DataError, match="a fifo or a device"):
        load_series(tmp_path, "core_v0.16")


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert read_regular(tmp_path / "link") == b"text"
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path)
    with pytest.raises(OSError, match="a fifo or a device"):
        read_regular(Path(os.devnull))
