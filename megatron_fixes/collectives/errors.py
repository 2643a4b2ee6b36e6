# SPDX-License-Identifier: Apache-2.0
"""How a collective can fail, as errors that say which one, on which group, and what is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_fixes.errors import MegatronFixesError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_fixes.collectives.stream_order import Race


class GroupDestroyedError(RefusedError):
    """The process group is gone (destroyed, aborted, or this process is a fork); nothing was issued."""


class ClosedContextError(RefusedError):
    """The context was closed; nothing was issued."""


class CollectiveMismatchError(RefusedError):
    """Ranks were about to issue collectives that do not belong together; no rank of them issued its own."""


class TensorModifiedError(RefusedError):
    """A tensor was written to while a collective used it; that has completed, and its result is not to be used."""


class CollectiveFailedError(MegatronFixesError):
    """The back end ended a collective with an error, often since a peer is gone; the group can't be relied on."""

    exit_code = 1


class CollectiveTimeoutError(CollectiveFailedError):
    """A collective was not complete at its deadline. It is still under way until it is drained or aborted.

    Attributes:
        missing: Global ranks that are not known to have issued it; None if the store could not tell.
    """

    def __init__(self, message: str, *, missing: Sequence[int] | None, context: str = "", hint: str = "") -> None:
        super().__init__(message, context=context, hint=hint)
        self.missing = None if missing is None else tuple(missing)


class TeardownError(MegatronFixesError):
    """Some groups could not be destroyed in good order; all others were.

    Attributes:
        errors: Group name to what went wrong.
    """

    exit_code = 1

    def __init__(self, errors: dict[str, str]) -> None:
        said = "; ".join(f"{name}: {text}" for name, text in errors.items())
        super().__init__(f"got errors in the teardown of {len(errors)} process groups, expected none: {said}")
        self.errors = errors


class StreamOrderError(MegatronFixesError):
    """Streams may read, write or free memory in an order that nobody asked for.

    Attributes:
        races: All pairs of accesses that nothing orders.
    """

    exit_code = 1

    def __init__(self, message: str, *, races: Sequence[Race], context: str = "", hint: str = "") -> None:
        super().__init__(message, context=context, hint=hint)
        self.races = tuple(races)
