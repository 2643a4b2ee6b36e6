# SPDX-License-Identifier: Apache-2.0
"""What is known of each process group: whether it lives, which contexts use it, how many collectives it has seen.

A group is held weakly, so that nothing here keeps a destroyed group (and its threads) alive or ends it from a
destructor. It lives while c10d lists it, it was not aborted through us, and this process is the one that made it: a
fork inherits the handles of communicators that belong to its parent. It also keeps what is under way there for good:
CUDA does not work in it, and torch's allocator, which asks CUDA for an event as such a tensor is freed, would abort it.

Not handled: a group whose back end was shut down behind c10d's back; using it fails as the back end likes. At the exit
of the interpreter (``threads``), an abort in a function of ``atexit`` has no bound but the back end's since Python
3.12; in a destructor the group is only kept, on any Python, and ends with the process.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from megatron_fixes.collectives import threads
from megatron_fixes.collectives.errors import GroupDestroyedError
from megatron_fixes.errors import UsageError

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Sequence

# NCCL took 0.5 s where it did not wait for a peer (two H200).
ABORT_S = 2.0
_forks = 0
# What c10d listed at a fork: the parent's, whether a context has used it or not.
_inherited: weakref.WeakSet[Any] = weakref.WeakSet()


def _forked() -> None:
    global _forks  # noqa: PLW0603 - the one fact that a fork changes
    _forks += 1
    _inherited.update(list(c10d._world.pg_map))
    for record in records():
        held = [one.held() for context in record.contexts for one in context.outstanding]
        keep_for_good((held, record.adrift))


os.register_at_fork(after_in_child=_forked)


def keep_for_good(what: object) -> None:
    """Keep an object, and what it holds, until the process has ended: no destructor runs."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


def forked_since(forks: int) -> bool:
    """Whether this process is a fork of the one that counted ``forks``."""
    return forks != _forks


class UnderWay(Protocol):
    """What was issued and may be under way: an operation."""

    def held(self) -> object:
        """What must not be freed meanwhile."""


class Owner(Protocol):
    """What uses a group and can be told to let go of it: a context."""

    @property
    def outstanding(self) -> Sequence[UnderWay]:
        """What was issued and has not been waited for."""

    def close(self) -> None:
        """Drain what is under way."""


class Adrift(NamedTuple):
    """A collective that nobody holds any more and that may be under way.

    Attributes:
        works: Those of torch, which are asked whether it has ended.
        requests: What keeps its tensors.
        name: Which it is, and where it was issued.
    """

    works: list[Any]
    requests: Any
    name: str


