# SPDX-License-Identifier: Apache-2.0
"""Where the overlay would come from in this interpreter: facts for whoever asks why it is on or off.

Reads the import path and the site directories; imports nothing of Megatron. Not handled: another interpreter's.
"""

from __future__ import annotations

import os
import site
import sys
from dataclasses import asdict, dataclass

from megatron_fixes import __version__, config
from megatron_fixes.errors import UsageError
from megatron_fixes.overlay import start
from megatron_fixes.overlay.process import finders_before

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

PTH = "megatron-fixes.pth"


@dataclass(frozen=True)
class Facts:
    """See the module's docstring.

    Attributes:
        package: The folder of this package.
        pth_found: Every ``megatron-fixes.pth`` in a site directory of this interpreter.
        pth_runs: Whether Python runs it here: one was found and ``-S`` was not given.
        pth_problem: Why it does not, and what to do; empty if it does.
        installed: Whether the finder is in this process, and ``installed_by`` who put it there.
        finders_before: Finders that Python asks before ours; all where ours is absent.
        trees: Folders on the import path that hold ``megatron/core``; the first is the one that is imported.
        settings: Name, value and source of each setting.
        setting_problems: What is wrong with settings, a sentence each that names the variable.
    """

    version: str
    package: str
    pth_found: tuple[str, ...]
    pth_runs: bool
    pth_problem: str
    installed: bool
    installed_by: str
    finders_before: tuple[str, ...]
    trees: tuple[str, ...]
    settings: tuple[dict[str, str], ...]
    setting_problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As values that ``json`` writes."""
        return asdict(self)


def where_from() -> Facts:
    """See ``megatron_fixes.overlay.where_from``."""
    found = tuple(path for folder in _site_folders() if os.path.isfile(path := os.path.join(folder, PTH)))
    problem = ""
    if sys.flags.no_site:
        problem = "python -S reads no .pth files: import megatron_fixes.auto first"
    elif not found:
        problem = (
            "no megatron-fixes.pth in a site directory (an editable install and pip --target have none): "
            "import megatron_fixes.auto first, or install the wheel"
        )
    settings, setting_problems = _settings()
    return Facts(
        version=__version__,
        package=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        pth_found=found,
        pth_runs=not problem,
        pth_problem=problem,
        installed=start.is_installed(),
        installed_by=start.installed_by,
        finders_before=tuple(finders_before(start.FINDER)),
        trees=tuple(folder for folder in dict.fromkeys(map(os.path.abspath, sys.path)) if _holds_core(folder)),
        settings=settings,
        setting_problems=setting_problems,
    )


def _settings() -> tuple[tuple[dict[str, str], ...], tuple[str, ...]]:
    """Every setting, as it was written where it can't be read, and what is wrong with any."""
    plain = config.overlay_settings().all()
    shown = [_setting(setting) for setting in plain]
    judged: list[config.Setting[Any]] = [*plain, config.switch(config.TRACEBACK, os.environ)]
    problems = [f"{setting.name}: {setting.problem}" for setting in judged if setting.problem]
    for name, near in config.unknown_variables(os.environ).items():
        problems.append(f"{name}: nothing reads a variable of that name; did you mean {near}?")
    for name in (config.GUARDS, config.DEADLINE, config.ABORT):
        # One by one, so that each wrong one is told.
        text = os.environ.get(name, "")
        try:
            guards = config.guard_settings(environ={name: text}).all()
        except UsageError as error:
            shown.append({"name": name, "value": text, "source": error.context})
            problems.append(f"{name}: {error.message}; no guard would be installed")
        else:
            shown += [_setting(setting) for setting in guards if setting.name == name]
    return tuple(shown), tuple(problems)


def _site_folders() -> tuple[str, ...]:
    folders = list(site.getsitepackages())
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    return tuple(dict.fromkeys(os.path.abspath(folder) for folder in folders))


def _holds_core(folder: str) -> bool:
    return os.path.isfile(os.path.join(folder, "megatron", "core", "__init__.py"))


def _setting(setting: config.Setting[Any]) -> dict[str, str]:
    value = setting.value
    text = ",".join(value) if isinstance(value, tuple) else str(int(value)) if isinstance(value, bool) else str(value)
    if value is None:
        text = ""
    return {"name": setting.name, "value": text, "source": setting.source}
