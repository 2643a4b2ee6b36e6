# SPDX-License-Identifier: Apache-2.0
"""``AllReduceContext``: owns the asynchronous collectives of one group from issue to end.

Rules:

* A group that is gone is an error at the call (``GroupDestroyedError``), never a crash later.
* Tensors of collectives under way are kept alive, whatever becomes of the context.
* Leaving the block by an exception drains what is under way within a deadline, or else aborts the group, so that the
  next step starts clean or is told at once that it can't.
* The destructor touches no process group: what it finds under way it tells as an event, with the place of issue.

Order: collectives wait for the stream that is current at the call (and run behind ``stream`` if one is given); after
``wait`` the then current stream is ordered after them. The host blocks in ``wait`` on the CPU, and on CUDA only if
there is a deadline.

Not handled: use by several threads at once; collectives that others issue on the group; and ranks that are in different
steps: where one left a step before it issued anything, its next collective pairs with its peers' of that step.
"""

from __future__ import annotations

import atexit
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from megatron_fixes.collectives import connecting, registry, requests, signatures
from megatron_fixes.collectives.arrivals import missing_ranks
from megatron_fixes.collectives.errors import (
    ClosedContextError,
    CollectiveFailedError,
    CollectiveTimeoutError,
    TensorModifiedError,
)
from megatron_fixes.collectives.operation import Operation
from megatron_fixes.collectives.streams import StreamOrder
from megatron_fixes.collectives.waiting import DeadlinePassed, require_time, wait_for
from megatron_fixes.errors import MegatronFixesError, UsageError
from megatron_fixes.events import Event, emit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import FrameType, TracebackType

    import torch
    from typing_extensions import Self

    from megatron_fixes.collectives.lifecycle import State

# How long close() waits for what is under way if the context has no deadline of its own.
DRAIN_S = 30.0
# The same at the exit of the interpreter, where bare gloo blocks until the group's own timeout.
EXIT_S = 5.0
# What a back end says of a collective that it can't do, whatever its peers do; gloo says it in the wait.
REFUSALS = ("invalid scalar type", "unsupported", "not supported", "cannot use")


class Handle:
    """What a call gives back: the operation, and the context that it keeps alive.

    Attributes:
        operation: What was issued.
    """

    __slots__ = ("_context", "operation")

    def __init__(self, context: AllReduceContext, operation: Operation) -> None:
        # The operation itself knows no context: in a cycle, a dropped context would be noticed late.
        self._context, self.operation = context, operation

    @property
    def state(self) -> State:
        """See ``lifecycle``."""
        return self.operation.state

    def wait(self) -> None:
        """Wait for this one; see ``AllReduceContext.wait``. Nothing happens if it has ended."""
        self._context._wait((self.operation,), self._context._deadline_s)


