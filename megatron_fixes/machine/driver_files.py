# SPDX-License-Identifier: Apache-2.0
"""What the NVIDIA driver's files in /proc tell: its version and the names of its GPUs. No compute capability.

And whether there is a trace of a driver at all, so that nothing is started or loaded where there is none.

Source: https://download.nvidia.com/XFree86/Linux-x86_64/580.95.05/README/procinterface.html.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

PROC = Path("/proc/driver/nvidia")
CONTROL = Path("/dev/nvidiactl")
LIBRARY = "libnvidia-ml.so.1"
_LOADERS_CACHE = Path("/etc/ld.so.cache")
_FOLDERS = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_KERNEL_MODULE = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")


def traces(proc: Path = PROC) -> list[Path]:
    """What the loaded driver shows itself by: its files, and its device."""
    return [path for path in (proc, CONTROL) if path.exists()]


def has_library() -> bool:
    """Whether the loader would find NVML by its cache, its usual folders, or LD_LIBRARY_PATH."""
    folders = [*filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)), *_FOLDERS]
    if any(os.path.lexists(os.path.join(folder, LIBRARY)) for folder in folders):
        return True
    try:
        return LIBRARY.encode() in _LOADERS_CACHE.read_bytes()
    except OSError:
        return False


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
