# SPDX-License-Identifier: Apache-2.0
"""Signs ``SHA256SUMS`` and checks signatures, by running ``ssh-keygen -Y`` (OpenSSH 8.1 or later).

- The namespace is part of what is signed: a signature made for git or for mail is none of a release.
- Whoever verifies brings the key: a public key, or an allowed_signers file as ssh-keygen and git use it. The key in the
  signature itself proves nothing. Of an allowed_signers file only those count who stand in it for the namespace's name,
  or for the one that is asked for: it lists people who sign commits, too, and they sign no releases.
- Without a key the sidecar begins with ``UNSIGNED``; it is a text that no key verifies, so it can't be taken for one.
- A signature is taken in the one form that ssh-keygen writes, so no byte of it can change unnoticed.

Not handled: revocation lists and certificates (an allowed_signers file may name an authority; ssh-keygen sees to it).
"""

from __future__ import annotations

import base64
import binascii
import os
import shutil
import subprocess
import tempfile
from itertools import pairwise
from pathlib import Path

from megatron_fixes.errors import RefusedError, UsageError
from megatron_fixes.release.folder import read_regular
from megatron_fixes.release.layout import SIGNATURE

NAMESPACE = "megatron-fixes-release"
UNSIGNED = b"UNSIGNED: this release was built without a key, so nothing says whose SHA256SUMS these are.\n"
_BEGIN, _END = b"-----BEGIN SSH SIGNATURE-----\n", b"-----END SSH SIGNATURE-----\n"
_COLUMNS = 70
_MAX_KEYS = 2**20
# Checking a signature takes milliseconds; what needs a minute waits for something that does not come. Signing has no
# bound: a person types a passphrase, or looks for the token.
PATIENCE_S = 60.0


def is_unsigned(signature: bytes) -> bool:
    """Whether a sidecar says that there is no signature."""
    return signature.startswith(b"UNSIGNED")


def sign(sums: bytes, key: Path) -> bytes:
    """Sign with a private key, or with a public one whose private half the agent holds.

    Raises:
        UsageError: There is no such key, or ssh-keygen can't sign with it.
    """
    if not key.is_file():
        raise UsageError("got no such file, expected a key to sign with", context=str(key))
    done = _ssh_keygen(["-Y", "sign", "-q", "-f", str(key), "-n", NAMESPACE], sums)
    if done.returncode or not done.stdout.startswith(_BEGIN):
        raise UsageError(f"ssh-keygen can't sign with it: {_said(done)}", context=str(key))
    return done.stdout


def public_half(key: Path) -> bytes:
    """Return the public key that belongs to what ``sign`` was given.

    Raises:
        UsageError: ssh-keygen can't tell.
    """
    for public in (key, key.with_name(f"{key.name}.pub")):  # ssh-keygen would ask for the passphrase again
        if public.suffix == ".pub" and public.is_file():
            return public.read_bytes()
    done = _ssh_keygen(["-y", "-f", str(key)], b"")
    if done.returncode:
        raise UsageError(f"ssh-keygen can't read it: {_said(done)}", context=str(key))
    return done.stdout


def verify(sums: bytes, signature: bytes, key: Path, identity: str | None = None) -> str:
    """Check that a key that we were given has signed these sums.

    Args:
        sums: The bytes of ``SHA256SUMS``.
        signature: The bytes of its sidecar.
        key: A public key or an allowed_signers file.
        identity: The principal in an allowed_signers file who may sign; None for ``megatron-fixes-release``.

    Returns:
        Who signed, as ssh-keygen says it.

    Raises:
        UsageError: ``key`` is neither, or a public key with an ``identity``; or ssh-keygen is not there or hangs.
        RefusedError: There is no signature of that key over these sums.
    """
    signers = _signers(key, identity)
    if is_unsigned(signature):
        raise RefusedError("UNSIGNED: got no signature, expected one of the key that was given", context=SIGNATURE)
    _require_form(signature)
    name = NAMESPACE if identity is None else identity
    with tempfile.TemporaryDirectory(prefix="megatron-fixes-") as folder:
        allowed, sidecar = Path(folder, "allowed_signers"), Path(folder, "signature")
        allowed.write_bytes(signers)
        sidecar.write_bytes(signature)
        options = ["-f", str(allowed), "-I", name, "-n", NAMESPACE, "-s", str(sidecar)]
        done = _ssh_keygen(["-Y", "verify", *options], sums, PATIENCE_S)
    if done.returncode == 0:
        return _said(done)
    message = f"got no good signature of the key in {key} over these sums, for the name {name}: {_said(done)}"
    hint = "Don't use these files; fetch them and the key again."
    raise RefusedError(message, context=SIGNATURE, hint=hint)


