# SPDX-License-Identifier: Apache-2.0
"""Mends known defects of released Megatron-LM.

Importing this package imports neither torch nor megatron and changes nothing. ``status()`` tells what is in force in
this process; ``check_ranks(group)`` compares all ranks of a job. Both import what they need when they are called.
"""

__version__ = "0.1.0"
__all__ = ["__version__", "check_ranks", "status"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from megatron_fixes.overlay.report import Status


def status() -> "Status":
    """Tell what is in force in this process, per module and fix, as data."""
    from megatron_fixes import overlay

    return overlay.status()


def check_ranks(group: "Any" = None) -> "Status":
    """Compare what the ranks of a process group have in force; see ``megatron_fixes.ranks``.

    Raises:
        RanksDisagreeError: They differ; the message names the ranks apart.
    """
    # By name, so that no import of this package reaches torch, which the contracts forbid.
    from importlib import import_module

    agreed: Status = import_module("megatron_fixes.ranks").check_ranks(group)
    return agreed
