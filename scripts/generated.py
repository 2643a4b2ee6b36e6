# SPDX-License-Identifier: Apache-2.0
"""Files that scripts generate from others: written, or with ``--check`` only compared.

Arguments are read before any work: a mistake in them, or ``--help``, writes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import program

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


def only_check(about: str | None, arguments: Sequence[str] | None = None) -> bool:
    """Read a script's arguments: whether ``--check`` is among them, the only one that there is.

    Args:
        about: The script's docstring, whose first line ``--help`` shows.
        arguments: Those of the process if None.
    """
    parser = program.parser(about)
    parser.add_argument("--check", action="store_true", help="only say whether the files are current; write nothing")
    check: bool = parser.parse_args(arguments).check
    return check


@program.tells_errors
def settle(make: Callable[[], Any], path: Path, *, check: bool) -> int:
    """Write what is made as JSON, or if ``check`` say whether the file is what would be written.

    Returns:
        An exit code: 1 if the file is out of date; that of the error, which is printed, if it could not be made.
    """
    content = msgspec.json.format(msgspec.json.encode(make()), indent=1) + b"\n"
    if check:
        same = path.is_file() and path.read_bytes() == content
        print(f"{path.name} is up to date" if same else f"{path.name} is out of date: run this without --check")
        return 0 if same else 1
    path.write_bytes(content)
    print(f"wrote {path.name}: {len(content)} bytes")
    return 0
