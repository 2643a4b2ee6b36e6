# SPDX-License-Identifier: Apache-2.0
"""Attaching: all points or none, absent ones passed over, and the very same objects put back."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from megatron_fixes import events
from megatron_fixes.errors import RefusedError
from megatron_fixes.guards import attach
from megatron_fixes.guards.points import AttachPoint

MODULE = "stand_in_for_megatron"


def point(qualname: str, *parameters: str, guard: str = "g", module: str = MODULE) -> AttachPoint:
    return AttachPoint(guard, module, qualname, "0.12", "0.19", parameters)


def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    return ["wrapped", wrapped(*args, **kwargs)]


@pytest.fixture
def module() -> Iterator[Any]:
    made: Any = types.ModuleType(MODULE)
    source = """
class Group:
    def start(self, force=False): return self
    @staticmethod
    def plain(a): return a
def destroy(): return "destroyed"
"""
    exec(source, made.__dict__)
    sys.modules[MODULE] = made
    yield made
    del sys.modules[MODULE]


def test_wrapped_functions_are_called_through_and_put_back(module: Any) -> None:
    before = {**vars(module.Group)}, module.destroy
    points = [point("Group.start", "self", "force"), point("destroy"), point("Group.plain", "a")]
    wrappers = {("g", one.qualname): wrapper for one in points}
    attached = attach.attach(points, wrappers)
    group = module.Group()
    assert group.start(force=True) == ["wrapped", group]
    assert module.destroy() == ["wrapped", "destroyed"] and group.plain(2) == ["wrapped", 2]
    attach.detach(attached)
    assert {**vars(module.Group)} == before[0] and module.destroy is before[1]
    assert all(vars(module.Group)[name] is value for name, value in before[0].items())


@pytest.mark.parametrize(
    "absent",
    [
        point("Group.gone", "self"),
        point("Gone.start", "self"),
        point("x", module="no_such"),
        point("x", module=f"{MODULE}.y"),
    ],
)
def test_what_a_release_does_not_have_is_passed_over(absent: AttachPoint, module: Any) -> None:
    attached = attach.attach([absent, point("destroy")], {("g", "destroy"): wrapper})
    assert [str(one.place) for one in attached] == [f"{MODULE}.destroy"]
    attach.detach(attached)


def test_another_signature_is_refused_by_one_message_and_nothing_is_wrapped(module: Any) -> None:
    before = module.destroy
    points = [point("destroy"), point("Group.start", "self"), point("Group.start", "self", "forced")]
    with pytest.raises(RefusedError) as caught:
        attach.attach(points, {("g", one.qualname): wrapper for one in points})
    assert f"{MODULE}.Group.start(self, force), expected (self) or (self, forced)" in caught.value.message
    assert module.destroy is before


def test_a_start_of_a_signature_is_enough_where_the_row_says_so() -> None:
    open_ended = point("f", "self", "config", "...")
    assert open_ended.fits(("self", "config", "more")) and open_ended.fits(("self", "config"))
    assert not open_ended.fits(("self", "more", "config")) and not open_ended.fits(("self",))


def test_two_guards_on_one_function_come_off_in_any_state(module: Any) -> None:
    before = module.destroy
    points = [point("destroy", guard="a"), point("destroy", guard="b")]
    attached = attach.attach(points, {("a", "destroy"): wrapper, ("b", "destroy"): wrapper})
    assert module.destroy() == ["wrapped", ["wrapped", "destroyed"]]
    assert attach.innermost(module.destroy) is before
    attach.detach(attached)
    assert module.destroy is before


def test_what_somebody_else_wrapped_since_stays_and_ours_inside_only_passes_on(module: Any) -> None:
    heard: list[str] = []
    end = events.subscribe(lambda event: heard.append(event.name))
    attached = attach.attach([point("destroy")], {("g", "destroy"): wrapper})
    ours = module.destroy
    module.destroy = lambda: ["theirs", ours()]
    theirs = module.destroy
    attach.detach(attached)
    end()
    assert module.destroy is theirs and module.destroy() == ["theirs", "destroyed"]
    assert heard == ["guard-left-in-place"]
