# SPDX-License-Identifier: Apache-2.0
"""Where ranks on one machine meet: a TCP store on loopback, kept by a process of its own.

Its thread must not be in the process that forks the ranks, and a rank may end before its peers. A file would do, but
ranks poll it: then making a process group takes five times as long.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

from megatron_fixes.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

LOOPBACK = "127.0.0.1"
PATIENCE_S = 5.0


def require_loopback() -> None:
    """Refuse a machine on which processes can't reach each other over loopback: ranks would only time out.

    Raises:
        UsageError: It is down, or there is none.
    """
    try:
        with socket.create_server((LOOPBACK, 0)) as server, socket.create_connection(server.getsockname(), PATIENCE_S):
            return
    except OSError as error:
        raise UsageError(
            f"got '{error.strerror or error}' on a connection to {LOOPBACK}, expected ranks to meet over loopback",
            hint="Bring the interface up (ip link set lo up), or prove where it is up.",
        ) from error


def keep_store(folder: Path) -> None:
    """Keep the store until killed; ``folder/port`` says where."""
    import torch.distributed as dist

    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    (folder / "port.part").write_text(str(store.port))
    os.replace(folder / "port.part", folder / "port")
    signal.pause()


def join_store(folder: Path) -> Any:
    """The store that a keeper of ``folder`` keeps, as soon as it is there."""
    import torch.distributed as dist

    while not (port := folder / "port").exists():
        time.sleep(0.001)
    return dist.TCPStore(LOOPBACK, int(port.read_text()), is_master=False)
