# SPDX-License-Identifier: Apache-2.0
"""The commands that people are told to paste: they take a release, no spoilt one, and stop in a shell that goes on.

Each block is pasted into bash as a person does it, without any option, in a folder with the files; then
``megatron-fixes verify`` is asked in the same folder. Not handled: shells other than bash.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_fixes import catalog
from megatron_fixes.cli.main import main
from megatron_fixes.release import layout
from tests.loading import ROOT, load_program

from .conftest import LAYOUT, Released, make_key

NOTES = load_program("scripts/release_notes.py")
LOG = f"# Changelog\n\n## {LAYOUT.version} - 2026-12-01\n\n### Added\n\n- One.\n"
OTHER = layout.Layout("9.9.9")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


TEXTS: dict[str, Callable[[], str]] = {
    "README": lambda: read("README.md").split("## Verify a download")[1],
    "releasing": lambda: read("docs/releasing.md").split("<!-- plain-tools -->")[1],
    "tarball": lambda: read("scripts/apply_py/README.md").split("## To verify")[1],
    "notes": lambda: str(NOTES.notes(catalog.load(), LAYOUT.version, LOG, signed=True)),
}
UNPACKING = ("releasing", "tarball")


def commands(name: str, version: str = LAYOUT.version) -> str:
    block = re.split(r"^```.*\n", TEXTS[name](), flags=re.MULTILINE)[1]
    return re.sub(r"^V=[0-9.]+", f"V={version}", block, flags=re.MULTILINE)


@pytest.fixture
def folder(released: Released, tmp_path: Path) -> Path:
    """The release, with the key above it."""
    shutil.copy(released.public, tmp_path / "key.pub")
    return Path(shutil.copytree(released.folder, tmp_path / "files"))


def paste(text: str, folder: Path) -> tuple[bool, str]:
    """Whether the block ended well, and all that was said; the shell goes on in either case."""
    text += "\necho ended with $?\n"
    done = subprocess.run(["bash"], input=text, cwd=folder, capture_output=True, text=True)
    good = bool(re.search("^good", done.stdout, re.MULTILINE))
    assert done.stdout.endswith("ended with 0\n") == good, done
    return good, done.stdout + done.stderr


@pytest.mark.parametrize("name", TEXTS)
def test_a_release_is_good_and_verifies_in_the_same_folder_afterwards(
    name: str, folder: Path, released: Released
) -> None:
    good, said = paste(commands(name), folder)
    assert good, said
    assert sorted(path.name for path in folder.iterdir()) == sorted(released.files)
    unpacked = folder.parent / "checked" / LAYOUT.root / "apply.py"
    assert unpacked.is_file() == (name in UNPACKING)
    assert main(["verify", str(folder), "--key", str(folder / "../key.pub")]) == 0


def another_key(folder: Path) -> None:
    shutil.copy(make_key(folder.parent, "other").with_suffix(".pub"), folder.parent / "key.pub")


def spoil(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + b"\n")


SPOILT: dict[str, Callable[[Path], object]] = {
    "another key": another_key,
    "no key": lambda folder: (folder.parent / "key.pub").unlink(),
    "no signature": lambda folder: (folder / layout.SIGNATURE).unlink(),
    "sums": spoil(layout.SUMS),
    "wheel": spoil(LAYOUT.wheel),
    "provenance": spoil(LAYOUT.provenance),
    "patches": spoil(LAYOUT.patches),
    "a folder that is there": lambda folder: (folder.parent / "checked").mkdir(),
}


@pytest.mark.parametrize("spoilt", SPOILT)
@pytest.mark.parametrize("name", TEXTS)
def test_a_block_that_is_pasted_stops_before_it_unpacks(name: str, spoilt: str, folder: Path) -> None:
    SPOILT[spoilt](folder)
    good, said = paste(commands(name), folder)
    assert not good, said
    assert not list((folder.parent / "checked").glob("megatron*"))


@pytest.mark.parametrize("name", UNPACKING)
def test_files_that_were_put_there_before_are_not_taken_for_unpacked_ones(name: str, folder: Path) -> None:
    planted = folder.parent / "checked" / LAYOUT.root / "patches" / "core_v0.16"
    planted.mkdir(parents=True)
    (planted / "new.patch").write_text("x", encoding="utf-8")
    good, said = paste(commands(name), folder)
    assert not good and "File exists" in said


@pytest.mark.parametrize("name", UNPACKING)
def test_a_tarball_of_another_version_beside_good_files_is_not_unpacked(name: str, folder: Path) -> None:
    for ours, other in ((LAYOUT.patches, OTHER.patches), (LAYOUT.provenance, OTHER.provenance)):
        shutil.copy(folder / ours, folder / other)
    good, said = paste(commands(name, OTHER.version), folder)
    assert not good, said
    assert not list((folder.parent / "checked").glob("megatron*"))


@pytest.mark.parametrize("name", UNPACKING)
def test_an_unpacked_file_is_held_against_the_manifest(name: str, folder: Path) -> None:
    text = commands(name)
    line = next(line for line in text.splitlines() if line.startswith("tar "))
    change = f"{line}\necho x >> ../checked/{LAYOUT.root}/NOTICE"
    good, said = paste(text.replace(line, change), folder)
    assert not good and "NOTICE: FAILED" in said


@pytest.mark.parametrize(
    ("said", "possible", "offline"),
    [
        ("ci/try_release: good, without network\n", True, True),
        ("ci/try_release: good, without network, UNSIGNED\n", True, True),
        ("ci/try_release: NOT offline: this system\nci/try_release: good\n", False, False),
        ("ci/try_release: NOT offline: this system\nci/try_release: good\n", True, None),
        ("ci/try_release: good\n", True, None),
        ("", False, None),
    ],
)
def test_a_rehearsal_counts_only_without_network_where_that_is_possible(
    said: str, possible: bool, offline: bool | None
) -> None:
    rehearsal = load_program("ci/release_rehearsal")
    if offline is None:
        with pytest.raises(rehearsal.Stopped, match="expected a good run without network"):
            rehearsal.without_network(said, possible=possible)
    else:
        assert rehearsal.without_network(said, possible=possible) == offline


def test_a_release_is_tried_with_the_documented_commands() -> None:
    documented = load_program("ci/try_release").documented
    assert documented(LAYOUT.version, signed=True) == commands("releasing")
    unsigned = documented(LAYOUT.version, signed=False)
    assert "key.pub" not in unsigned and "ssh-keygen" not in unsigned and "sha256sum" in unsigned