class AllReduceContext:
    """Owns asynchronous collectives of one process group.

    Args:
        group: A process group of torch.distributed; the default one if None. Held weakly.
        stream: CUDA stream to issue from, as by ``StreamOrder``: it waits for the stream that is current at each call,
            and if another one waits, the allocator is told. None: the current one.
        deadline_s: From each ``wait`` on, in seconds; also bounds ``close``. None: as torch does, that is the group's
            own timeout, and on CUDA ``wait`` does not block the host.
        checked: Compare with all ranks before each collective, and watch for writes to what it reads while it is under
            way. For tests and for finding a fault: it costs a round trip through the store each time. The same on all
            ranks.
        meet_first: Wait at the store, within the deadline, until all ranks come to the group's first collective. None:
            if there is a deadline and the back end would block the host there (NCCL that is not connected yet). The
            same on all ranks, as is whether there is a deadline.

    Raises:
        GroupDestroyedError: The group is gone.
        UsageError: An argument is none of these.
    """

    def __init__(
        self,
        group: Any = None,
        *,
        stream: Any = None,
        deadline_s: float | None = None,
        checked: bool = False,
        meet_first: bool | None = None,
    ) -> None:
        self._operations: list[Operation] = []
        self._closed = True  # until it is made, for the destructor
        if deadline_s is not None:
            require_time("deadline_s", deadline_s)
        if stream is not None and not hasattr(stream, "wait_stream"):
            raise UsageError(f"got stream={stream!r}, expected a stream of torch.cuda, or None")
        self._record = registry.record_of(group)
        self._order, self._deadline_s = StreamOrder(stream), deadline_s
        self._checked, self._meet_first = checked, meet_first
        self._record.contexts.add(self)
        self._closed = False

    @property
    def outstanding(self) -> tuple[Operation, ...]:
        """What was issued and has not been waited for, in order."""
        return tuple(self._operations)

    @property
    def closed(self) -> bool:
        """Whether it can't issue any more."""
        return self._closed

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Handle:
        """Reduce a tensor in place over all ranks.

        Args:
            tensor: Contiguous, any shape, a dtype that the back end takes; read and written until ``wait``, kept alive
                till then.
            op: Of ``torch.distributed.ReduceOp``.

        Raises:
            GroupDestroyedError, ClosedContextError, UsageError: Nothing was issued.
            CollectiveMismatchError: In checked mode; nothing was issued.
            CollectiveTimeoutError: In checked mode, and by ``meet_first``; nothing was issued.
        """
        return self._issue((requests.Request("all_reduce", (tensor,), op),), sys._getframe(1))

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> Handle:
        """Reduce ``tensor`` over all ranks, each keeping its part in ``output``.

        Args:
            output: ``[n, …]``, written.
            tensor: ``[n × world, …]``, read; same dtype and device; both kept alive until ``wait``.
            op: Of ``torch.distributed.ReduceOp``.

        Raises: see ``all_reduce``.
        """
        return self._issue((requests.Request("reduce_scatter", (output, tensor), op),), sys._getframe(1))

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Handle:
        """Gather the ``tensor`` of every rank into ``output``.

        Args:
            output: ``[n × world, …]``, written.
            tensor: ``[n, …]``, read; same dtype and device; both kept alive until ``wait``.

        Raises: see ``all_reduce``.
        """
        return self._issue((requests.Request("all_gather", (output, tensor), None),), sys._getframe(1))

    @contextmanager
    def coalesced(self) -> Iterator[requests.Run]:
        """Collect collectives of one kind; they go out as one run when the block ends, none of them if it raises.

        Raises: see ``all_reduce``, and ``UsageError`` for a run of several kinds, when the block ends; after it, the
            run takes no more.
        """
        run, frame = requests.Run(), sys._getframe(2)  # past contextlib's own frame
        self._require()
        try:
            yield run
        finally:
            run.ended = True
        if run.requests:
            self._issue(run.requests, frame)

    def wait(self) -> None:
        """Wait for all that was issued, in order.

        Raises:
            CollectiveTimeoutError: The deadline has passed. What was not complete is still under way and outstanding.
            CollectiveFailedError: The back end ended one with an error; those after it are outstanding.
            TensorModifiedError: In checked mode; that one is done, those after it are outstanding.
        """
        self._wait(tuple(self._operations), self._deadline_s)

    def wait_for(self, operation: Operation) -> None:
        """Wait for one of those that are outstanding; nothing happens if it has ended."""
        self._wait((operation,), self._deadline_s)

    def close(self) -> None:
        """Drain what is under way, or abort the group if that can't be done in time. A second call does nothing.

        Raises:
            CollectiveTimeoutError: Something was stuck; the group was aborted and must be made anew.
            CollectiveFailedError: The back end had ended one with an error.
        """
        self._close(self._deadline_s or DRAIN_S)

    def _close(self, within_s: float | None) -> None:
        if self._closed:
            return
        self._closed = True
        self._record.contexts.discard(self)
        first: MegatronFixesError | None = None
        end = None if within_s is None else time.monotonic() + within_s
        for operation in tuple(self._operations):
            try:
                self._wait((operation,), None if end is None else max(end - time.monotonic(), 0.001))
            except CollectiveTimeoutError as error:
                self._abort()
                error.hint = "The group was given up: make it anew on all its ranks."
                raise error from None
            except MegatronFixesError as error:
                first = first or error
        if first is not None:
            raise first

    def __enter__(self) -> Self:
        self._require()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            # One deadline for all: close() waits, and tells what is stuck.
            self._close(self._deadline_s)
            return
        try:
            self.close()
        except MegatronFixesError as second:
            # The exception that is under way is the cause; this one is its consequence.
            emit(Event("collective-not-drained", str(second), {"group": self._record.name}))

    def __del__(self) -> None:
        # No process group is touched here: it may be gone, or be going.
        if self._closed or not self._operations or registry.forked_since(self._record.forks) or sys.is_finalizing():
            return
        for operation in self._operations:
            fields = {"group": self._record.name, "place": operation.place, "sequence": operation.sequence}
            message = f"{operation} of group {self._record.name}, issued at {operation.place}, was never waited for"
            operation.to("dropped")
            emit(Event("collective-dropped", message, fields))
        self._operations.clear()

    def _require(self) -> Any:
        if self._closed:
            raise ClosedContextError(
                f"got a collective for a closed context of process group {self._record.name}, expected an open one",
                hint="Make a context for each step, or close it after the last.",
            )
        return self._record.require("a collective")

    def _issue(self, asked: Sequence[requests.Request], frame: FrameType) -> Handle:
        record = self._record
        group = None if self._closed else record.group()
        if group is None:
            group = self._require()
        requests.check(asked, len(record.ranks))
        if record.adrift:
            record.sweep()
        if self._checked or not record.count:
            self._meet(group, asked, f"{frame.f_code.co_filename}:{frame.f_lineno}")
        communication = None
        if self._order.stream is None:
            works = requests.issue(asked, group)
        else:
            tensors = [tensor for request in asked for tensor in request.tensors]
            with self._order.communication(*tensors) as communication:
                works = requests.issue(asked, group)
        operation = Operation(asked, works, record, frame, communication=communication, checked=self._checked)
        record.count += 1
        self._operations.append(operation)
        return Handle(self, operation)

    def _meet(self, group: Any, asked: Sequence[requests.Request], place: str) -> None:
        """Wait for the other ranks at the store, where they compare or where the group's first collective needs it."""
        record, what = self._record, requests.describe(asked)
        if self._checked:
            signatures.compare(record, what, place, self._deadline_s or signatures.COMPARE_S)
            return
        meets = self._meet_first
        if meets is None:
            meets = self._deadline_s is not None and connecting.blocks_to_connect(group, asked[0].tensors[0])
        if meets:
            connecting.meet_before(record, what, place, self._deadline_s or connecting.MEET_S)

    def _wait(self, operations: Sequence[Operation], within_s: float | None) -> None:
        deadline = None if within_s is None else time.monotonic() + within_s
        for operation in operations:
            if operation.state != "issued":
                continue
            if self._record.group() is None and operation.under_way:
                self._leave(operation, "aborted")
                self._record.require(f"waiting for collective {operation.sequence}")
            operation.to("waiting")
            try:
                if deadline is None:
                    for work in operation.works:
                        work.wait()
                else:
                    wait_for(operation.works, deadline, on_device=operation.on_device)
            except DeadlinePassed:
                operation.to("issued")
                raise self._late(operation, within_s) from None
            except RuntimeError as error:
                failure = self._failed(operation, error)
                self._leave(operation, "failed")
                self._record.require(f"waiting for collective {operation.sequence}")
                raise failure from error
            except BaseException:
                # Ctrl-C: it is under way, and close() is to drain it.
                operation.to("issued")
                raise
            if operation.communication is not None:
                operation.communication.consume()
            modified = self._checked and operation.modified
            told = str(operation) if modified else ""
            self._leave(operation, "done")
            if modified:
                self._refuse_modified(told, operation.place)

    def _refuse_modified(self, told: str, place: str) -> NoReturn:
        raise TensorModifiedError(
            f"got a tensor that was written to before wait(), expected none: {told} issued at {place}",
            context=f"rank {self._record.rank}",
            hint="Wait before you write to a tensor of a collective.",
        )

    def _leave(self, operation: Operation, state: Any) -> None:
        operation.to(state)
        self._operations.remove(operation)

    def _abort(self) -> None:
        self._record.abort()
        for operation in tuple(self._operations):
            self._leave(operation, "aborted")

    def _late(self, operation: Operation, within_s: float | None) -> CollectiveTimeoutError:
        record = self._record
        missing = missing_ranks(record, operation.sequence)
        who = "the store can't tell" if missing is None else f"ranks {list(missing)}" if missing else "none"
        return CollectiveTimeoutError(
            f"got no end of {operation} on process group {record.name} of ranks {list(record.ranks)} within "
            f"{within_s:.3g} s; not known to have issued it: {who}",
            missing=missing,
            context=f"rank {record.rank}, {operation.place}",
            hint="Look at where the missing ranks are; close() drains it or aborts the group.",
        )

    def _failed(self, operation: Operation, error: RuntimeError) -> CollectiveFailedError:
        record = self._record
        if any(word in str(error).lower() for word in REFUSALS):
            hint = "Give the back end a type and an operation that it takes; make the group anew if ranks differed."
        else:
            hint = "A peer may be gone; make the group anew on the ranks that are left."
        return CollectiveFailedError(
            f"got an error for {operation} on process group {record.name} of ranks {list(record.ranks)}: {error}",
            context=f"rank {record.rank}, {operation.place}",
            hint=hint,
        )


def _at_exit() -> None:
    """Leave nothing under way that would block the end of the process, or crash it."""
    for record in registry.records():
        if registry.forked_since(record.forks):
            continue
        for context in list(record.contexts):
            if isinstance(context, AllReduceContext) and context.outstanding:
                places = ", ".join(operation.place for operation in context.outstanding)
                message = f"the process ends with collectives of group {record.name} under way, issued at {places}"
                emit(Event("collectives-left-at-exit", message, {"group": record.name}))
                try:
                    context._close(min(context._deadline_s or EXIT_S, EXIT_S))
                except MegatronFixesError as error:
                    emit(Event("collective-not-drained", str(error), {"group": record.name}))


atexit.register(_at_exit)
