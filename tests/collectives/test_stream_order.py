# SPDX-License-Identifier: Apache-2.0
"""The history of streams: what is ordered, what races, and what may be freed, on the smallest programs."""

from __future__ import annotations

import itertools
import random

import pytest

from megatron_fixes.collectives.stream_order import Access, StreamHistory, Verb

A, B, C = "a", "b", "c"


class Program(StreamHistory):
    """A history in short: one storage unless another is named."""

    def does(self, stream: str, verb: Verb, start: int = 0, end: int = 8, storage: str = "x") -> None:
        self.access(storage, Access(stream, self.begin(stream), f"{stream} {verb}", verb, start, end))


@pytest.fixture
def program() -> Program:
    return Program()


@pytest.mark.parametrize(("first", "second"), list(itertools.product(("reads", "writes"), repeat=2)))
def test_unordered_accesses_race_unless_both_read(program: Program, first: Verb, second: Verb) -> None:
    program.does(A, first)
    program.does(B, second)
    assert len(program.races) == ((first, second) != ("reads", "reads"))


@pytest.mark.parametrize(("start", "end", "races"), [(8, 16, 0), (7, 9, 1), (0, 1, 1), (8, 8, 0)])
def test_only_common_bytes_race(program: Program, start: int, end: int, races: int) -> None:
    program.does(A, "writes")
    program.does(B, "writes", start, end)
    assert len(program.races) == races


def test_another_storage_is_other_memory(program: Program) -> None:
    program.does(A, "writes")
    program.does(B, "writes", storage="y")
    assert not program.races


def test_one_stream_is_in_order(program: Program) -> None:
    program.does(A, "writes")
    program.does(A, "writes")
    assert not program.races


def test_a_wait_orders_what_came_before_it_and_nothing_else(program: Program) -> None:
    program.does(A, "writes")
    program.stream_waits_stream(B, A)
    program.does(B, "writes")
    assert not program.races
    program.does(A, "reads")
    assert [str(race) for race in program.races] == ["b writes writes on b, a reads reads on a, same bytes, unordered"]


def test_waits_chain(program: Program) -> None:
    program.does(A, "writes")
    program.stream_waits_stream(B, A)
    program.stream_waits_stream(C, B)
    program.does(C, "writes")
    assert not program.races


def test_an_event_stands_for_its_last_record_alone(program: Program) -> None:
    program.event_recorded("e", A)
    program.does(A, "writes")
    program.stream_waits_event(B, "e")
    program.does(B, "reads")
    assert len(program.races) == 1
    program.event_recorded("e", A)
    program.stream_waits_event(C, "e")
    program.does(C, "reads")
    assert len(program.races) == 1


def test_an_event_that_was_not_recorded_or_is_gone_orders_nothing(program: Program) -> None:
    program.stream_waits_event(B, "never")
    program.does(A, "writes")
    program.event_recorded("e", A)
    program.event_gone("e")
    program.stream_waits_event(B, "e")
    program.does(B, "reads")
    assert len(program.races) == 1


@pytest.mark.parametrize("wait", ["stream", "event", "all"])
def test_what_the_host_has_waited_for_comes_before_all_that_it_issues(program: Program, wait: str) -> None:
    program.does(A, "writes")
    program.event_recorded("e", A)
    if wait == "stream":
        program.host_waits_stream(A)
    elif wait == "event":
        program.host_waits_event("e")
    else:
        program.host_waits_all()
    program.does(B, "writes")
    assert not program.races


def test_a_free_races_with_a_use_elsewhere_that_the_owner_has_not_waited_for(program: Program) -> None:
    program.allocated("x", A)
    program.does(B, "reads")
    program.freed("x", "file:1")
    (race,) = program.races
    assert (race.later.verb, race.later.stream, race.later.place) == ("frees", A, "file:1")
    assert "b reads reads on b, the allocator frees on a at file:1" in str(race)


@pytest.mark.parametrize("how", ["owner waits", "owner's use", "recorded", "host waits", "owner unknown"])
def test_a_free_in_order_is_none(program: Program, how: str) -> None:
    if how != "owner unknown":
        program.allocated("x", A)
    program.does(A if how == "owner's use" else B, "writes")
    if how == "owner waits":
        program.stream_waits_stream(A, B)
    elif how == "recorded":
        program.recorded("x", B)
    elif how == "host waits":
        program.host_waits_stream(B)
    program.freed("x")
    assert not program.races


def test_recording_one_stream_excuses_no_other(program: Program) -> None:
    program.allocated("x", A)
    program.does(B, "reads")
    program.does(C, "reads")
    program.recorded("x", B)
    program.freed("x")
    assert [race.earlier.stream for race in program.races] == [C]


def test_a_stream_that_was_recorded_covers_what_it_has_waited_for(program: Program) -> None:
    program.allocated("x", A)
    program.does(B, "writes")
    program.stream_waits_stream(C, B)
    program.does(C, "reads")
    program.recorded("x", C)
    program.freed("x")
    assert not program.races


def test_memory_that_comes_again_under_the_same_name_is_new(program: Program) -> None:
    program.allocated("x", A)
    program.does(A, "writes")
    program.freed("x")
    program.allocated("x", B)
    program.does(B, "writes")
    program.freed("x")
    program.does(C, "writes")
    program.forget(["x"])
    program.does(A, "writes")
    assert not program.races


def test_names_of_streams_are_told(program: Program) -> None:
    program.names[A] = "default stream"
    program.does(A, "writes")
    program.does(B, "writes")
    assert "on default stream, " in str(program.races[0])


class Unforgetting(Program):
    """Keeps every access: what forgetting must not change."""

    def access(self, storage: object, access: Access) -> None:
        super().access(storage, access)
        memory = self._memory[storage]
        self.all = [*getattr(self, "all", []), access]
        memory.accesses[:] = self.all


@pytest.mark.parametrize("seed", range(200))
def test_what_is_forgotten_hides_no_racing_program(seed: int) -> None:
    """Random programs: one that keeps everything finds a race at the same step first, a free included."""
    choose = random.Random(seed)
    programs = Program(), Unforgetting()
    for program in programs:
        program.allocated("x", A)
    for _ in range(12):
        first, second, third = choose.choice("abc"), choose.choice("abc"), choose.random()
        start = choose.randrange(4)
        for program in programs:
            if third < 0.5:
                program.stream_waits_stream(first, second)
            else:
                program.does(first, "writes" if third < 0.7 else "reads", start, 4 + start)
        assert bool(programs[0].races) == bool(programs[1].races)
        if programs[0].races:
            return
    for program in programs:
        program.freed("x")
    assert bool(programs[0].races) == bool(programs[1].races)
