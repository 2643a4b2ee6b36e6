# SPDX-License-Identifier: Apache-2.0
"""Writes changed files into a target, takes them back, and mends what a kill left half done.

Order of an apply: lock -> check all files -> store old and new bytes -> journal with the pending transaction -> stage
every file and the settled journal -> rename file by file, then the journal -> unlock. A revert is the same with old and
new swapped, and ends by removing the journal. So, killed anywhere:

- each file holds its old or its new bytes;
- the journal tells which transaction was running, and the next command here undoes an apply or completes a revert.

A file that holds neither is never overwritten: the request is refused, the file named, and nothing is changed. All that
needs space is done before the first file is replaced, so a full disk changes none. If replacing fails half-way (no
permission, a file that another process changed), the files already replaced get their bytes back before the error is
raised.

Not handled: several files changing as one atom for a reader that runs meanwhile; creating and deleting files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from megatron_fixes.errors import RefusedError
from megatron_fixes.patching.journal import (
    AppliedFix,
    FileRecord,
    Journal,
    Pending,
    Settled,
    Step,
    after_apply,
    temporary_name,
)
from megatron_fixes.patching.outcome import Committed, EditedError, FileState, Recovery, Reverted, State, Status
from megatron_fixes.patching.relative import escape_reason
from megatron_fixes.patching.replace import (
    put_in_place,
    read_file,
    real_file,
    remove_leftover,
    require_writable,
    stage_file,
)
from megatron_fixes.patching.shell import quote
from megatron_fixes.patching.store import Store, digest
from megatron_fixes.patching.target import Target, journal_dir


def commit(
    target: Target, changes: Mapping[str, tuple[bytes, bytes]], fixes: Iterable[AppliedFix], *, release: str | None
) -> Committed:
    """Write changed files and remember their old bytes.

    An interrupted transaction is mended first.

    Args:
        target: Where to write.
        changes: Bytes before and after, by path below the target's root.
        fixes: The fixes that the changes bring.
        release: The target's release, for the journal.

    Returns:
        What was done. Nothing is written, and no journal made, if no file changes.

    Raises:
        RefusedError: A file is read-only, is missing or no longer has its bytes "before", another process is at
            work, or the journal can't be trusted. Every file is as it was.
    """
    changes = {path: pair for path, pair in changes.items() if pair[0] != pair[1]}
    files = _writable_files(target, changes)
    if not changes:
        return Committed((), ())
    store = Store(journal_dir(target))
    with store.locked():
        recovered = _recover(target, store)
        settled = (store.read() or Journal()).settled
        for path, (before, _) in changes.items():
            if read_file(files[path]) != before:
                raise _changed_meanwhile(path)
        store.begin()
        try:
            digests = {path: (store.add(before), store.add(after)) for path, (before, after) in changes.items()}
            untouched = {record.path: _digest_now(target, record.path) for record in settled.files}
            settles_to, notes = after_apply(settled, digests, fixes, release, untouched)
            _run(target, store, settled, Pending("apply", _steps(digests), settles_to))
        except BaseException:
            _drop_unused(store)
            raise
    return Committed(tuple(changes), tuple(fix.id for fix in settles_to.fixes), notes, recovered)


def revert(target: Target) -> Reverted:
    """Bring back the bytes that the target's files had before the first apply, and remove the journal.

    An interrupted transaction is mended first.

    Raises:
        EditedError: A file was edited since, or is missing. Every file is as it was.
        RefusedError: A file is read-only, stored bytes are missing or damaged, another process is at work, or the
            journal can't be trusted. Every file is as it was.
    """
    store = Store(journal_dir(target))
    if not store.exists():
        return Reverted()
    with store.locked():
        recovered = _recover(target, store)
        journal = store.read()
        if journal is None:
            done = recovered if recovered is not None and recovered.action == "revert" else None
            return Reverted(done.files if done else (), done.fixes if done else (), recovered)
        settled = journal.settled
        steps = _revert_steps(target, store, settled)
        _run(target, store, settled, Pending("revert", steps, Settled()))
    ids = tuple(fix.id for fix in settled.fixes)
    if not steps:
        return Reverted(recovered=recovered, edited=settled.edited, forgotten=ids)
    return Reverted(tuple(step.path for step in steps), ids, recovered, settled.edited)


def settle(target: Target) -> Reverted:
    """Remove the journal and change no other file: the fixes were taken out by other means, which the caller has seen.

    Raises:
        RefusedError: A transaction was interrupted, a file is as an apply left it, another process is at work, or the
            journal can't be trusted. Nothing was changed.
    """
    store = Store(journal_dir(target))
    if not store.exists():
        return Reverted()
    with store.locked():
        journal = store.read()
        if journal is None:
            return Reverted()
        intact = [r.path for r in journal.settled.files if _digest_now(target, r.path) == r.current]
        if journal.pending is not None or intact:
            message = "got fixes that are still in the tree, or half in it, expected them to be out"
            raise RefusedError(message, context=", ".join(intact) or str(store.journal_file), hint="Use revert.")
        store.forget()
    ids = tuple(fix.id for fix in journal.settled.fixes)
    return Reverted(edited=journal.settled.edited, forgotten=ids)


def recover(target: Target) -> Recovery | None:
    """Mend an interrupted transaction: undo an apply, complete a revert.

    Returns:
        What was mended, or None if nothing was interrupted.

    Raises:
        RefusedError: A file holds neither its old nor its new bytes or is read-only, stored bytes are missing or
            damaged, another process is at work, or the journal can't be trusted. Nothing was changed.
    """
    store = Store(journal_dir(target))
    if not store.exists():
        return None
    journal = store.read()
    if journal is not None and journal.pending is None:
        return None
    with store.locked():
        return _recover(target, store)


def read_state(target: Target) -> State | None:
    """Tell what the journal says and what its files hold now; only reads.

    Returns:
        The state, or None if there is no journal.

    Raises:
        RefusedError: The journal can't be trusted, or a file can't be read.
    """
    store = Store(journal_dir(target))
    journal = store.read()
    if journal is None:
        return None
    records: dict[str, list[FileRecord]] = {}
    for record in (*journal.settled.files, *(journal.pending.settles_to.files if journal.pending else ())):
        records.setdefault(record.path, []).append(record)
    files = tuple(FileState(path, _status(target, path, records[path])) for path in sorted(records))
    interrupted = journal.pending.action if journal.pending else None
    return State(store.directory, journal.settled.release, journal.settled.fixes, files, interrupted)


def _status(target: Target, path: str, records: Sequence[FileRecord]) -> Status:
    now = _digest_now(target, path)
    if now is None:
        return "missing"
    if any(now == record.current for record in records):
        return "patched"
    return "original" if any(now == record.original for record in records) else "edited"


def _digest_now(target: Target, path: str) -> str | None:
    content = read_file(real_file(target.root, path))
    return None if content is None else digest(content)


def _writable_files(target: Target, paths: Iterable[str]) -> dict[str, Path]:
    """Return the real file of each path; refuse what can't be replaced."""
    files: dict[str, Path] = {}
    for path in paths:
        if reason := escape_reason(path):
            raise RefusedError(f"got a path that can't be used: {reason}", context=path)
        file = real_file(target.root, path)
        if file in files.values():
            raise RefusedError("got two paths of one file (a link), expected one path a file", context=path)
        require_writable(file)
        files[path] = file
    return files


