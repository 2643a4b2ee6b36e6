# SPDX-License-Identifier: Apache-2.0
"""Loads a patched copy so that whatever looks at the module sees the text that runs.

``__file__``, ``__spec__.origin`` and ``co_filename`` name the copy, ``__megatron_fixes_origin__`` the original and
``__megatron_fixes__`` the fixes. In the cache the copy is a file; without a cache the name is the original's with the
fixes behind it (``…/param_and_grad_buffer.py+MF0001``), no such file exists, and ``linecache`` holds the lines.

Where another finder's loader is a kind of ``SourceFileLoader`` that transforms source (typeguard, jaxtyping), ours is
a kind of that: its transformation is kept, and its bytecode is not cached. Resources beside the module
(``pkgutil.get_data``) are read beside the original.
"""

from __future__ import annotations

import linecache
import marshal
import os
import sys
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER, source_hash

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, ModuleType
    from typing import Any

    from megatron_fixes.overlay.store import Store

ORIGIN = "__megatron_fixes_origin__"
FIXES = "__megatron_fixes__"


@dataclass(frozen=True)
class Copy:
    """A patched module.

    Attributes:
        path: What it is called: a file in the cache, or a name that no file has.
        text: The patched bytes.
        origin: The original file.
        fixes: What was put in, in order.
        entry: Where bytecode may be kept: the store, the entry's key and the text's name in it; None for memory.
    """

    path: str
    text: bytes
    origin: str
    fixes: tuple[str, ...]
    entry: tuple[Store, str, str] | None


class OverlayLoader(SourceFileLoader):
    """Executes a ``Copy``; made by ``stand_in``."""

    copy: Copy

    def exec_module(self, module: ModuleType) -> None:
        """Execute the patched text in the module."""
        vars(module)[ORIGIN] = self.copy.origin
        vars(module)[FIXES] = self.copy.fixes
        if self.copy.entry is None:
            text = self.copy.text.decode("utf-8", "replace")
            linecache.cache[self.copy.path] = (len(self.copy.text), None, text.splitlines(True), self.copy.path)
        super().exec_module(module)

    def get_data(self, path: str) -> bytes:
        """The patched text for the copy's own name; files beside the original for any other name beside the copy."""
        if path == self.copy.path:
            return self.copy.text
        here = os.path.dirname(self.copy.path)
        if os.path.dirname(path).startswith(here):
            path = os.path.join(os.path.dirname(self.copy.origin), os.path.relpath(path, here))
        return super().get_data(path)

    def get_code(self, fullname: str) -> CodeType:
        """The module's code, from the cache if it is there."""
        if self.copy.entry is None or _transforms(self):
            return self.source_to_code(self.copy.text, self.copy.path)
        store, key, name = self.copy.entry
        optimized = f".opt-{sys.flags.optimize}" if sys.flags.optimize else ""
        cached = f"{name}.{sys.implementation.cache_tag}{optimized}.code"
        head = MAGIC_NUMBER + source_hash(self.copy.text)
        content = store.read_code(key, cached)
        if content is not None and content.startswith(head):
            try:
                code: Any = marshal.loads(memoryview(content)[len(head) :])
            except (EOFError, ValueError, TypeError):
                code = None
            if getattr(code, "co_filename", None) == self.copy.path:
                found: CodeType = code
                return found
        fresh = self.source_to_code(self.copy.text, self.copy.path)
        if not sys.dont_write_bytecode:
            store.write_code(key, cached, head + marshal.dumps(fresh))
        return fresh


def stand_in(original: SourceFileLoader, copy: Copy) -> OverlayLoader:
    """A loader of the original's kind, with all that it knows, for the patched copy."""
    kind = type(original)
    loader = OverlayLoader(original.name, copy.path)
    if kind is not SourceFileLoader:
        loader.__class__ = type(OverlayLoader.__name__, (OverlayLoader, kind), {"__module__": __name__})
    vars(loader).update({**vars(original), "path": copy.path, "copy": copy})
    return loader


def oddity(loader: object) -> str:
    """Why a loader can't be stood in for; empty if it loads a source file as Python does, or only transforms it."""
    kind = type(loader)
    if not isinstance(loader, SourceFileLoader):
        return f"it is loaded by {kind.__module__}.{kind.__qualname__}, not from a source file"
    own = [
        name for name in ("get_code", "get_data") if getattr(kind, name, None) is not getattr(SourceFileLoader, name)
    ]
    if own:
        return f"its loader {kind.__module__}.{kind.__qualname__} has its own {' and '.join(own)}"
    return ""


def _transforms(loader: SourceFileLoader) -> bool:
    return getattr(type(loader), "source_to_code", None) is not SourceFileLoader.source_to_code
