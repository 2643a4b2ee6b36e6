# SPDX-License-Identifier: Apache-2.0
"""What a transaction came to, and what a journal says of a target, as values that commands print."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_fixes.errors import RefusedError
from megatron_fixes.patching.journal import Action, AppliedFix

Status = Literal["patched", "original", "edited", "missing"]


@dataclass(frozen=True)
class Recovery:
    """An interrupted transaction that was mended.

    Attributes:
        action: ``apply``: it was undone. ``revert``: it was completed.
        files: Paths of the transaction.
        fixes: Ids of the fixes that it would have added, or has removed.
    """

    action: Action
    files: tuple[str, ...]
    fixes: tuple[str, ...]


@dataclass(frozen=True)
class Committed:
    """Outcome of an apply.

    Attributes:
        files: Paths that were replaced; empty if there was nothing to change.
        fixes: Ids of all fixes that the journal now holds.
        notes: Sentences that the user should read.
        recovered: An interrupted transaction that was mended first.
    """

    files: tuple[str, ...]
    fixes: tuple[str, ...]
    notes: tuple[str, ...] = ()
    recovered: Recovery | None = None


@dataclass(frozen=True)
class Reverted:
    """Outcome of a revert; all empty if there was nothing to revert.

    Attributes:
        files: Paths that got their original bytes back.
        fixes: Ids of the fixes that were removed.
        recovered: An interrupted transaction that was mended first.
        edited: Ids of fixes that an earlier apply put into files which were edited, and applied to again, since: what
            came back are the bytes of the edit, with whatever of these fixes they hold, and such a fix's other files
            keep it.
        forgotten: Ids of fixes that were out already, by other means: only the journal was removed.
    """

    files: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()
    recovered: Recovery | None = None
    edited: tuple[str, ...] = ()
    forgotten: tuple[str, ...] = ()

    @property
    def nothing(self) -> bool:
        """Whether there was no journal of ours."""
        return not self.files and not self.fixes and not self.forgotten


class EditedError(RefusedError):
    """A revert would lose edits that were made after the apply; nothing was changed.

    Args:
        fixes: Ids of the fixes that the journal holds.
        edited: Path to the shell command that puts its bytes from before the fixes in place of the edits.
        journal: The journal's directory.
        some_intact: Whether another file is as the apply left it, so that the fixes are in it.
    """

    def __init__(self, fixes: tuple[str, ...], edited: Mapping[str, str], journal: Path, *, some_intact: bool) -> None:
        self.fixes = fixes
        self.give_up = " && ".join(edited.values())
        self.journal = journal
        self.some_intact = some_intact
        super().__init__(
            f"got files that were edited or removed after apply: {', '.join(edited)}; nothing was changed",
            hint=f"take the fixes out by hand and call `settle`, or give your edits up: {self.give_up}",
        )


@dataclass(frozen=True)
class FileState:
    """A file of the journal, and what it holds now."""

    path: str
    status: Status


@dataclass(frozen=True)
class State:
    """What the journal says of a target.

    Attributes:
        directory: The journal's directory.
        release: Release at the last apply.
        fixes: The fixes that were applied.
        files: The files that were changed.
        interrupted: The transaction that was killed (or still runs), if any; ``recover`` mends it.
    """

    directory: Path
    release: str | None
    fixes: tuple[AppliedFix, ...]
    files: tuple[FileState, ...]
    interrupted: Action | None
