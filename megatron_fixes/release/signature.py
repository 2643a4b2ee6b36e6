# SPDX-License-Identifier: Apache-2.0
"""Signs ``SHA256SUMS`` and checks signatures, by running ``ssh-keygen -Y`` (OpenSSH 8.1 or later).

- The namespace is part of what is signed: a signature made for git or for mail is none of a release.
- Whoever verifies brings the key: a public key, or an allowed_signers file as ssh-keygen and git use it. The key in the
  signature itself proves nothing.
- Without a key the sidecar begins with ``UNSIGNED``; it is a text that no key verifies, so it can't be taken for one.
- A signature is taken in the one form that ssh-keygen writes, so no byte of it can change unnoticed.

Not handled: revocation lists and certificates (an allowed_signers file may name an authority; ssh-keygen sees to it).
"""

from __future__ import annotations

import base64
import binascii
import os
import subprocess
import tempfile
from pathlib import Path

from megatron_fixes.errors import RefusedError, UsageError
from megatron_fixes.release.layout import SIGNATURE

NAMESPACE = "megatron-fixes-release"
UNSIGNED = b"UNSIGNED: this release was built without a key, so nothing says whose SHA256SUMS these are.\n"
_BEGIN, _END = b"-----BEGIN SSH SIGNATURE-----\n", b"-----END SSH SIGNATURE-----\n"
_KEY_TYPES = ("ssh-", "sk-ssh-", "ecdsa-", "sk-ecdsa-")
_COLUMNS = 70
_MAX_SIGNERS = 64


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


def verify(sums: bytes, signature: bytes, key: Path) -> str:
    """Check that a key that we were given has signed these sums.

    Args:
        sums: The bytes of ``SHA256SUMS``.
        signature: The bytes of its sidecar.
        key: A public key or an allowed_signers file.

    Returns:
        Who signed, as ssh-keygen says it.

    Raises:
        UsageError: ``key`` is neither.
        RefusedError: There is no signature of that key over these sums.
    """
    identities, signers = _signers(key)
    if is_unsigned(signature):
        raise RefusedError("UNSIGNED: got no signature, expected one of the key that was given", context=SIGNATURE)
    _require_form(signature)
    said = ""
    with tempfile.TemporaryDirectory(prefix="megatron-fixes-") as folder:
        allowed, sidecar = Path(folder, "allowed_signers"), Path(folder, "signature")
        allowed.write_bytes(signers)
        sidecar.write_bytes(signature)
        for identity in identities:
            options = ["-f", str(allowed), "-I", identity, "-n", NAMESPACE, "-s", str(sidecar)]
            done = _ssh_keygen(["-Y", "verify", *options], sums)
            if done.returncode == 0:
                return _said(done)
            said = _said(done)
    message = f"got no good signature of the key in {key} over these sums: {said}"
    raise RefusedError(message, context=SIGNATURE, hint="Don't use these files; fetch them and the key again.")


def _signers(key: Path) -> tuple[list[str], bytes]:
    """Return the identities to ask for, and an allowed_signers file."""
    try:
        text = key.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"got a key that can't be read ({error}), expected a public key", context=str(key)) from None
    hint = "Name a file such as id_ed25519.pub, or an allowed_signers file."
    if "PRIVATE KEY" in text:
        raise UsageError("got a private key, expected a public one", context=str(key), hint=hint)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not lines:
        raise UsageError("got a file without any key", context=str(key), hint=hint)
    if all(line.startswith(_KEY_TYPES) for line in lines):
        allowed = "".join(f'{NAMESPACE} namespaces="{NAMESPACE}" {line}\n' for line in lines)
        return [NAMESPACE], allowed.encode()
    names = dict.fromkeys(name for line in lines for name in line.split()[0].strip('"').split(","))
    identities = [name for name in names if name and not name.startswith(("!", "-"))]
    if not identities or len(identities) > _MAX_SIGNERS or any(len(line.split()) < 3 for line in lines):
        raise UsageError(f"got neither a key nor up to {_MAX_SIGNERS} allowed signers", context=str(key), hint=hint)
    return identities, text.encode()


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


def _ssh_keygen(arguments: list[str], given: bytes) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(
            ["ssh-keygen", *arguments], input=given, capture_output=True, env={**os.environ, "LC_ALL": "C"}, check=False
        )
    except FileNotFoundError:
        raise UsageError(
            "got no ssh-keygen on PATH, expected that of OpenSSH 8.1 or later",
            hint="Install openssh-client, or check the signature where there is one.",
        ) from None


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    lines = (done.stdout + done.stderr).decode("utf-8", "replace").replace("\r", "").strip().splitlines()
    return "; ".join(dict.fromkeys(lines)) or f"it ended with {done.returncode}"
