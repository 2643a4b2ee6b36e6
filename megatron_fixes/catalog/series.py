# SPDX-License-Identifier: Apache-2.0
"""The patches of one line in the order they are listed, and which sets of them may stand together.

A patch is made on the pristine release plus its ``Requires``. A set of fixes is *closed* when it holds what
each member requires; only closed sets are ever applied. Loading is strict: a series with any fault is not used
at all.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING

from megatron_fixes.catalog.header import TERMINATOR, PatchHeader, parse_header
from megatron_fixes.errors import DataError
from megatron_fixes.regular import read_regular

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path


@dataclass(frozen=True)
class PatchFile:
    """One patch of one line. ``name`` is its path below ``patches/``; ``text`` the whole file."""

    name: str
    path: Path
    text: str
    sha256: str
    header: PatchHeader

    @property
    def fix_id(self) -> str:
        """The fix this patch delivers."""
        return self.header.fix_id

    @property
    def gated(self) -> bool:
        """Whether it changes training in a debatable way, so that only its name puts it in."""
        return self.header.numerics == "gated"

    @property
    def body_sha256(self) -> str:
        """Hash of the diff without the head: the same as long as the same is applied."""
        return hashlib.sha256(self.text.split(f"\n{TERMINATOR}\n", 1)[1].encode()).hexdigest()


@dataclass(frozen=True)
class Series:
    """The patches of one line, in series order."""

    line: str
    patches: tuple[PatchFile, ...]

    def ids(self) -> tuple[str, ...]:
        """Fix ids in series order."""
        return tuple(patch.fix_id for patch in self.patches)

    def get(self, fix_id: str) -> PatchFile | None:
        """The patch of a fix, or None if this line has none."""
        return next((patch for patch in self.patches if patch.fix_id == fix_id), None)

    def closure(self, fix_ids: Iterable[str]) -> tuple[PatchFile, ...]:
        """The named fixes and all that they require, in series order; names without a patch are left out."""
        wanted = set(fix_ids)
        for patch in reversed(self.patches):
            if patch.fix_id in wanted:
                wanted.update(patch.header.requires)
        return tuple(patch for patch in self.patches if patch.fix_id in wanted)

    def closed_subsets(self) -> Iterator[tuple[PatchFile, ...]]:
        """Every set of fixes that holds what its members require, the empty one first."""
        for size in range(len(self.patches) + 1):
            for chosen in combinations(self.patches, size):
                ids = {patch.fix_id for patch in chosen}
                if all(ids.issuperset(patch.header.requires) for patch in chosen):
                    yield chosen


def listed(series_file: Path) -> list[tuple[int, str]]:
    """The names a series file lists, with their lines; blank lines and what stands behind ``#`` are passed over."""
    lines = enumerate(series_file.read_text("utf-8").split("\n"), start=1)
    return [(number, name) for number, line in lines if (name := line.partition("#")[0].strip())]


def load_series(root: Path, line: str) -> Series:
    """Load the patches of a line.

    Args:
        root: The ``patches/`` folder.
        line: Such as ``core_v0.16``; a line without a folder has an empty series.

    Raises:
        DataError: A listed patch is missing, not text, or its head has a fault.
    """
    folder = root / line
    if not folder.is_dir():
        return Series(line, ())
    patches = []
    if not (folder / "series").is_file():
        raise DataError("no series file in the folder of a line", context=str(folder), hint="Reinstall megatron-fixes.")
    for number, name in listed(folder / "series"):
        path = folder / name
        try:
            content = read_regular(path)
            text = content.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(
                f"can't read the patch {name}: {error}",
                context=f"{folder / 'series'}:{number}",
                hint="Reinstall megatron-fixes, or run its lint.",
            ) from error
        header, faults = parse_header(text, str(path))
        if header is None:
            raise DataError(
                faults[0].message,
                context=f"{path}:{faults[0].line}",
                hint="Run `python -m megatron_fixes.patching.lint`.",
            )
        patches.append(PatchFile(f"{line}/{name}", path, text, hashlib.sha256(content).hexdigest(), header))
    return Series(line, tuple(patches))