def _steps(digests: Mapping[str, tuple[str, str]]) -> tuple[Step, ...]:
    return tuple(Step(path, before, after, temporary_name(path)) for path, (before, after) in digests.items())


def _revert_steps(target: Target, store: Store, settled: Settled) -> tuple[Step, ...]:
    """Return the files that are not original; refuse if any is neither patched nor original."""
    edited: dict[str, str] = {}
    digests: dict[str, tuple[str, str]] = {}
    for record in settled.files:
        now = _digest_now(target, record.path)
        if now not in (record.current, record.original):
            original, file = store.path_of(record.original), real_file(target.root, record.path)
            edited[record.path] = f"cp {quote(original)} {quote(file)}"
        elif now != record.original:
            digests[record.path] = (now, record.original)
    if edited:
        ids = tuple(fix.id for fix in settled.fixes)
        raise EditedError(ids, edited, store.directory, some_intact=bool(digests))
    return _steps(digests)


def _changed_meanwhile(path: str) -> RefusedError:
    return RefusedError(
        "got other bytes than a moment ago, expected an unchanged file",
        context=path,
        hint="Another megatron-fixes or an editor may be writing; repeat the command when nothing else writes there.",
    )


def _run(target: Target, store: Store, settled: Settled, pending: Pending) -> None:
    """Journal the transaction, stage and replace the files, settle; on failure give the files their bytes back."""
    steps = pending.steps
    _writable_files(target, (step.path for step in steps))
    contents = {name: store.get(name) for step in steps for name in (step.before, step.after)}
    at = ""
    try:
        store.write(Journal(settled=settled, pending=pending))
        for step in steps:
            at = step.path
            file, temporary = _files(target, step)
            stage_file(file, contents[step.after], temporary)
        store.prepare(Journal(settled=pending.settles_to))
        for step in steps:
            at = step.path
            _put_in_place(target, step, contents[step.before])
        store.publish()
    except BaseException as error:
        try:
            _put_back(target, steps, contents)
        except (OSError, RefusedError) as second:
            message = f"got '{error}' and then '{second}' while undoing: some files hold their new bytes"
            hint = "free the disk or make the files writable, then repeat: the journal knows what to mend"
            raise RefusedError(message, context=at, hint=hint) from error
        with contextlib.suppress(OSError, RefusedError):  # else the next command finds nothing to undo and settles
            _settle(store, settled)
        if isinstance(error, OSError):
            message = f"got '{error.strerror or error}' while writing; every file is as it was"
            raise RefusedError(message, context=at, hint="See to the cause, then repeat.") from error
        raise
    _drop_unused(store)


