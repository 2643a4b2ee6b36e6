# SPDX-License-Identifier: Apache-2.0
"""Import-time application of the same patches: nothing on disk changes. No torch; megatron only as files.

* ``install(settings)`` and ``uninstall()`` put the finder into this process and take it out again.
* ``status()`` is what is in force in this process, as data; it imports nothing of Megatron.
* ``where_from()`` is where the overlay would come from: the ``.pth``, the settings, the finders before ours.

Imported at interpreter start where the overlay is on, so this file imports nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from megatron_fixes.config import OverlaySettings
    from megatron_fixes.overlay.origin import Facts
    from megatron_fixes.overlay.report import Status

__all__ = ["install", "status", "uninstall", "where_from"]


def install(settings: OverlaySettings | None = None) -> None:
    """Put the finder first on ``sys.meta_path``; a second call changes nothing.

    Args:
        settings: None for what the environment says when Megatron is imported.

    Raises:
        UsageError: Other settings than those that this process has already patched modules by.
    """
    from megatron_fixes.overlay import start

    start.install(settings)


def uninstall() -> None:
    """Take the finder out; modules that are loaded stay as they are."""
    from megatron_fixes.overlay import start

    start.uninstall()


def status() -> Status:
    """Tell what is in force in this process; never raises or stops it, whatever is found."""
    from megatron_fixes.overlay import report

    return report.status()


def where_from() -> Facts:
    """Tell where the overlay would come from in this interpreter."""
    from megatron_fixes.overlay import origin

    return origin.where_from()
