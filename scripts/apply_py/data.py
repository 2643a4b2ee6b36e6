# SPDX-License-Identifier: Apache-2.0
"""Stands in for ``megatron_fixes.catalog.data``: the data lies beside apply.py, and is what the manifest says.

A file that was changed, lost or added on its way is refused before anything is done with it. Whether the manifest
itself is the one that was published is what the signature over the whole tarball tells.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from megatron_fixes.errors import RefusedError
from megatron_fixes.regular import read_regular

_HERE = Path(__file__).resolve().parent
_MANIFEST = "MANIFEST.json"


def patches_root() -> Path:
    """The folder with one folder a line."""
    return _HERE / "patches"


def compiled_matrix_path() -> Path:
    """Releases and fixes."""
    return _HERE / "compat_matrix.json"


def matrix_path() -> Path:
    """The same file: there is no other form of it here."""
    return compiled_matrix_path()


def fingerprints_path() -> Path:
    """The table of known functions."""
    return _HERE / "fingerprints.json"


def _is_used(name: str) -> bool:
    return name.startswith("patches/") or name in ("apply.py", "compat_matrix.json", "fingerprints.json")


def require_whole() -> None:
    """Compare what is used of what lies beside apply.py with the manifest.

    Raises:
        RefusedError: A file is missing, was changed, or was added to the patches.
    """
    hint = "Unpack the tarball again, after you have verified it."
    try:
        listed = json.loads(read_regular(_HERE / _MANIFEST))["files"]
        expected = {name: entry["sha256"] for name, entry in listed.items() if _is_used(name)}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RefusedError(f"got no manifest ({error})", context=str(_HERE / _MANIFEST), hint=hint) from None
    patches = {path.relative_to(_HERE).as_posix() for path in patches_root().rglob("*") if not path.is_dir()}
    for name in sorted({*expected, *patches}):
        try:
            got = hashlib.sha256(read_regular(_HERE / name)).hexdigest()
        except OSError as error:
            message = f"got '{error.strerror}', expected the file that {_MANIFEST} lists"
            raise RefusedError(message, context=str(_HERE / name), hint=hint) from None
        if got != expected.get(name):
            message = f"got sha256 {got}, expected {expected.get(name, 'no such file')} as in {_MANIFEST}"
            raise RefusedError(message, context=str(_HERE / name), hint=hint)
