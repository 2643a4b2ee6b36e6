# SPDX-License-Identifier: Apache-2.0
"""What an installed torch is, from its files: importing it takes seconds, and may fail on the machine in question.

``version.py`` is read as a syntax tree. The list of GPU code is what ``torch.cuda.get_arch_list()`` tells, a text
compiled into ``libtorch_python.so``; it lies among that library's constants, between NUL bytes, once. If it does not (a
build that has none, or a layout that we don't know), it is not known, and not guessed.
"""

from __future__ import annotations

import ast
import re
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path
    from typing import BinaryIO

    from megatron_fixes.machine.facts import Reading

VERSION = "torch/version.py"
LIBRARY = "torch/lib/libtorch_python.so"
_CODE = re.compile(rb"\0((?:sm|compute)_\d+[af]?(?: (?:sm|compute)_\d+[af]?)*)(?=\0)")
_MAX_CONSTANTS_BYTES = 64 << 20
_MAX_VERSION_BYTES = 64 << 10


def versions(folder: Path) -> dict[str, str | None]:
    """What ``version.py`` in torch's folder gives names to: ``__version__``, ``cuda``, ``hip``; texts, and None.

    Raises:
        OSError: It can't be read.
        SyntaxError, ValueError: It is no Python, or none that anybody would write.
    """
    with (folder / "version.py").open("rb") as file:
        content = file.read(_MAX_VERSION_BYTES + 1)
    if len(content) > _MAX_VERSION_BYTES:
        raise ValueError(f"got more than {_MAX_VERSION_BYTES >> 10} KiB")
    try:
        body = ast.parse(content).body
    except (MemoryError, RecursionError) as error:
        raise ValueError("got expressions that are nested too deeply") from error
    found: dict[str, str | None] = {}
    for node in body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant) and isinstance(value.value, (str, type(None))):
            found.update({target.id: value.value for target in targets if isinstance(target, ast.Name)})
    return found


def lists(folder: Path) -> set[str]:
    """The lists of GPU code among the constants of torch's library.

    Raises:
        OSError, ValueError: It can't be read, or is another kind of file.
    """
    try:
        with (folder / "lib" / "libtorch_python.so").open("rb") as file:
            return {found.decode() for found in _CODE.findall(_constants(file))}
    except struct.error as error:
        raise ValueError(f"got a library that ends early: {error}") from error


def code(folder: Path) -> Reading:
    """What torch has machine code (``sm_``) and PTX (``compute_``) for."""
    # Here, as a glance at the machine does without it.
    from megatron_fixes.machine.facts import Reading

    try:
        found = lists(folder)
    except (OSError, ValueError) as error:
        return Reading(missing=f"{LIBRARY} can't be read: {error}")
    if len(found) != 1:
        return Reading(missing=f"{LIBRARY} holds {len(found) or 'no'} list{'s' * (len(found) > 1)} of GPU code")
    return Reading(found.pop(), LIBRARY)


def _constants(file: BinaryIO) -> bytes:
    """The section ``.rodata`` of a 64-bit little-endian ELF file: a megabyte of some thirty.

    Raises:
        ValueError, struct.error: It is another kind of file.
    """
    head = file.read(64)
    if head[:6] != b"\x7fELF\x02\x01":
        raise ValueError("got another kind of file, expected a 64-bit little-endian ELF library")
    (table,) = struct.unpack_from("<Q", head, 40)
    size, count, names_at = struct.unpack_from("<HHH", head, 58)
    file.seek(table)
    content = file.read(size * count)
    sections = [struct.unpack_from("<II4Q", content, index * size) for index in range(count)]
    names = _section(file, *sections[names_at][4:]) if names_at < count else b""
    for name, _, _, _, offset, length in sections:
        if names[name:].startswith(b".rodata\0"):
            return b"\0" + _section(file, offset, length)
    raise ValueError("got no section .rodata")


def _section(file: BinaryIO, offset: int, length: int) -> bytes:
    if length > _MAX_CONSTANTS_BYTES:
        raise ValueError(f"got a section of {length} bytes")
    file.seek(offset)
    return file.read(length)
