# SPDX-License-Identifier: Apache-2.0
"""Loads a patched copy so that whatever looks at the module sees the text that runs.

``__file__``, ``__spec__.origin`` and ``co_filename`` name the copy, ``__megatron_fixes_origin__`` the original and
``__megatron_fixes__`` the fixes. In the cache the copy is a file; without a cache the name is the original's with the
fixes behind it (``…/param_and_grad_buffer.py+MF0001``), no such file exists, and ``linecache`` holds the lines.

Where another finder's loader only transforms source (typeguard, jaxtyping), its transformation is kept, and its
bytecode is not cached. Resources beside the module (``pkgutil.get_data``) are read beside the original.
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
    """Executes a ``Copy``; ``original`` is the loader that would have loaded the unpatched file."""

    def __init__(self, fullname: str, copy: Copy, original: SourceFileLoader) -> None:
        super().__init__(fullname, copy.path)
        self.copy = copy
        self._original = original

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

    def source_to_code(self, data: bytes, path: str, *, _optimize: int = -1) -> CodeType:  # type: ignore[override]
        """Compile, by the original loader's own means if it has any."""
        if transforms(self._original):
            code: CodeType = self._original.source_to_code(data, path)
            return code
        plain: CodeType = super().source_to_code(data, path, _optimize=_optimize)
        return plain

    def get_code(self, fullname: str) -> CodeType:
        """The module's code, from the cache if it is there."""
        if self.copy.entry is None or transforms(self._original):
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


def transforms(loader: SourceFileLoader) -> bool:
    """Whether a loader compiles source in its own way."""
    return getattr(type(loader), "source_to_code", None) is not SourceFileLoader.source_to_code


def oddity(loader: object) -> str:
    """Why a loader can't be stood in for; empty if it loads a source file as Python does, or only transforms it."""
    kind = type(loader)
    if not isinstance(loader, SourceFileLoader):
        return f"it is loaded by {kind.__module__}.{kind.__qualname__}, not from a source file"
    own = [name for name in ("get_code", "exec_module", "get_data") if _overrides(kind, name)]
    if own:
        return f"its loader {kind.__module__}.{kind.__qualname__} has its own {' and '.join(own)}"
    return ""


def _overrides(kind: type, name: str) -> bool:
    return getattr(kind, name, None) is not getattr(SourceFileLoader, name)
