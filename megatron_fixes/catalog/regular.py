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


def read_regular(path: Path) -> bytes:
    """Read a regular file; a link to one will do.

    Raises:
        OSError: It can't be read, or is something else: EISDIR for a folder, EINVAL for a fifo or a device.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "a fifo or a device, and no regular file", str(path))
        return file.read()
