# SPDX-License-Identifier: Apache-2.0
"""What is in force in this process, per module and fix, as plain data.

A module's state is ``patched``, ``original`` (nothing to put in), ``not-loaded``, or the kind of the refusal that keeps
it unpatched. A fix's state is one of ``decision``, or ``waiting`` while a module that it touches is not loaded yet.
What is said comes from the modules that are loaded, not from what was planned: a module that another import hook
loaded shows as ``bypassed``. Nothing of Megatron is imported. Strict mode does not stop the process here, but at the
next import if anything was found.
"""

from __future__ import annotations

import hashlib
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from megatron_fixes import __version__, config
from megatron_fixes.overlay import start
from megatron_fixes.overlay.decision import NOT_NEEDED, FixState, Refusal, told
from megatron_fixes.overlay.loader import FIXES, ORIGIN

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from megatron_fixes.overlay.process import Process


@dataclass(frozen=True)
class ModuleState:
    """One module that fixes touch; ``sha256`` is that of its text."""

    module: str
    state: str
    fixes: tuple[str, ...] = ()
    file: str = ""
    origin: str = ""
    sha256: str = ""


@dataclass(frozen=True)
class CacheState:
    """The cache's folder; ``state`` is ``used``, ``memory`` (with the reason why not), or ``unused`` so far."""

    folder: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class Status:
    """What is in force in one process.

    Attributes:
        on: Whether the overlay is at work here.
        why: What turned it on, or why it is off.
        strict: Whether a refusal stops the process.
        root: The tree that Megatron was imported from; empty if it was not, or only in ways we don't look at.
        release: What that tree calls itself.
        not_needed: Fixes that were asked for by name, and of which that release has no need.
    """

    version: str
    pid: int
    on: bool
    why: str
    strict: bool
    root: str
    release: str
    release_source: str
    fixes: tuple[FixState, ...]
    modules: tuple[ModuleState, ...]
    refusals: tuple[Refusal, ...]
    cache: CacheState
    not_needed: tuple[str, ...] = ()

    @property
    def in_force(self) -> tuple[str, ...]:
        """Fixes that the loaded modules carry through the overlay."""
        return tuple(fix.fix for fix in self.fixes if fix.state == "in-force")

    @property
    def in_files(self) -> tuple[str, ...]:
        """Fixes that the tree's files carry already, so that the overlay has nothing to put in."""
        return tuple(fix.fix for fix in self.fixes if fix.state == "applied")

    def __str__(self) -> str:
        """What a person wants to know, in a line, and a line more for each refusal."""
        if not self.on:
            return f"megatron-fixes {self.version}: off ({self.why})"
        fixes = told(self.in_force, self.in_files)
        waiting = [fix.fix for fix in self.fixes if fix.state == "waiting"]
        where = (
            f"megatron-core {self.release or '(no release)'} at {self.root}" if self.root else "no megatron-core yet"
        )
        line = f"megatron-fixes {self.version}: {fixes}, {where}"
        line += f"; {', '.join(self.not_needed)} not needed by {self.release}" if self.not_needed else ""
        line += f"; waiting for an import: {', '.join(waiting)}" if waiting else ""
        return "\n".join([line, *(f"  {refusal.line}" for refusal in self.refusals)])

    def to_json(self) -> dict[str, Any]:
        """As values that ``json`` writes."""
        return {**asdict(self), "in_force": list(self.in_force), "in_files": list(self.in_files)}


