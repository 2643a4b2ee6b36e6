#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Signs a release that is built: ``make sign-dist``. The public half has to be committed, or nobody could check it.

The key is a file, or the text in RELEASE_KEY of the environment, as a CI keeps it. Standard library only, and ``make``
runs it so: no installed package is within reach of the key. Not handled: what the files hold (``megatron-fixes verify``
and ``make reproduce``); that they are those of a release, and as their sums say, is checked.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import program

from megatron_fixes.errors import RefusedError
from megatron_fixes.release import folder, layout, signature, sums

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parents[1]
COMMITTED = "docs/release_key.pub"


def require_sound(files: Mapping[str, bytes]) -> str:
    """Refuse what are not the files of one release, each as the sums say; return its version.

    Raises:
        RefusedError: A file is missing, changed or another release's.
    """
    listed = sums.read_sums(files.get(layout.SUMS, b""))
    version = layout.version_of(listed)
    if version is None:
        raise RefusedError("got sums of other files, expected those of one release", context=layout.SUMS)
    if odd := set(layout.Layout(version).files) ^ (set(files) - {layout.KEYLESS}):
        raise RefusedError(f"is {'not expected' if min(odd) in files else 'missing'}", context=min(odd))
    for name, digest in listed.items():
        if (got := sums.digest(files[name])) != digest:
            raise RefusedError(f"got sha256 {got}, expected {digest}", context=name)
    return version


def require_signed(files: Mapping[str, bytes], root: Path) -> bool:
    """Hold the signature against the committed key; return whether there is one: while no key is, there may be none.

    Raises:
        RefusedError: It is not that key's, or nobody can tell whose it is.
    """
    committed = root / COMMITTED
    if committed.is_file():
        signature.verify(files[layout.SUMS], files[layout.SIGNATURE], committed)
        return True
    if files[layout.SIGNATURE] != signature.UNSIGNED:
        raise RefusedError(
            f"got a signature and no {COMMITTED}, expected UNSIGNED until the key is there",
            context=layout.SIGNATURE,
            hint="Commit the public half of the key first (docs/releasing.md, Keys).",
        )
    return False


@contextmanager
def key_file(given: Path | None) -> Iterator[Path | None]:
    """The private key: the file that was named, else one with what RELEASE_KEY holds, for as long as it is needed."""
    text = os.environ.get("RELEASE_KEY", "")
    if given is not None or not text.strip():
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="megatron-fixes-key-") as place:
        path = Path(place, "key")
        path.touch(mode=0o600)
        path.write_text(text.strip() + "\n", encoding="utf-8")
        yield path


def sign(out: Path, key: Path | None, root: Path = ROOT) -> str:
    """Sign the sums of a release that is built, and put the signature in the place of what is there.

    Raises:
        RefusedError: The files are not sound, or the key is not the committed one.
    """
    files = folder.read_release(out)
    version = require_sound(files)
    if key is None:
        return f"{version}: not signed, for no key was given (KEY=, or RELEASE_KEY in the environment)"
    files[layout.SIGNATURE] = signature.sign(files[layout.SUMS], key)
    require_signed(files, root)
    staged = out.parent / f".{out.name}-{layout.SIGNATURE}"
    staged.write_bytes(files[layout.SIGNATURE])
    os.replace(staged, out / layout.SIGNATURE)
    return f"{version}: signed, with the key of {COMMITTED}"


@program.tells_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Read the arguments and sign."""
    parser = program.parser(__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder with the files (default: dist)")
    parser.add_argument("--key", type=Path, help="private key for ssh-keygen -Y sign")
    given = parser.parse_args(arguments)
    with key_file(given.key) as key:
        print(sign(given.out, key))
    return 0


if __name__ == "__main__":
    sys.exit(main())