class GroupRecord:
    """One process group, as long as anybody asks for it.

    Attributes:
        name: c10d's name of it.
        ranks: Global ranks, in the order of the group's own ranks.
        rank: Global rank of this process.
        count: Collectives issued on it through contexts; the next one's sequence number.
        compared: Comparisons in checked mode.
        meetings: Before its first collective; more than one if the ranks did not all come.
        contexts: Those that use it, unless collected.
        aborted: It was aborted through us.
        adrift: What collectives that nobody holds any more may still read and write, with their works.
    """

    __slots__ = (
        "__weakref__",
        "_abort",
        "_life",
        "_listing",
        "_mark",
        "_ref",
        "aborted",
        "adrift",
        "compared",
        "contexts",
        "count",
        "forks",
        "meetings",
        "name",
        "rank",
        "ranks",
    )

    def __init__(self, group: Any) -> None:
        self._ref = weakref.ref(group)
        self._listing: Any = c10d._world.pg_map
        self.name: str = group.group_name
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(group))
        self.rank: int = dist.get_rank()
        self.count = self.compared = self.meetings = 0
        self.contexts: weakref.WeakSet[Owner] = weakref.WeakSet()
        self.aborted = False
        self._abort: threading.Thread | None = None
        self.adrift: list[Adrift] = []
        self.forks = _forks - (group in _inherited)
        self._mark, self._life = secrets.token_hex(8), -1

    def group(self) -> Any:
        """The process group, or None if it is gone."""
        group = self._ref()
        if group is None or self.aborted or self.forks != _forks or group not in self._listing:
            return None
        return group

    def listed(self) -> Any:
        """The process group if c10d lists it, though it may have been aborted; else None."""
        if self.forks != _forks:
            return None
        group = self._ref()
        return group if group is not None and group in self._listing else None

    def require(self, purpose: str) -> Any:
        """The process group.

        Raises:
            GroupDestroyedError: It is gone; the message says how.
        """
        if (group := self.group()) is not None:
            return group
        if self.forks != _forks:
            how, hint = "it belongs to the process that this one was forked from", "Make groups after the fork."
        elif self.aborted:
            how = "it was aborted, since a collective on it got stuck or ranks did not come to destroy it"
            hint = "Make the group anew on all its ranks."
        else:
            how, hint = "it was destroyed", "Close what uses a group before it is destroyed, or make it anew."
        raise GroupDestroyedError(
            f"got process group {self.name} of ranks {list(self.ranks)} for {purpose}, but {how}",
            context=f"rank {self.rank}",
            hint=hint,
        )

    def store(self, *, apart: bool = False) -> Any:
        """The store of its ranks, with keys of this group and of no earlier one of the same name.

        Not held here: a server that outlives its group would answer the next one. Asks the store, so ask for it only in
        ``store_thread.ask``.

        Args:
            apart: Over a connection of its own; the other one may be blocked in a wait.

        Raises:
            RuntimeError: The group was destroyed, or the store did not answer.
        """
        if (group := self.listed()) is None:
            raise RuntimeError(f"process group {self.name} is gone")
        store = self._listing[group][1]
        if apart:
            with suppress(AttributeError, RuntimeError):  # older torch, and stores that have no second connection
                store = store.clone()
        store = dist.PrefixStore("megatron_fixes/collectives", store)
        if self._life < 0:
            self._life = _enter_life(store, self.rank, self._mark)
        return dist.PrefixStore(str(self._life), store)

    def sweep(self) -> int:
        """Let go of what has become complete; how many are still under way."""
        if not self.aborting():
            self.adrift = [one for one in self.adrift if not all(work.is_completed() for work in one.works)]
        return len(self.adrift)

    def abort(self) -> None:
        """Give the group up: with NCCL, what is under way on it ends. Never raises, and blocks for 2 s at most.

        NCCL asks all ranks of a group to abort it, and one that does so alone may wait for the others of its node
        without an end, after it has told what is under way to end. So a thread does it.

        gloo's abort does nothing (torch 2.13): its threads work on until the group's own timeout, and whoever frees the
        last reference waits for them. So a reference is kept for good: no destructor and no exit blocks for that.
        Source: ncclCommAbort in NCCL's guide; https://github.com/NVIDIA/nccl/issues/1777; the same remedy in
        https://github.com/vllm-project/vllm/pull/39846.
        """
        group, self.aborted = self.group(), True
        if group is None:
            return
        keep_for_good(group)

        def give_up() -> None:
            with suppress(RuntimeError):
                group.abort()

        if threads.interpreter_ends():
            return
        self._abort = threads.start(give_up, "megatron-fixes-abort")
        if self._abort is None:
            give_up()
            return
        self.aborting(ABORT_S)

    def aborting(self, within_s: float = 0.0) -> bool:
        """Whether an abort is not done yet; then no work of the group may be asked.

        torch asks a work under a lock that its abort holds, and keeps Python's own lock meanwhile: all threads stop.
        Source: ``NCCLComm::isAborted``, and ``is_completed`` in c10d's init.cpp.

        Args:
            within_s: Wait for it that long.
        """
        thread = self._abort
        if thread is None:
            return False
        thread.join(within_s)
        return thread.is_alive()


def _enter_life(store: Any, rank: int, mark: str) -> int:
    """Which of the groups that had this name in this store is the present one, counted by those that asked the store.

    A rank that finds that it was in the life that the store names, under another mark, begins the next one, unless a
    peer has; so all ranks that asked in one life have left it when they ask in the next. Asking again changes nothing.

    Args:
        store: Of all groups of this name.
        rank: Global rank of this process.
        mark: Tells this rank's group from its earlier ones.
    """
    life = int(store.compare_set("life", "", "0"))
    while store.compare_set(f"life/{life}/{rank}", "", mark).decode() != mark:
        life = int(store.compare_set("life", str(life), str(life + 1)))
    return life


_records: weakref.WeakKeyDictionary[Any, GroupRecord] = weakref.WeakKeyDictionary()


def record_of(group: Any = None, *, to_destroy: bool = False) -> GroupRecord:
    """The record of a process group; of the default group if None.

    Args:
        group: The process group.
        to_destroy: Also of one that was aborted through us, which c10d lists until it is destroyed.

    Raises:
        GroupDestroyedError: There is no default group, or c10d does not list this one, or it is of before a fork.
        UsageError: It is no process group.
    """
    if group is None:
        if not dist.is_initialized():
            raise GroupDestroyedError(
                "got no process group, and there is no default one", hint="Call init_process_group first."
            )
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(
            f"got {group!r}, expected a process group that this rank is in",
            hint="new_group gives a rank that is not in the group no group: make contexts on its ranks only.",
        )
    record = _records.get(group)
    if record is None:
        if group not in c10d._world.pg_map:
            raise GroupDestroyedError(
                f"got process group {getattr(group, 'group_name', group)!r}, but it is gone or this rank is not in it",
                hint="Make the group anew, on all its ranks.",
            )
        record = _records[group] = GroupRecord(group)
    if not to_destroy or record.listed() is None:
        record.require("groups.destroy" if to_destroy else "a context")
    return record


def adrift() -> tuple[str, ...]:
    """Which collectives that nobody holds are still under way, on all groups: group, operation, place of issue."""
    return tuple(f"group {record.name}, {one.name}" for record in records() if record.sweep() for one in record.adrift)


def records() -> Iterator[GroupRecord]:
    """The records of all groups that contexts have used and that are still there."""
    yield from list(_records.values())