def status() -> Status:
    """See ``megatron_fixes.overlay.status``."""
    installed = start.is_installed()
    if not installed and not start.FINDER.begun:
        return _nothing(_why_off(config.overlay_settings()))
    try:
        process = start.FINDER.process()
    except Exception as error:  # noqa: BLE001 - whoever asks wants an answer, and this is one
        return _nothing(f"this installation is damaged: {type(error).__name__}: {error}")
    on = installed and bool(process.asked)
    if on:
        process.account(stop=False)
    root = next(reversed(process.decisions), "")
    decision = process.decisions[root].decision if root else None
    modules = tuple(_module(process, name) for name in process.tables.paths)
    fixes = tuple(_fixes(process, {module.module: module for module in modules}))
    return Status(
        version=__version__,
        pid=os.getpid(),
        on=on,
        why=_why_on(process) if on else _why_off(process.settings),
        strict=process.settings.strict.value,
        root=root,
        release=(decision.release or "") if decision else "",
        release_source=decision.release_source if decision else "",
        fixes=fixes,
        modules=modules,
        refusals=tuple(process.refusals),
        cache=_cache(process),
        not_needed=tuple(fix.fix for fix in fixes if fix.fix in process.asked and fix.state in NOT_NEEDED),
    )


def _nothing(why: str) -> Status:
    settings = config.overlay_settings()
    cache = CacheState(_folder(settings), "unused")
    return Status(__version__, os.getpid(), False, why, settings.strict.value, "", "", "", (), (), (), cache)


def _why_on(process: Process) -> str:
    fixes = process.settings.fixes
    return f"{fixes.name}={','.join(fixes.value)} ({fixes.source}), installed by {start.installed_by}"


def _why_off(settings: config.OverlaySettings) -> str:
    if not settings.fixes.value:
        source = settings.fixes.source
        return "MEGATRON_FIXES is not set" if source == "default" else f"turned off ({source})"
    if start.FINDER.begun:
        return "uninstalled; modules that were loaded before stay patched"
    return "MEGATRON_FIXES is set, but nothing put the overlay into this process: its .pth file did not run"


def _folder(settings: config.OverlaySettings) -> str:
    cache = settings.cache.value
    return "" if cache is None else str(cache / "overlay")


def _cache(process: Process) -> CacheState:
    folder = _folder(process.settings)
    if process.cache_problem:
        return CacheState(folder, "memory", process.cache_problem)
    return CacheState(folder, "used" if any(held.stored for held in process.decisions.values()) else "unused")


def _module(process: Process, name: str) -> ModuleState:
    module = sys.modules.get(name)
    if module is None:
        return ModuleState(name, "not-loaded")
    file = str(getattr(module, "__file__", ""))
    if process.is_ours(module):
        content = getattr(getattr(module.__spec__, "loader", None), "copy", None)
        digest = hashlib.sha256(content.text).hexdigest() if content else ""
        known = vars(module)
        return ModuleState(name, "patched", tuple(known.get(FIXES, ())), file, str(known.get(ORIGIN, "")), digest)
    kinds = [refusal.kind for refusal in process.refusals if refusal.module == name]
    digest = ""
    with suppress(OSError), open(file, "rb") as text:
        digest = hashlib.sha256(text.read()).hexdigest()
    return ModuleState(name, kinds[-1] if kinds else "original", file=file, origin=file, sha256=digest)


def _fixes(process: Process, modules: dict[str, ModuleState]) -> list[FixState]:
    if not process.decisions:
        named = process.asked if config.ALL not in process.asked else tuple(process.tables.touches)
        return [
            FixState(fix, "waiting" if fix in named else "not-asked", "megatron.core is not imported yet", touches)
            for fix, touches in process.tables.touches.items()
        ]
    held = process.decisions[next(reversed(process.decisions))]
    by_path = {path: modules[name] for name, path in process.tables.paths.items()}
    states = []
    for fix in held.decision.fixes:
        into = [by_path[path] for path, fixes in held.decision.files.items() if fix.fix in fixes]
        wrong = [module for module in into if module.state not in ("patched", "not-loaded")]
        waiting = [module for module in into if module.state == "not-loaded"]
        if fix.state != "in-force":
            states.append(fix)
        elif wrong:
            reason = "; ".join(f"{module.module}: {module.state}" for module in wrong)
            states.append(replace(fix, state="refused", reason=reason))
        elif waiting:
            reason = f"not imported yet: {', '.join(module.module for module in waiting)}"
            states.append(replace(fix, state="waiting", reason=reason))
        else:
            states.append(fix)
    return states
