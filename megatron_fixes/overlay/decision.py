# SPDX-License-Identifier: Apache-2.0
"""What was decided for one Megatron tree, as data that the cache keeps and ``status()`` shows.

A fix's state is one of:

* ``in-force``: the modules it touches are loaded patched;
* ``applied``, ``fixed-upstream``, ``not-affected``: the tree needs nothing, as ``scan`` says;
* ``gated``, ``not-asked``: needed, but not asked for (a gated fix is asked for by name only);
* ``refused``: asked for and can't be in force; a ``Refusal`` says why.

A refusal's kind is one of ``drifted``, ``no-patch``, ``does-not-fit``, ``unknown-release``, ``unknown-id`` (what was
decided from the files), ``too-early``, ``bypassed``, ``odd-loader``, ``two-places`` (what was seen of the process),
``machine`` (fixes go in, and training can't work here), ``cache-not-ours`` and ``bug``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace

SCHEMA = 1
NOT_NEEDED = ("fixed-upstream", "not-affected")

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Refusal:
    """One reason why something that was asked for is not in force: what, and what to do, in one line each."""

    kind: str
    message: str
    hint: str
    fix: str = ""
    module: str = ""

    @property
    def line(self) -> str:
        """The whole of it in one line."""
        return f"{self.message}; {self.hint}".replace("\n", " ")


@dataclass(frozen=True)
class FixState:
    """What became of one fix; ``touches`` names its files below the root."""

    fix: str
    state: str
    reason: str
    touches: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """What goes into one tree.

    Attributes:
        release: What the tree calls itself, or None.
        release_source: What said so.
        fixes: Every known fix.
        files: Path below the root to the fixes that are put into that file, in the order they were applied.
        refusals: What was asked for and can't be had.
    """

    release: str | None
    release_source: str
    fixes: tuple[FixState, ...]
    files: dict[str, tuple[str, ...]]
    refusals: tuple[Refusal, ...]

    def in_force(self) -> tuple[str, ...]:
        """Fixes that are put in."""
        return tuple(fix.fix for fix in self.fixes if fix.state == "in-force")

    def without(self, refusal: Refusal) -> Decision:
        """The same tree with nothing put in, for one reason that holds for all of it."""
        fixes = tuple(
            replace(fix, state="refused", reason=refusal.message) if fix.state == "in-force" else fix
            for fix in self.fixes
        )
        return replace(self, fixes=fixes, files={}, refusals=(*self.refusals, refusal))

    def to_json(self) -> bytes:
        """As the cache keeps it."""
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1).encode()

    @staticmethod
    def from_json(content: bytes) -> Decision:
        """Read what ``to_json`` wrote.

        Raises:
            ValueError, TypeError, KeyError: It is something else.
        """
        data = json.loads(content)
        if data.pop("schema") != SCHEMA:
            raise ValueError("another schema")
        return Decision(
            release=data["release"],
            release_source=data["release_source"],
            fixes=tuple(FixState(**{**fix, "touches": tuple(fix["touches"])}) for fix in data["fixes"]),
            files={path: tuple(fixes) for path, fixes in data["files"].items()},
            refusals=tuple(Refusal(**refusal) for refusal in data["refusals"]),
        )


def told(in_force: Sequence[str], in_files: Sequence[str]) -> str:
    """Which fixes a process runs with: those that the overlay put in, and those that its files hold already."""
    if not in_files:
        return f"{', '.join(in_force) or 'no fix'} in force"
    put_in = f"{', '.join(in_force)} in force" if in_force else "no fix put in at import"
    return f"{put_in}, {', '.join(in_files)} in the files already"
