# SPDX-License-Identifier: Apache-2.0
"""``megatron-fixes verify`` as it is typed: what it prints and ends with."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_fixes.cli.main import main
from megatron_fixes.release import archive, layout, signature

from .conftest import LAYOUT, Released

Verify = Callable[..., tuple[int, str, str]]


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Verify:
    """Run the command; what it ended with and said."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = main(["verify", *map(str, arguments)])
        return (code, *capsys.readouterr())

    return run


@pytest.fixture
def folder(released: Released, tmp_path: Path) -> Path:
    """The release, to be spoilt."""
    return Path(shutil.copytree(released.folder, tmp_path / "dist"))


def test_a_signed_release_is_good(released: Released, verify: Verify) -> None:
    code, out, _ = verify(released.folder, "--key", released.public)
    assert code == 0
    assert out.splitlines()[-1] == f"good: megatron-fixes {LAYOUT.version}, signed"


def test_what_is_said_is_wrapped_on_a_terminal(
    folder: Path, released: Released, verify: Verify, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / layout.SIGNATURE).write_bytes(signature.UNSIGNED)
    (folder / LAYOUT.sbom).write_bytes(b"{}")
    arguments = [(released.folder, "--key", released.public), (folder, "--allow-unsigned")]
    whole = [verify(*one)[1] for one in arguments]
    assert all(max(map(len, out.splitlines())) > 80 for out in whole)
    monkeypatch.setattr("megatron_fixes.cli.output.is_terminal", lambda stream=None: True)
    monkeypatch.setenv("COLUMNS", "80")
    for one, before in zip(arguments, whole, strict=True):
        out = verify(*one)[1]
        assert out.split() == before.split()
        assert not [line for line in out.splitlines() if len(line) > 80 and len(line[10:].split()) > 1]


def test_one_file_is_checked_with_the_sums_beside_it(folder: Path, released: Released, verify: Verify) -> None:
    for name in (LAYOUT.sdist, LAYOUT.wheel, LAYOUT.sbom):
        (folder / name).unlink()
    code, out, _ = verify(folder / LAYOUT.patches, folder / LAYOUT.provenance, "--key", released.public)
    assert (code, "WRONG" in out) == (0, False)
    code, out, _ = verify(folder, "--key", released.public)
    assert (code, out.count("is missing")) == (1, 3)


def test_a_changed_file_is_named_with_what_is_wrong(folder: Path, released: Released, verify: Verify) -> None:
    with (folder / LAYOUT.wheel).open("ab") as file:
        file.write(b"\0")
    code, out, _ = verify(folder, "--key", released.public)
    assert code == 1
    (wrong,) = [line for line in out.splitlines() if line.startswith("WRONG")]
    assert wrong.startswith(f"WRONG     {LAYOUT.wheel}: got sha256 ")
    assert out.splitlines()[-1] == "do not use these files"
    code, out, _ = verify(folder, "--key", released.public, "--json")
    answer = json.loads(out)
    assert (code, answer["good"], [found["file"] for found in answer["findings"]]) == (1, False, [LAYOUT.wheel])


@pytest.mark.parametrize("with_key", [True, False])
def test_unsigned_is_repeated(with_key: bool, folder: Path, released: Released, verify: Verify) -> None:
    (folder / layout.SIGNATURE).write_bytes(signature.UNSIGNED)
    key = ["--key", released.public] if with_key else []
    code, out, _ = verify(folder, *key)
    assert (code, "UNSIGNED" in out) == (1, True)
    code, out, _ = verify(folder, *key, "--allow-unsigned")
    assert (code, "UNSIGNED" in out.splitlines()[-1]) == (0, True)
    code, out, _ = verify(folder, *key, "--allow-unsigned", "--json")
    assert (code, json.loads(out)["unsigned"], json.loads(out)["signer"]) == (0, True, None)


def test_a_signed_release_without_a_key_is_not_good(released: Released, verify: Verify) -> None:
    code, out, _ = verify(released.folder)
    assert (code, "no key was given" in out) == (1, True)
    code, out, _ = verify(released.folder, "--allow-unsigned")
    assert (code, "the signature was not checked" in out) == (0, True)


@pytest.mark.parametrize("name", [layout.SUMS, layout.SIGNATURE])
def test_the_sums_alone_are_not_called_good(name: str, folder: Path, released: Released, verify: Verify) -> None:
    code, out, _ = verify(folder / name, "--key", released.public)
    assert (code, "good" in out.lower().replace('good "megatron-fixes-release" signature', "")) == (1, False)
    last = out.splitlines()[-1]
    assert last.startswith(f"the sums of megatron-fixes {LAYOUT.version} are signed, but no file of the release was")
    code, out, _ = verify(folder / name, "--key", released.public, "--json")
    assert (code, json.loads(out)["good"], json.loads(out)["findings"]) == (1, False, [])
    code, out, _ = verify(folder / name, "--allow-unsigned")
    assert (code, "are not known to be signed, but no file" in out.splitlines()[-1]) == (1, True)
    (folder / layout.SIGNATURE).write_bytes(signature.UNSIGNED)
    code, out, _ = verify(folder / name, "--key", released.public)
    assert (code, out.splitlines()[-1]) == (1, "do not use these files")


def test_mistakes_are_the_users(folder: Path, released: Released, verify: Verify) -> None:
    for arguments in (
        [],
        [folder / "none"],
        [folder / LAYOUT.wheel, released.folder / LAYOUT.sdist],
        [released.folder, "--key", folder / "none"],
        [released.folder, "--key", released.key],
        [released.folder, "--key", released.public, "--identity", ""],
        [released.folder, "--identity", "me"],
    ):
        code, _, err = verify(*arguments)
        assert (code, "error: got" in err or "missing argument" in err) == (2, True), arguments


