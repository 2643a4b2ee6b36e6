# SPDX-License-Identifier: Apache-2.0
"""What the NVIDIA driver's files in /proc tell: its version and the names of its GPUs. No compute capability.

Source: https://download.nvidia.com/XFree86/Linux-x86_64/580.95.05/README/procinterface.html.
"""

from __future__ import annotations

import re
from pathlib import Path

PROC = Path("/proc/driver/nvidia")
_KERNEL_MODULE = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")


def version(proc: Path = PROC) -> str:
    """The version of the driver that is loaded; empty if none is."""
    try:
        found = _KERNEL_MODULE.search((proc / "version").read_text(errors="replace"))
    except OSError:
        return ""
    return found.group(1) if found else ""


def models(proc: Path = PROC) -> list[str]:
    """The name of each GPU."""
    return [name for path in sorted(proc.glob("gpus/*/information")) if (name := _model(path))]


def _model(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("Model:")), "")
