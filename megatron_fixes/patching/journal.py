# SPDX-License-Identifier: Apache-2.0
"""What was done to a target and what is being done: the journal's form and its rules, without any file access.

States: *settled* (fixes and files as of the last finished transaction) and, while one runs, *pending* beside it.

- A file's ``original`` is its content before the first apply, ``current`` its content after the last one; both
  are sha256 names of stored bytes.
- A pending ``apply`` is undone (every file back to ``before``), a pending ``revert`` is completed (``after``).
- Applying over a file that was edited since makes its present bytes the new original: they are what a revert
  brings back. Fixes that live in such a file are no longer ours to remove, and stay whole: their other files, and
  with them all fixes of those, are no longer ours to remove either. So no revert takes out half of a fix.
- After a change of release (``git checkout``, ``pip install``), what an earlier apply left in files that are no
  longer as it left them is forgotten.
- A journal of another schema, or one that breaks a rule, is refused and never guessed at.

Not handled: bytes and files themselves (``store``, ``replace``) and the order of steps (``transaction``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from megatron_fixes.errors import RefusedError
from megatron_fixes.patching.relative import escape_reason

SCHEMA = 1
Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]
Action = Literal["apply", "revert"]


class AppliedFix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fix that was applied.

    Attributes:
        id: Its number, as ``MF0001``.
        patch_sha256: Digest of the patch file's bytes.
        files: Paths that its patch edits; empty if the caller did not say.
    """

    id: str
    patch_sha256: Digest
    files: tuple[str, ...] = ()


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file's content before the first and after the last apply."""

    path: str
    original: Digest
    current: Digest


class Settled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The outcome of finished transactions.

    Attributes:
        release: Of the target at the last apply.
        fixes: That are ours to remove.
        files: That hold them.
        edited: Ids of fixes that an apply put in and that are no longer ours to remove: their files were edited, and
            applied to again, since.
    """

    release: str | None = None
    fixes: tuple[AppliedFix, ...] = ()
    files: tuple[FileRecord, ...] = ()
    edited: tuple[str, ...] = ()

    def file(self, path: str) -> FileRecord | None:
        """Return the record of a path."""
        return next((record for record in self.files if record.path == path), None)


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a running transaction, and the name of the temporary file beside it."""

    path: str
    before: Digest
    after: Digest
    temporary: str


