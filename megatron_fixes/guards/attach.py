# SPDX-License-Identifier: Apache-2.0
"""Puts wrappers on attach points and takes them off: all of them or none, and the very same objects come back.

A class's attribute is taken from its ``__dict__`` as it is, so that what is put back is what was there. Where
somebody else has replaced or wrapped our wrapper since, theirs is left in place, and ours inside it only passes on.

Not handled: names that other modules imported from these before; the attach points are looked up at each call.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import wrapt

from megatron_fixes.errors import RefusedError
from megatron_fixes.events import Event, emit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from megatron_fixes.guards.points import AttachPoint

    Wrapper = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Place:
    """A function where it lives: the object that holds it, and its name there."""

    holder: Any
    name: str

    def get(self) -> Any:
        """The attribute as it is, not bound to anything; None where there is none."""
        return vars(self.holder).get(self.name)

    def __str__(self) -> str:
        return f"{getattr(self.holder, '__qualname__', self.holder.__name__)}.{self.name}"


class Switch:
    """Whether a wrapper acts; wrapt asks at each call."""

    __slots__ = ("on",)

    def __init__(self) -> None:
        self.on = True

    def __call__(self) -> bool:
        """Whether it does."""
        return self.on


@dataclass(frozen=True)
class Attached:
    """A wrapper in place.

    Attributes:
        guard: Whose.
        place: Where.
        original: What was there.
        wrapper: What is there now.
        switch: Of the wrapper.
    """

    guard: str
    place: Place
    original: Any
    wrapper: Any
    switch: Switch = field(default_factory=Switch)


def find(point: AttachPoint) -> Place | None:
    """Where a point's function lives in this process; None if this Megatron has none. Imports its module."""
    try:
        holder: Any = importlib.import_module(point.module)
    except ModuleNotFoundError as error:
        if error.name and point.module.startswith(error.name):
            return None
        raise
    *path, name = point.qualname.split(".")
    for part in path:
        holder = vars(holder).get(part)
        if holder is None:
            return None
    place = Place(holder, name)
    return None if place.get() is None else place


def attach(points: Iterable[AttachPoint], wrappers: Mapping[tuple[str, str], Wrapper]) -> list[Attached]:
    """Wrap all points that this Megatron has.

    Args:
        points: In the order in which they are wrapped: the last one on a function is asked first.
        wrappers: By guard and qualified name; called as wrapt calls them.

    Raises:
        RefusedError: A function has other parameters than any of its rows; nothing was wrapped.
    """
    rows: dict[tuple[str, str, str], list[AttachPoint]] = {}
    for point in points:
        rows.setdefault((point.guard, point.module, point.qualname), []).append(point)
    plan, refused = [], []
    for (guard, module, qualname), known in rows.items():
        place = find(known[0])
        if place is None:
            continue
        names = tuple(inspect.signature(place.get()).parameters)
        if any(point.fits(names) for point in known):
            plan.append((guard, qualname, place))
        else:
            expected = " or ".join(f"({', '.join(point.parameters)})" for point in known)
            refused.append(f"{module}.{qualname}({', '.join(names)}), expected {expected}")
    if refused:
        raise RefusedError(
            f"got {'; '.join(dict.fromkeys(refused))}: no guard was installed",
            hint="Leave out the guards that use it (MEGATRON_GUARDS), or report this Megatron to megatron-fixes.",
        )
    attached = []
    for guard, qualname, place in plan:
        original, switch = place.get(), Switch()
        wrapper = wrapt.FunctionWrapper(original, wrappers[guard, qualname], enabled=switch)
        setattr(place.holder, place.name, wrapper)
        attached.append(Attached(guard, place, original, wrapper, switch))
    return attached


def detach(attached: Iterable[Attached]) -> None:
    """Put back what was there, the last one first."""
    for one in reversed(list(attached)):
        one.switch.on = False
        if one.place.get() is one.wrapper:
            setattr(one.place.holder, one.place.name, one.original)
        else:
            message = f"{one.place} was wrapped by somebody else since; that stays, and the guard in it does nothing"
            emit(Event("guard-left-in-place", message, {"place": str(one.place), "guard": one.guard}))


def innermost(function: Callable[..., Any]) -> Any:
    """The function below all wrappers that say what they wrap."""
    return inspect.unwrap(getattr(function, "__func__", function))
