# SPDX-License-Identifier: Apache-2.0
"""The states of a collective: each move that is allowed, and no other; every life ends."""

from __future__ import annotations

import itertools

import pytest

from megatron_fixes.collectives.lifecycle import ENDS, MOVES, IllegalMoveError, State, move

PAIRS = list(itertools.product(MOVES, MOVES))


@pytest.mark.parametrize(("state", "to"), [pair for pair in PAIRS if pair[1] in MOVES[pair[0]]])
def test_a_move_leads_where_it_says(state: State, to: State) -> None:
    assert move(state, to) == to


@pytest.mark.parametrize(("state", "to"), [pair for pair in PAIRS if pair[1] not in MOVES[pair[0]]])
def test_any_other_move_is_refused(state: State, to: State) -> None:
    with pytest.raises(IllegalMoveError, match=f"got the move {state} -> {to}"):
        move(state, to)


def test_ends_are_what_a_person_needs_to_tell_apart() -> None:
    assert {"done", "failed", "aborted", "dropped"} == ENDS


def test_every_state_can_end() -> None:
    for state in set(MOVES) - ENDS:
        assert MOVES[state] & ENDS
