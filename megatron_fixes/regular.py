# SPDX-License-Identifier: Apache-2.0
"""Reads files that have an end: a fifo in the place of one would wait for its writer, and a device may go on for ever.

Not handled: a network file system that does not answer.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class NotRegularError(OSError):
    """What lies there is a fifo or a device; its errno is EINVAL."""


def read_regular(path: Path, most: int = -1) -> bytes:
    """Read a regular file; a link to one will do.

    Args:
        path: Of the file.
        most: Read no more bytes than that; negative: all.

    Raises:
        NotRegularError: It is a fifo or a device.
        OSError: It can't be read; EISDIR for a folder.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise NotRegularError(errno.EINVAL, "a fifo or a device, and no regular file", str(path))
        return file.read(most)
