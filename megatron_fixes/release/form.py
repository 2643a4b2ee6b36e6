# SPDX-License-Identifier: Apache-2.0
"""The one form that the JSON files of a release are written in; in any other, they are not taken for ours. Pure.

One text for each content, so that a byte that differs is a difference in what is said.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from megatron_fixes.errors import RefusedError

Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Content = TypeVar("Content", bound=msgspec.Struct)


def encode(content: msgspec.Struct) -> bytes:
    """Return a file's bytes."""
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


def decode(data: bytes, form: type[Content], what: str, *, source: str) -> Content:
    """Read a file's bytes.

    Args:
        data: As they were found.
        form: What they should hold.
        what: Its name in messages.
        source: Where they are from.

    Raises:
        RefusedError: They hold no such thing, or are not written as we write it.
    """
    try:
        content = msgspec.json.decode(data, type=form)
    except msgspec.MsgspecError as error:
        raise RefusedError(f"got what is no {what} ({error})", context=source) from None
    if encode(content) != data:
        raise RefusedError(f"got a {what} in another form than ours, expected ours to the byte", context=source)
    return content
