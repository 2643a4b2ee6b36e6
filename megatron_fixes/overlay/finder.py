# SPDX-License-Identifier: Apache-2.0
"""The finder on ``sys.meta_path``: takes the modules that patches touch, and lets every other name pass.

It holds no knowledge of its own. Until ``megatron.core`` is looked for it costs a few look-ups an import; then the
``Process`` is made, which knows the touched modules, and decides (``core`` says why it is done there and not here).

Order: it sits first. A finder that was put before ours and answers itself is not asked again by Python; that such a
module is loaded is noticed at the next import that reaches us, by ``status()``, and when the process ends.
"""

from __future__ import annotations

import os
import sys
from _thread import RLock, _local

from megatron_fixes.overlay.core import PrecededLoader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from megatron_fixes.config import OverlaySettings
    from megatron_fixes.overlay.process import Process

CORE = "megatron.core"
_BELOW_CORE = CORE + "."


class OverlayFinder:
    """See the module's docstring; one in a process (``start.FINDER``)."""

    def __init__(self) -> None:
        self._settings: OverlaySettings | None = None
        self._process: Process | None = None
        self._making = False
        self._asking = _local()
        # Why there can be no process: this distribution is damaged.
        self.damage = ""
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = RLock()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find the patched copy of a module that fixes touch; None for every other name."""
        if fullname == CORE and not self.damage and not getattr(self._asking, "core", False):
            return self._preceded(fullname, path, target)
        process = self._process
        if process is None:
            if self.damage:
                return None
            # Only where megatron.core came by another way than through us.
            if not fullname.startswith(_BELOW_CORE) and (self._making or CORE not in sys.modules):
                return None
            try:
                process = self.process()
            except Exception as error:  # noqa: BLE001 - an exception here would be one more ImportError to swallow
                self._give_up(error)
                return None
        if process.unaccounted or process.to_stop:
            process.account()
        if fullname not in process.paths:
            return None
        return process.find(fullname, path, target)

    def _preceded(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        """Find ``megatron.core`` by the finders behind ours, and have all prepared before it is loaded."""
        self._asking.core = True
        try:
            spec = None
            finders = list(sys.meta_path)
            for other in finders[finders.index(self) + 1 :] if self in finders else ():
                if hasattr(other, "find_spec") and (spec := other.find_spec(fullname, path, target)) is not None:
                    break
        finally:
            self._asking.core = False
        if spec is not None and hasattr(spec.loader, "exec_module"):
            origin = spec.origin
            spec.loader = PrecededLoader(spec.loader, lambda: self.prepare(origin))  # type: ignore[assignment]
        return spec

    def prepare(self, origin: str | None) -> None:
        """Decide for the tree that ``megatron.core`` is about to be loaded from, outside the import lock."""
        try:
            process = self.process()
        except Exception as error:  # noqa: BLE001 - as in find_spec
            self._give_up(error)
            return
        process.prepare(origin)

    def process(self) -> Process:
        """What the overlay knows and did in this process, made when it is first needed."""
        if self._process is not None:
            return self._process
        # What is imported now comes by here too, and must pass: in any thread, as it may hold an import lock that this
        # one waits for. Nothing is imported while our own lock is held.
        self._making = True
        try:
            from megatron_fixes.overlay.process import Process
        finally:
            self._making = False
        with self._lock:
            if self._process is None:
                self._process = Process(self._settings, self)
            return self._process

    def _give_up(self, error: Exception) -> None:
        from megatron_fixes import config
        from megatron_fixes.overlay import notice
        from megatron_fixes.overlay.decision import Refusal

        self.damage = f"{type(error).__name__}: {error}".replace("\n", " ")
        refusal = Refusal("bug", f"no fix is in force: {self.damage}", "reinstall megatron-fixes")
        notice.say(refusal.line)
        if (self._settings or config.overlay_settings()).strict.value:
            notice.stop([refusal])

    @property
    def begun(self) -> bool:
        """Whether this process came near Megatron."""
        return self._process is not None

    def settle(self, settings: OverlaySettings | None) -> None:
        """Take other settings, as long as nothing was decided by the old ones.

        Raises:
            UsageError: Something was.
        """
        if settings is None or settings == self._settings:
            return
        if self._process is not None and self._process.decisions:
            if settings == self._process.settings:
                return
            from megatron_fixes.errors import UsageError

            raise UsageError(
                "got other settings than those that modules of this process were already patched by",
                hint="Install before megatron.core is imported.",
            )
        self._settings, self._process = settings, None

    def look_for_early_modules(self) -> None:
        """Refuse the modules that were imported before the finder was there."""
        if CORE not in sys.modules or self.damage:
            return
        try:
            process = self.process()
        except Exception as error:  # noqa: BLE001 - as in find_spec
            self._give_up(error)
            return
        process.find_early_modules()

    def look_for_bypass(self) -> None:
        """Notice modules that another finder loaded, at the end of a process that may never have asked us."""
        if CORE in sys.modules and not self.damage:
            self.process().account()

    def retire(self) -> None:
        """Look no more for modules that are loaded without us."""
        if self._process is not None:
            self._process.unaccounted.clear()
