# SPDX-License-Identifier: Apache-2.0
"""The finder on ``sys.meta_path``: takes the modules that patches touch, and lets every other name pass.

It holds no knowledge of its own. Until ``megatron.core`` is there or a name below it is looked for it costs two
look-ups an import; then it makes the ``Process``, which knows the touched modules and decides.

Order: it sits first. A finder that was put before ours and answers itself is not asked again by Python; that such a
module is loaded is noticed at the next import that reaches us, by ``status()``, and when the process ends.
"""

from __future__ import annotations

import os
import sys
from _thread import RLock

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
        process = self._process
        if process is None:
            if self.damage:
                return None
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

    def process(self) -> Process:
        """What the overlay knows and did in this process, made when it is first needed."""
        if self._process is not None:
            return self._process
        with self._lock:
            if self._process is None:
                # What is imported now comes by here too, and must pass: in any thread, as it may hold an import lock
                # that this one waits for.
                self._making = True
                try:
                    from megatron_fixes.overlay.process import Process

                    self._process = Process(self._settings, self)
                finally:
                    self._making = False
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
