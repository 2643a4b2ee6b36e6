# SPDX-License-Identifier: Apache-2.0
"""Runtime wrappers on Megatron's attach points: what is under way, what came late, what a step or a layout left.

* ``lifecycle``: outstanding gradient reductions and parameter gathers, their deadline, and steps that are abandoned.
* ``streams``: the communication stream is ordered after the gradients; what the order of launches relies on.
* ``teardown``: ``destroy_model_parallel`` after what is under way, and the process groups that it leaves.

Imported at interpreter start where guards are asked for, so nothing of torch is imported here. What each guard does not
do: docs/guards.md.
"""

from __future__ import annotations

from megatron_fixes.config import GUARD_NAMES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_fixes.guards.ledger import Outstanding
    from megatron_fixes.guards.start import Status

__all__ = ["install", "outstanding", "status", "uninstall"]


def install(
    names: Sequence[str] = GUARD_NAMES, *, deadline_s: float | None = None, abort: bool | None = None
) -> Status:
    """Put guards on Megatron now, or as soon as ``megatron.core.distributed`` is imported.

    Args:
        names: Of ``lifecycle``, ``streams``, ``teardown``. Guards that are installed already stay.
        deadline_s: How long a collective may take, in seconds; None for ``MEGATRON_GUARDS_DEADLINE_S``. One that is
            given takes the place of the one in force, for all guards.
        abort: Whether a late collective's group is aborted; None for ``MEGATRON_GUARDS_ABORT``. As ``deadline_s``.

    Raises:
        UsageError: An unknown name, a deadline that is no time, or wrapt is not installed. Nothing was changed.
        RefusedError: A function of this Megatron has other parameters than its guard was written for; nothing was
            changed. If Megatron is imported later, this is told as the event ``guards-not-installed`` instead.
    """
    from megatron_fixes.guards import start

    return start.install(names, deadline_s=deadline_s, abort=abort)


def uninstall() -> None:
    """Take all guards off; Megatron has the very functions that it had before."""
    from megatron_fixes.guards import start

    start.uninstall()


def status() -> Status:
    """What is asked for and what is in force."""
    from megatron_fixes.guards import start

    return start.status()


def outstanding() -> tuple[Outstanding, ...]:
    """The collectives of bucket groups that were issued and not waited for, oldest first; needs ``lifecycle``."""
    from megatron_fixes.guards.ledger import LEDGER

    return tuple(LEDGER.outstanding())