def _drop_unused(store: Store) -> None:
    """Remove stored bytes that the journal does not name."""
    with contextlib.suppress(RefusedError):
        if (journal := store.read()) is not None:
            store.drop_unused(journal)


def _files(target: Target, step: Step) -> tuple[Path, Path]:
    """Return a step's real file and its temporary."""
    file = real_file(target.root, step.path)
    return file, file.with_name(step.temporary)


def _put_in_place(target: Target, step: Step, before: bytes) -> None:
    file, temporary = _files(target, step)
    if read_file(file) != before:
        raise _changed_meanwhile(step.path)
    put_in_place(file, temporary)


def _replace(target: Target, step: Step, content: bytes) -> None:
    file, temporary = _files(target, step)
    stage_file(file, content, temporary)
    put_in_place(file, temporary)


def _put_back(target: Target, steps: Sequence[Step], contents: Mapping[str, bytes]) -> None:
    """Undo the steps of this process; a file that it has not reached yet is left alone."""
    for step in steps:  # first, since they take space
        with contextlib.suppress(OSError):
            remove_leftover(_files(target, step)[1])
    for step in steps:
        if read_file(_files(target, step)[0]) == contents[step.after]:
            _replace(target, step, contents[step.before])


def _settle(store: Store, settled: Settled) -> None:
    """Write a journal without a pending transaction; without files there is none to write."""
    journal = Journal(settled=settled)
    if settled.files:
        store.write(journal)
        store.drop_unused(journal)
    else:
        store.forget()


def _recover(target: Target, store: Store) -> Recovery | None:
    """Mend, with the lock held."""
    journal = store.read()
    if journal is None or journal.pending is None:
        return None
    pending = journal.pending
    undo = pending.action == "apply"
    todo: list[tuple[Step, bytes]] = []
    foreign: list[str] = []
    for step in pending.steps:
        goal = step.before if undo else step.after
        now = _digest_now(target, step.path)
        if now not in (step.before, step.after):
            foreign.append(step.path)
        elif now != goal:
            todo.append((step, store.get(goal)))
    if foreign:
        raise RefusedError(
            f"got other bytes than an interrupted {pending.action} read or wrote in {', '.join(foreign)}",
            context=str(store.journal_file),
            hint=f"put one of the two versions kept in {store.path_of('')} into each of these files, then repeat",
        )
    _writable_files(target, (step.path for step, _ in todo))
    at = ""
    try:
        for step in pending.steps:  # first, since they take space
            at = step.path
            remove_leftover(_files(target, step)[1])
        for step, content in todo:
            at = step.path
            _replace(target, step, content)
    except OSError as error:
        message = f"got '{error.strerror or error}' while mending an interrupted {pending.action}"
        raise RefusedError(message, context=at, hint="See to the cause, then repeat.") from error
    _settle(store, journal.settled if undo else pending.settles_to)
    known = {fix.id for fix in journal.settled.fixes}
    fixes = [fix.id for fix in pending.settles_to.fixes if fix.id not in known] if undo else sorted(known)
    return Recovery(pending.action, tuple(step.path for step in pending.steps), tuple(fixes))
