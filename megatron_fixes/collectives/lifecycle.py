# SPDX-License-Identifier: Apache-2.0
"""The life of one asynchronous collective, as states and the moves between them. Pure: no torch, no clock.

::

    issued ──► waiting ──► done
      │ ▲        │ ├─────► failed     the back end ended it with an error
      │ └────────┘ │                  its deadline passed: it is still under way
      ├────────────┴─────► aborted    its group was given up
      └──────────────────► dropped    nobody holds it any more

What no arrow leaves is an end. Not handled: what a state means for memory (``operation``).
"""

from __future__ import annotations

from typing import Literal

from megatron_fixes.errors import MegatronFixesError

State = Literal["issued", "waiting", "done", "failed", "aborted", "dropped"]

MOVES: dict[State, frozenset[State]] = {
    "issued": frozenset({"waiting", "aborted", "dropped"}),
    "waiting": frozenset({"issued", "done", "failed", "aborted"}),
    "done": frozenset(),
    "failed": frozenset(),
    "aborted": frozenset(),
    "dropped": frozenset(),
}
ENDS: frozenset[State] = frozenset(state for state, moves in MOVES.items() if not moves)


class IllegalMoveError(MegatronFixesError):
    """A collective was moved to a state that its state does not lead to: a bug of ours."""


def move(state: State, to: State) -> State:
    """The state after a move.

    Raises:
        IllegalMoveError: The move is none of ``MOVES``; nothing has changed.
    """
    if to not in MOVES[state]:
        expected = ", ".join(sorted(MOVES[state])) or "no move, it has ended"
        raise IllegalMoveError(f"got the move {state} -> {to}, expected {expected}")
    return to