def test_a_release_that_is_not_there_comes_with_a_word_on_how_to_get_one(folder: Path, verify: Verify) -> None:
    code, _, err = verify(folder / "none")
    assert (code, "got no such file or folder" in err, "`make dist`" in err) == (2, True, True)


def test_a_name_in_an_allowed_signers_file_is_asked_for(released: Released, verify: Verify, tmp_path: Path) -> None:
    file = tmp_path / "allowed_signers"
    file.write_text(f"me@example.invalid {released.public.read_text()}", encoding="utf-8")
    assert verify(released.folder, "--key", file)[0] == 1
    assert verify(released.folder, "--key", file, "--identity", "me@example.invalid")[0] == 0


@pytest.mark.timeout(60)
def test_a_fifo_is_not_waited_for(folder: Path, released: Released, verify: Verify) -> None:
    os.mkfifo(folder / "fifo")
    code, _, err = verify(released.folder, "--key", folder / "fifo")
    assert (code, "got a fifo or a device" in err) == (2, True), err
    code, _, err = verify(folder / "fifo", "--key", released.public)
    assert (code, "got a fifo, expected a file of a release" in err) == (1, True), err


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(archive.MAX_BYTES + 1)


def link_to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


SWAPPED: dict[str, tuple[Callable[[Path], None], str]] = {
    "fifo": (make_fifo, "got a fifo"),
    "folder": (Path.mkdir, "got a folder"),
    "dangling": (link_to("none"), "got a link"),
    "large": (make_large, "got more than 256 MiB"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("what", SWAPPED)
@pytest.mark.parametrize("name", [layout.SUMS, layout.SIGNATURE, LAYOUT.sbom])
def test_what_is_no_file_of_a_release_is_the_releases_fault(
    what: str, name: str, folder: Path, released: Released, verify: Verify
) -> None:
    make, said = SWAPPED[what]
    (folder / name).unlink()
    make(folder / name)
    # A folder that is named is a release of its own, without sums.
    one = [folder / (name if name == LAYOUT.sbom else LAYOUT.wheel)]
    for path in [folder, *([] if (what, name) == ("folder", LAYOUT.sbom) else one)]:
        code, out, err = verify(path, "--key", released.public)
        assert (code, out, said in err, "hint: " in err, "is missing" in err) == (1, "", True, True, False), err
        assert str(folder / name) in err.replace("\n", "")


def test_a_link_in_a_release_is_refused(folder: Path, released: Released, verify: Verify) -> None:
    (folder / LAYOUT.sbom).unlink()
    (folder / LAYOUT.sbom).symlink_to(released.folder / LAYOUT.sbom)
    code, _, err = verify(folder, "--key", released.public)
    assert (code, "got a link under a name like a release's" in err) == (1, True)


def test_what_is_no_part_of_a_release_is_named_and_not_called_good(
    folder: Path, released: Released, verify: Verify
) -> None:
    for name in ("key.pub", "signers", "a\x1b[2Jb", "notes.txt"):
        (folder / name).write_text("x", encoding="utf-8")
    os.mkfifo(folder / "fifo")
    (folder / "checked").mkdir()
    (folder / "link").symlink_to("/dev/zero")
    code, out, _ = verify(folder, "--key", released.public)
    assert (code, "WRONG" in out, "\x1b[2J" in out) == (0, False, False)
    said = [line for line in out.splitlines() if line.startswith("left out")]
    assert len(said) == 7 and all(line.endswith(": not part of the release") for line in said)
    assert "left out  checked/: not part of the release" in said
    code, out, _ = verify(folder, "--key", released.public, "--json")
    assert (code, json.loads(out)["files"]) == (0, sorted(LAYOUT.files))
    assert verify(folder / "key.pub", "--key", released.public)[0] == 1  # who asks for it gets an answer


LIKE_OURS = (
    *("megatron_fixes-0.0.1-py3-none-any.whl", "megatron-fixes-patches-9.9.9.tar.gz", "Megatron.Fixes.sh"),
    *("extra.whl", "SHA256SUMS2", "sha256sums.txt", "x.intoto.json", "torch.tar.GZ", "\u200bmegatron fixes"),
)


@pytest.mark.parametrize("name", LIKE_OURS)
def test_what_could_be_taken_for_a_part_of_it_is_wrong(
    name: str, folder: Path, released: Released, verify: Verify
) -> None:
    (folder / name).write_bytes(released.files[LAYOUT.wheel])
    code, out, _ = verify(folder, "--key", released.public)
    assert (code, out.count("WRONG"), "is not listed in SHA256SUMS" in out) == (1, 1, True)


def test_a_folder_under_a_name_like_ours_is_refused(folder: Path, released: Released, verify: Verify) -> None:
    (folder / LAYOUT.root).mkdir()
    code, _, err = verify(folder, "--key", released.public)
    assert (code, "got a folder under a name" in err) == (1, True)


def test_a_bundle_of_sigstore_is_said_to_be_left_out_and_stands_for_no_signature(
    folder: Path, released: Released, verify: Verify
) -> None:
    (folder / layout.KEYLESS).write_text("{}", encoding="utf-8")
    code, out, _ = verify(folder, "--key", released.public)
    assert code == 0
    assert f"left out  {layout.KEYLESS}: sigstore checks it" in out
    (folder / layout.SIGNATURE).unlink()
    assert verify(folder, "--key", released.public)[0] == 1
