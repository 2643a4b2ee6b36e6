# SPDX-License-Identifier: Apache-2.0
"""Puts the finder into the process. The one finder of a process is kept here.

``at_interpreter_start`` is what ``megatron-fixes.pth`` calls, in every Python that starts with the overlay on: it
must cost next to nothing, never raise, and bear being called twice (a virtual environment reads its ``.pth`` files
twice). So nothing else of this package is imported until Megatron is.
"""

from __future__ import annotations

import atexit
import sys

from megatron_fixes.overlay.finder import OverlayFinder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from megatron_fixes.config import OverlaySettings

FINDER = OverlayFinder()
# Who put the finder in: "" (nobody), "pth", "auto" or "install".
installed_by = ""


def is_installed() -> bool:
    """Whether the finder is on ``sys.meta_path`` now."""
    return any(finder is FINDER for finder in sys.meta_path)


def at_interpreter_start() -> None:
    """Called by the ``.pth``; says what went wrong rather than raise."""
    try:
        install(by="pth")
    except Exception as error:  # noqa: BLE001 - an interpreter must start, whatever is wrong with us
        sys.stderr.write(f"megatron-fixes: not in force, this is a bug of ours: {type(error).__name__}: {error}\n")


def install(settings: OverlaySettings | None = None, by: str = "install") -> None:
    """Put the finder first; see ``megatron_fixes.overlay.install``."""
    global installed_by  # noqa: PLW0603 - one finder a process
    FINDER.settle(settings)
    if by == "auto" and is_installed():
        # Asked for by name, after whatever hook was put in since: go before it.
        sys.meta_path.remove(FINDER)
        sys.meta_path.insert(0, FINDER)
    if not is_installed():
        sys.meta_path.insert(0, FINDER)
        atexit.register(FINDER.look_for_bypass)
        installed_by = by
    FINDER.look_for_early_modules()


def uninstall() -> None:
    """Take the finder out; see ``megatron_fixes.overlay.uninstall``."""
    global installed_by  # noqa: PLW0603 - one finder a process
    sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not FINDER]
    FINDER.retire()
    atexit.unregister(FINDER.look_for_bypass)
    installed_by = ""
