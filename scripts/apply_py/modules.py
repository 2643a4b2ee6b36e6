# SPDX-License-Identifier: Apache-2.0
"""First part of apply.py: imports the modules whose text stands in this file, and nothing else of their names.

The finder goes before all others, so an installed megatron-fixes, packaging or unidiff is never mixed in. Commands that
a hint names are those of this file; of those that only the package has, it says so.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import linecache
import re
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType

SOURCES: dict[str, str] = {}
COMMAND = re.compile(r"megatron-fixes (scan|apply|revert)\b")
OTHERS = re.compile(r"(`?megatron-fixes (?:list|explain|prove|run|doctor|verify)\b)")
PROGRAM = "python3 apply.py"


class Bundle(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds and loads what is in ``SOURCES``."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Answer for our names; a name below one of our packages that is not in here does not exist."""
        if fullname in SOURCES:
            spec = importlib.machinery.ModuleSpec(fullname, self, origin=__file__, is_package=self.is_package(fullname))
            spec.has_location = True  # so that a module has a __file__: this one
            return spec
        if fullname.partition(".")[0] in SOURCES:
            raise ModuleNotFoundError(f"{fullname} is not part of apply.py", name=fullname)
        return None

    def is_package(self, fullname: str) -> bool:
        """Whether other modules are below a name."""
        return any(name.startswith(f"{fullname}.") for name in SOURCES)

    def get_source(self, fullname: str) -> str:
        """The text that runs: as it stands here, but for the name of the program."""
        return OTHERS.sub(r"an installed \1", COMMAND.sub(rf"{PROGRAM} \1", SOURCES[fullname]))

    def get_code(self, fullname: str) -> CodeType:
        """Compile a module, so that a traceback shows its lines."""
        source, name = self.get_source(fullname), f"{__file__}:{fullname}"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        return compile(source, name, "exec", dont_inherit=True)


sys.meta_path.insert(0, Bundle())
