# SPDX-License-Identifier: Apache-2.0
"""Files that scripts generate from others: written, or with ``--check`` only compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from pathlib import Path


def settle(data: Any, path: Path, arguments: list[str]) -> int:
    """Write data as JSON, or with ``--check`` among the arguments say whether the file is what would be written.

    Returns:
        An exit code: 1 if the file is out of date.
    """
    content = msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n"
    if "--check" in arguments:
        same = path.is_file() and path.read_bytes() == content
        print(f"{path.name} is up to date" if same else f"{path.name} is out of date: run this without --check")
        return 0 if same else 1
    path.write_bytes(content)
    print(f"wrote {path.name}: {len(content)} bytes")
    return 0
