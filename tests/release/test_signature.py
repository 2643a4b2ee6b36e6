# SPDX-License-Identifier: Apache-2.0
"""A signature is good for one text, one namespace and the key that was given, as the real ssh-keygen tells it."""

from __future__ import annotations

import base64
import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from megatron_fixes.errors import RefusedError, UsageError
from megatron_fixes.release import layout, signature

from .conftest import make_key

SUMS = b"0" * 64 + b"  some-file\n"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("keys")
    return {name: make_key(folder, name) for name in ("ours", "theirs")}


@pytest.fixture(scope="module")
def good(keys: dict[str, Path]) -> bytes:
    return signature.sign(SUMS, keys["ours"])


def public(key: Path) -> Path:
    return key.with_suffix(".pub")


def sign_for(namespace: str, key: Path) -> bytes:
    command = ["ssh-keygen", "-Y", "sign", "-q", "-f", str(key), "-n", namespace]
    return subprocess.run(command, input=SUMS, capture_output=True, check=True).stdout


def test_the_signer_is_named(keys: dict[str, Path], good: bytes) -> None:
    assert 'Good "megatron-fixes-release" signature' in signature.verify(SUMS, good, public(keys["ours"]))


def test_one_text_has_one_signature(keys: dict[str, Path], good: bytes) -> None:
    assert signature.sign(SUMS, keys["ours"]) == good


@pytest.mark.parametrize(
    "text", [SUMS + b"\n", SUMS[:-1], b"", SUMS.replace(b"0", b"1", 1), SUMS.replace(b"\n", b"\r\n")]
)
def test_other_content_is_refused(text: bytes, keys: dict[str, Path], good: bytes) -> None:
    with pytest.raises(RefusedError, match="no good signature") as caught:
        signature.verify(text, good, public(keys["ours"]))
    assert caught.value.context == layout.SIGNATURE


def test_another_key_is_refused(keys: dict[str, Path], good: bytes) -> None:
    with pytest.raises(RefusedError, match=r"no good signature of the key in .*theirs"):
        signature.verify(SUMS, good, public(keys["theirs"]))


@pytest.mark.parametrize("namespace", ["git", "file", "megatron-fixes-releases"])
def test_another_namespace_is_refused(namespace: str, keys: dict[str, Path]) -> None:
    with pytest.raises(RefusedError, match="no good signature"):
        signature.verify(SUMS, sign_for(namespace, keys["ours"]), public(keys["ours"]))


def test_a_changed_signature_verifies_nothing(keys: dict[str, Path], good: bytes) -> None:
    blob = base64.b64decode(b"".join(good.splitlines()[1:-1]))
    places = [*range(6, 10), 20, 40, 60, 75, 90, 110, 130, len(blob) - 30, len(blob) - 1]
    for at in places:  # magic, version, key type, key, namespace, hash, signature
        changed = blob[:at] + bytes([blob[at] ^ 4]) + blob[at + 1 :]
        text = base64.b64encode(changed)
        lines = [text[start : start + 70] for start in range(0, len(text), 70)]
        armour = b"\n".join([good.splitlines()[0], *lines, good.splitlines()[-1], b""])
        with pytest.raises(RefusedError, match="no good signature"):
            signature.verify(SUMS, armour, public(keys["ours"]))