def _signers(key: Path, identity: str | None) -> bytes:
    """Return an allowed_signers file: the one that was given, or one for the public keys that were."""
    expected = "a public key or an allowed_signers file"
    hint = "Name a file such as id_ed25519.pub, or an allowed_signers file."
    content = read_regular(key, _MAX_KEYS, expected)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"got what is no text, expected {expected}", context=str(key), hint=hint) from None
    if "PRIVATE KEY" in text:
        raise UsageError("got a private key, expected a public one", context=str(key), hint=hint)
    lines = [line.strip() for line in text.split("\n") if line.strip() and not line.lstrip().startswith("#")]
    if not lines:
        raise UsageError(f"got a file without any key, expected {expected}", context=str(key), hint=hint)
    places = [_place_of_key(line) for line in lines]
    if not any(places) and None not in places:
        if identity is not None:
            message = f"got the identity {identity!r} with a public key, which names nobody"
            raise UsageError(message, context=str(key), hint="Leave --identity out, or name an allowed_signers file.")
        return "".join(f'{NAMESPACE} namespaces="{NAMESPACE}" {line}\n' for line in lines).encode()
    if odd := next((line for line, place in zip(lines, places, strict=True) if not place), None):
        raise UsageError(f"got the line {odd[:80]!r}, expected {expected}", context=str(key), hint=hint)
    return content


def _place_of_key(line: str) -> int | None:
    """At which word of a line a public key begins: 0 in a key file; None if there is no whole key.

    A principal may look like the name of a key type; the key's own bytes begin with that name.
    """
    words = line.split()
    return next((at for at, pair in enumerate(pairwise(words)) if _is_key(*pair)), None)


def _is_key(kind: str, text: str) -> bool:
    try:
        rest = base64.b64decode(text, validate=True)
    except ValueError:
        return False
    parts = []
    while rest:  # strings, each behind its length (Source: RFC 4253, 6.6)
        size = int.from_bytes(rest[:4], "big")
        parts.append(rest[4 : 4 + size])
        if len(rest) < 4 + size:
            return False
        rest = rest[4 + size :]
    return len(parts) > 1 and parts[0] == kind.encode()


def _require_form(signature: bytes) -> None:
    """Refuse any text but the armour that ssh-keygen writes."""
    body = signature.removeprefix(_BEGIN).removesuffix(_END)
    try:
        encoded = base64.b64encode(base64.b64decode(body.replace(b"\n", b""), validate=True))
    except binascii.Error:
        encoded = b""
    lines = (encoded[at : at + _COLUMNS] + b"\n" for at in range(0, len(encoded), _COLUMNS))
    if not encoded or _BEGIN + b"".join(lines) + _END != signature:
        raise RefusedError("got what is no SSH signature, expected one as ssh-keygen writes it", context=SIGNATURE)


def _ssh_keygen(
    arguments: list[str], given: bytes, patience_s: float | None = None
) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            ["ssh-keygen", *arguments],
            input=given,
            capture_output=True,
            env={**os.environ, "LC_ALL": "C"},
            timeout=patience_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"got no answer from ssh-keygen within {patience_s:g} s, expected one at once: nothing was checked",
            context=shutil.which("ssh-keygen") or "ssh-keygen",
            hint="See what it waits for (is it OpenSSH's own?), and check again.",
        ) from None
    except FileNotFoundError:
        raise UsageError(
            "got no ssh-keygen on PATH, expected that of OpenSSH 8.1 or later",
            hint="Install openssh-client, or check the signature where there is one.",
        ) from None


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = (done.stdout + done.stderr).decode("utf-8", "replace").replace("\r", "").strip().splitlines()
    return "; ".join(dict.fromkeys(lines)) or f"it ended with {done.returncode}"
