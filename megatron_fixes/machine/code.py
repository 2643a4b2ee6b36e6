# SPDX-License-Identifier: Apache-2.0
"""Whether a list of GPU code has some that a device can run, as the CUDA documentation states it.

* Machine code (``sm_86``) runs on devices of the same major version with the same or a higher minor one: 8.9 runs it.
* PTX (``compute_90``) is compiled by the driver for any device that is not older; the driver must be as new as the CUDA
  version that wrote it.
* ``sm_90a`` runs on 9.0 alone; ``sm_100f`` on its own family, the same major version from that minor one on.

Source: https://docs.nvidia.com/cuda/ada-compatibility-guide,
https://developer.nvidia.com/blog/nvidia-blackwell-and-nvidia-cuda-12-9-introduce-family-specific-architecture-features/.
Not handled: Tegra, whose devices and desktop ones don't run each other's machine code.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_ENTRY = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)$")


class Code(NamedTuple):
    """The entry of a list that a device runs; PTX has to be compiled by the driver first."""

    name: str
    ptx: bool


def capability(text: str) -> tuple[int, int] | None:
    """A compute capability out of ``8.9``; None for anything else."""
    found = re.fullmatch(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None


def named_capability(name: str, rows: Mapping[str, Iterable[str]]) -> tuple[int, int] | None:
    """The compute capability of a GPU by its name.

    Args:
        name: As the driver calls it: ``NVIDIA A100-SXM4-80GB``.
        rows: Architecture, such as ``sm_80``, to names that have to be in it as words of their own: ``A100``.
    """
    for architecture, gpus in rows.items():
        if any(re.search(rf"(?<![\w-]){re.escape(gpu)}(?!\w)", name) for gpu in gpus):
            number = architecture.removeprefix("sm_")
            return int(number[:-1]), int(number[-1])
    return None


def code_for(names: str, device: tuple[int, int]) -> Code | None:
    """What a device would run of a list such as ``sm_80 sm_86 compute_86``: its nearest machine code, else PTX."""
    runnable = []
    for name in names.split():
        entry = _ENTRY.fullmatch(name)
        if entry and _runs(entry[1], (int(entry[2]), int(entry[3])), entry[4], device):
            runnable.append((entry[1] == "sm", (int(entry[2]), int(entry[3])), name))
    if not runnable:
        return None
    native, _, name = max(runnable)
    return Code(name, ptx=not native)


def all_readable(names: str) -> bool:
    """Whether each entry of a list is of a kind that ``code_for`` knows; False for an empty list."""
    return bool(names.split()) and all(_ENTRY.fullmatch(name) for name in names.split())


def _runs(kind: str, built: tuple[int, int], feature: str, device: tuple[int, int]) -> bool:
    if feature == "a":
        return built == device
    if kind == "sm" or feature == "f":
        return built[0] == device[0] and built[1] <= device[1]
    return built <= device
