# SPDX-License-Identifier: Apache-2.0
"""Decides while ``megatron.core`` itself is imported, where no import lock is held that another thread may need.

Python holds its global import lock while it asks finders. A finder that imports then waits for modules which other
threads are importing, and they wait for that lock: the job hangs for ever. A loader is called outside that lock. So
the loader of ``megatron.core`` is preceded by this one, which imports all that deciding needs and decides; what
finders are asked for later is answered from memory.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


class PrecededLoader:
    """Calls ``prepare`` once, before the real loader; is that loader in all else, and leaves its place to it.

    Where another hook has wrapped this loader in its own, that one stays in place.
    """

    def __init__(self, loader: Any, prepare: Callable[[], None]) -> None:
        self._loader = loader
        self._prepare = prepare

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Prepare, step aside, and let the real loader make the module."""
        self._prepare()
        if spec.loader is self:  # type: ignore[comparison-overlap]
            spec.loader = self._loader
        create = getattr(self._loader, "create_module", None)
        module: ModuleType | None = create(spec) if create else None
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run the module by the real loader."""
        self._loader.exec_module(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