class Pending(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A running transaction and what it settles to; a revert settles to nothing."""

    action: Action
    steps: tuple[Step, ...]
    settles_to: Settled


class Journal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole journal file."""

    schema: int = SCHEMA
    settled: Settled = Settled()
    pending: Pending | None = None

    def digests(self) -> set[str]:
        """Return the digests of all bytes that this journal may need."""
        records = [*self.settled.files, *(self.pending.settles_to.files if self.pending else ())]
        steps = self.pending.steps if self.pending else ()
        return {d for r in records for d in (r.original, r.current)} | {d for s in steps for d in (s.before, s.after)}


class _SchemaOnly(msgspec.Struct):
    schema: int


def encode(journal: Journal) -> bytes:
    """Return the journal file's bytes.

    Raises:
        ValueError: The journal breaks its own form, so that it could not be read back.
    """
    data = msgspec.json.format(msgspec.json.encode(journal), indent=2) + b"\n"
    msgspec.json.decode(data, type=Journal)  # structs are checked on decoding only
    return data


def decode(data: bytes, file: Path) -> Journal:
    """Read the journal file's bytes.

    Args:
        data: The bytes.
        file: Where they are from, for messages.

    Raises:
        RefusedError: They are not a journal of this schema that keeps the rules.
    """
    hint = f"look at {file}; move its directory away only if you restore the target's files by other means"
    try:
        schema = msgspec.json.decode(data, type=_SchemaOnly).schema
    except msgspec.DecodeError as error:
        raise RefusedError(f"got something else than a journal ({error})", context=str(file), hint=hint) from None
    if schema != SCHEMA:
        age, way = ("a newer", "Upgrade megatron-fixes, or revert") if schema > SCHEMA else ("an older", "Revert")
        message = f"got a journal of schema {schema}, expected {SCHEMA}: {age} version of megatron-fixes wrote it"
        hint = f"{way} with the version that wrote it, then apply with this one; nothing was changed."
        raise RefusedError(message, context=str(file), hint=hint)
    try:
        journal = msgspec.json.decode(data, type=Journal)
    except msgspec.DecodeError as error:
        raise RefusedError(f"got a journal that breaks its form ({error})", context=str(file), hint=hint) from None
    if reason := _broken_rule(journal):
        raise RefusedError(f"got a journal that breaks its rules: {reason}", context=str(file), hint=hint)
    return journal


def _broken_rule(journal: Journal) -> str:
    pending = journal.pending
    groups = [
        [record.path for record in journal.settled.files],
        [record.path for record in pending.settles_to.files] if pending else [],
        [step.path for step in pending.steps] if pending else [],
    ]
    for paths in groups:
        if len(set(paths)) != len(paths):
            return "a path is listed twice"
        for path in paths:
            if reason := escape_reason(path):
                return f"{path!r}: {reason}"
    for step in pending.steps if pending else ():
        if step.temporary != temporary_name(step.path):
            return f"{step.temporary!r} is not the temporary name of {step.path!r}"
    return ""


def temporary_name(path: str) -> str:
    """Return the name of the temporary file that is written beside a path."""
    return f".{path.rsplit('/', 1)[-1]}.megatron-fixes-new"


def after_apply(
    settled: Settled,
    changes: Mapping[str, tuple[str, str]],
    fixes: Iterable[AppliedFix],
    release: str | None,
    untouched: Mapping[str, str | None],
) -> tuple[Settled, tuple[str, ...]]:
    """Work out what an apply settles to.

    Args:
        settled: What is settled now.
        changes: Digest before and after, by path.
        fixes: The fixes that the changes bring.
        release: Release of the target as it is now.
        untouched: Digest now of the files that are settled and not among the changes; None if a file is gone.

    Returns:
        The new settled state, and notes for the user.
    """
    notes: list[str] = []
    moved_on = None not in (settled.release, release) and settled.release != release
    records: dict[str, FileRecord] = {}
    given_up: set[str] = set()  # no longer as an earlier apply left them, so nothing of it is ours to remove
    edited: set[str] = set()  # of these, the ones that may still hold a fix
    for record in settled.files:
        if record.path in changes:
            continue
        now = untouched.get(record.path)
        if now == record.original or (moved_on and now != record.current):
            given_up.add(record.path)
        else:
            records[record.path] = record
    for path, (before, after) in changes.items():
        known = settled.file(path)
        original = before
        if known is not None and before == known.current:
            original = known.original
        elif known is not None:
            given_up.add(path)
            if before != known.original and not moved_on:
                edited.add(path)
                notes.append(f"{path} was edited after an earlier apply; revert will bring back its bytes of now")
        if original != after:
            records[path] = FileRecord(path, original, after)
    for path in sorted(_bound_to(edited, settled) - given_up):
        if settled.file(path) is None:
            continue
        given_up.add(path)
        edited.add(path)
        notes.append(f"{path} shares a fix with an edited file; revert will bring back its bytes of now")
        del records[path]
        if path in changes:
            records[path] = FileRecord(path, *changes[path])
    if moved_on and given_up:
        notes.append(
            f"the tree was {settled.release} at an earlier apply and is {release}; revert knows the new bytes only"
        )
    kept = {f.id: f for f in settled.fixes if not _paths(f, settled) <= given_up and not _paths(f, settled) & edited}
    left = {*settled.edited, *(fix.id for fix in settled.fixes if fix.id not in kept and _paths(fix, settled) & edited)}
    kept.update((fix.id, fix) for fix in fixes)
    files = tuple(records[path] for path in sorted(records))
    fixes_now = tuple(kept[name] for name in sorted(kept))
    return Settled(release, fixes_now, files, tuple(sorted(left - kept.keys()))), tuple(notes)


def _bound_to(paths: set[str], settled: Settled) -> set[str]:
    """Return the paths, and those that share a fix with one of them, directly or through others."""
    found = set(paths)
    for _ in settled.fixes:
        found.update(*(_paths(fix, settled) for fix in settled.fixes if _paths(fix, settled) & found))
    return found


def _paths(fix: AppliedFix, settled: Settled) -> set[str]:
    return set(fix.files or (record.path for record in settled.files))