def test_no_byte_of_the_armour_is_free(keys: dict[str, Path], good: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("ssh-keygen was asked")

    monkeypatch.setattr(signature, "_ssh_keygen", never)
    inner = good.index(b"\n") + 1
    others = [good.replace(b"\n", b"\r\n"), b"\n" + good, good + b"\n", good[:-1], good + good, b" " + good, b"", b"\0"]
    others += [good[:inner] + b" " + good[inner:], good[: len(good) // 2], b"x" * 10_000]
    for text in others:
        with pytest.raises(RefusedError, match="no SSH signature"):
            signature.verify(SUMS, text, public(keys["ours"]))


def test_unsigned_is_no_signature(keys: dict[str, Path]) -> None:
    assert signature.is_unsigned(signature.UNSIGNED)
    with pytest.raises(RefusedError, match="UNSIGNED: got no signature"):
        signature.verify(SUMS, signature.UNSIGNED, public(keys["ours"]))


def allowed(folder: Path, line: str, key: Path) -> Path:
    file = folder / "allowed_signers"
    file.write_text(f"# whom we trust\n{line} {public(key).read_text()}", encoding="utf-8")
    return file


@pytest.mark.parametrize(
    "line",
    [
        "megatron-fixes-release",
        "me@example.invalid,megatron-fixes-release",
        "megatron-fixes-*",
        '"megatron-fixes-release" namespaces="megatron-fixes-release"',
    ],
)
def test_an_allowed_signers_file_names_the_signer(
    line: str, keys: dict[str, Path], good: bytes, tmp_path: Path
) -> None:
    assert 'Good "megatron-fixes-release"' in signature.verify(SUMS, good, allowed(tmp_path, line, keys["ours"]))
    with pytest.raises(RefusedError, match="no good signature"):
        signature.verify(SUMS, good, allowed(tmp_path, line, keys["theirs"]))


NAMES = {
    "me@example.invalid": "me@example.invalid",
    "a@b.invalid,me@example.invalid": "me@example.invalid",
    "*@example.invalid": "me@example.invalid",
    '"our signer"': "our signer",
    '"a b,our signer" namespaces="megatron-fixes-release"': "our signer",
    "ssh-admin": "ssh-admin",
    "ssh-ed25519": "ssh-ed25519",
}


@pytest.mark.parametrize("line", NAMES)
def test_whoever_signs_something_else_signs_releases_only_when_asked_for(
    line: str, keys: dict[str, Path], good: bytes, tmp_path: Path
) -> None:
    file = allowed(tmp_path, line, keys["ours"])
    with pytest.raises(RefusedError, match="for the name megatron-fixes-release"):
        signature.verify(SUMS, good, file)
    assert "Good" in signature.verify(SUMS, good, file, NAMES[line])
    with pytest.raises(RefusedError, match="for the name you"):
        signature.verify(SUMS, good, file, "you")


def test_a_public_key_has_no_names(keys: dict[str, Path], good: bytes) -> None:
    with pytest.raises(UsageError, match="names nobody"):
        signature.verify(SUMS, good, public(keys["ours"]), "me")


@pytest.mark.parametrize("line", ['NAME namespaces="git"', 'NAME valid-before="20200101"', "!NAME", "!NAME,*"])
def test_what_an_allowed_signers_file_excludes_is_refused(
    line: str, keys: dict[str, Path], good: bytes, tmp_path: Path
) -> None:
    file = allowed(tmp_path, line.replace("NAME", signature.NAMESPACE), keys["ours"])
    with pytest.raises(RefusedError, match="no good signature"):
        signature.verify(SUMS, good, file)


NO_KEYS = [b"", b"# nothing\n", b"\xff\xfe", b"word\n", b"two words\n", b"a b c\n", b"ssh-ed25519 AAAA c\n"]


@pytest.mark.parametrize("content", [*NO_KEYS, b"KEY", b"MIXED", b"x" * (2**20 + 1)])
def test_what_is_no_key_is_the_users_mistake(
    content: bytes, keys: dict[str, Path], good: bytes, tmp_path: Path
) -> None:
    whole = public(keys["ours"]).read_bytes()
    kind, blob, _ = whole.split(b" ", 2)
    content = {b"KEY": b" ".join((kind, blob[:-12])), b"MIXED": whole + b"me " + whole}.get(content, content)
    (tmp_path / "key").write_bytes(content)
    with pytest.raises(UsageError):
        signature.verify(SUMS, good, tmp_path / "key")


@pytest.mark.timeout(20)
def test_a_key_without_an_end_is_not_waited_for(good: bytes, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path / "fifo", tmp_path / "link", Path("/dev/zero"), tmp_path):
        with pytest.raises(UsageError, match="expected a public key"):
            signature.verify(SUMS, good, path)


def test_a_private_key_to_verify_with_is_refused(keys: dict[str, Path], good: bytes) -> None:
    with pytest.raises(UsageError, match="a private key, expected a public one"):
        signature.verify(SUMS, good, keys["ours"])


def test_a_key_that_is_not_there_is_the_users_mistake(tmp_path: Path, good: bytes) -> None:
    with pytest.raises(UsageError, match="No such file"):
        signature.verify(SUMS, good, tmp_path / "none.pub")
    with pytest.raises(UsageError, match="no such file"):
        signature.sign(SUMS, tmp_path / "none")


def test_without_ssh_keygen_that_is_said(
    keys: dict[str, Path], good: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="no ssh-keygen on PATH"):
        signature.verify(SUMS, good, public(keys["ours"]))


@pytest.mark.timeout(20)
def test_an_ssh_keygen_that_hangs_is_given_up_and_nothing_is_left(
    keys: dict[str, Path], good: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "temporary").mkdir()
    program = tmp_path / "bin" / "ssh-keygen"
    program.write_text("#!/bin/sh\nexec sleep 60\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setattr(signature, "PATIENCE_S", 0.5)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with pytest.raises(UsageError, match="no answer from ssh-keygen"):
        signature.verify(SUMS, good, public(keys["ours"]))
    assert list((tmp_path / "temporary").iterdir()) == []


def test_the_public_half_is_that_of_the_key(keys: dict[str, Path]) -> None:
    expected = public(keys["ours"]).read_bytes().split()[:2]
    for key in (keys["ours"], public(keys["ours"])):
        assert signature.public_half(key).split()[:2] == expected
