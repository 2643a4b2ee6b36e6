# SPDX-License-Identifier: Apache-2.0
"""Puts the guards into a process: now, or as soon as Megatron is imported. No torch until then.

A process has one set of guards. Asked for before ``megatron.core.distributed`` is imported, they wait for it in a
post-import hook of wrapt; what goes wrong there is told as an event, since an exception would be one more ImportError
for Megatron to swallow. ``at_interpreter_start`` is what ``megatron-fixes.pth`` calls where ``MEGATRON_GUARDS`` is set:
it never raises, and bears being called twice.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from megatron_fixes import config
from megatron_fixes.errors import MegatronFixesError, UsageError
from megatron_fixes.guards.points import POINTS, TRIGGER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from megatron_fixes.guards.attach import Attached

_attached: list[Attached] = []
_waiting: list[config.GuardSettings] = []
_hooked = False
_told: set[str] = set()  # at the start: CPython 3.11 reads the .pth files of a virtual environment twice


@dataclass(frozen=True)
class Status:
    """What is asked for and what is in force.

    Attributes:
        installed: Guards that are in force.
        waiting: Guards that wait for Megatron to be imported.
        points: Functions that are wrapped, each as ``guard: Class.function``.
        deadline_s: That is in force, in seconds; None: nothing is called late, or no guard is installed.
        abort: Whether the process group of a late collective is aborted.
    """

    installed: tuple[str, ...]
    waiting: tuple[str, ...]
    points: tuple[str, ...]
    deadline_s: float | None = None
    abort: bool = False


def status() -> Status:
    """See ``megatron_fixes.guards.status``."""
    installed = tuple(name for name in config.GUARD_NAMES if any(one.guard == name for one in _attached))
    points = tuple(f"{one.guard}: {one.place}" for one in _attached)
    waiting = tuple(name for name in config.GUARD_NAMES if any(name in one.names.value for one in _waiting))
    if not installed:
        return Status(installed, waiting, points)
    from megatron_fixes.guards.late import TERMS

    return Status(installed, waiting, points, TERMS.deadline_s, TERMS.abort)


def at_interpreter_start() -> None:
    """Called by the ``.pth`` and ``megatron_fixes.auto``; says what went wrong rather than raise."""
    try:
        settings = config.guard_settings()
        if settings.names.value:
            _put_in(settings)
    except Exception as error:  # noqa: BLE001 - an interpreter must start, whatever is wrong with us
        if str(error) not in _told:
            _told.add(str(error))
            _tell(error)


def install(names: Sequence[str], *, deadline_s: float | None, abort: bool | None) -> Status:
    """See ``megatron_fixes.guards.install``."""
    _put_in(config.guard_settings(names, deadline_s, abort))
    return status()


def _put_in(settings: config.GuardSettings) -> None:
    global _hooked  # noqa: PLW0603 - wrapt keeps a hook for ever
    try:
        import wrapt
    except ImportError as error:
        raise UsageError(
            "got no wrapt, which the guards need",
            hint="Install it with the guards, from a clone of this project: pip install '.[guards]'.",
        ) from error
    if (module := sys.modules.get(TRIGGER)) is not None:
        if getattr(module.__spec__, "_initializing", False):
            raise UsageError(f"got {TRIGGER} half imported", hint="Install guards before or after it is imported.")
        _attach(settings)
        return
    _waiting.append(settings)
    if not _hooked:
        _hooked = True
        wrapt.register_post_import_hook(_megatron_is_there, TRIGGER)


def _megatron_is_there(_: ModuleType) -> None:
    try:
        for settings in list(_waiting):
            _attach(settings)
    except Exception as error:  # noqa: BLE001 - see the module's docstring
        _tell(error)
    _waiting.clear()


def _attach(settings: config.GuardSettings) -> None:
    from megatron_fixes.guards import attach, late, lifecycle, streams, teardown

    already = {one.guard for one in _attached}
    names = [name for name in settings.names.value if name not in already]
    wrappers = {**streams.WRAPPERS, **lifecycle.WRAPPERS, **teardown.WRAPPERS}
    added = attach.attach([point for point in POINTS if point.guard in names], wrappers)
    _attached.extend(added)
    # What is in force stays, unless it is named anew.
    if not already or settings.deadline_s.source != "default":
        late.TERMS.deadline_s = settings.deadline_s.value
    if not already or settings.abort.source != "default":
        late.TERMS.abort = settings.abort.value
    if "streams" in names:
        streams.look_first()


def uninstall() -> None:
    """See ``megatron_fixes.guards.uninstall``."""
    _waiting.clear()
    if not _attached:
        return
    from megatron_fixes.guards import attach, lifecycle

    lifecycle.put_back()
    attach.detach(_attached)
    _attached.clear()


def _tell(error: Exception) -> None:
    from megatron_fixes.events import Event, emit

    text = str(error) if isinstance(error, MegatronFixesError) else f"a bug of ours: {type(error).__name__}: {error}"
    emit(Event("guards-not-installed", text.replace("\n  hint:", "; hint:"), {"error": type(error).__name__}, level=40))
