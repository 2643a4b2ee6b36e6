# SPDX-License-Identifier: Apache-2.0
"""What a room learns, said once, to whoever listens: so that no room has to know the log, the exporter or each other.

``emit`` never raises for what a subscriber does and never blocks by itself: it is called from destructors and between
collectives. Every event also goes to the logger ``megatron_fixes``, so nothing is lost where nobody subscribes.
Not handled: delivery to other processes, and order between threads.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_log = logging.getLogger("megatron_fixes")
_subscribers: list[Callable[[Event], None]] = []


@dataclass(frozen=True)
class Event:
    """One thing that was learnt.

    Attributes:
        name: What kind of thing, with dashes: ``collective-dropped``.
        message: One sentence for a person.
        fields: The same as data; values are strings, numbers and tuples of them.
        level: Of ``logging``.
        time_s: Seconds since the epoch.
    """

    name: str
    message: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    level: int = logging.WARNING
    time_s: float = field(default_factory=time.time)


def subscribe(subscriber: Callable[[Event], None]) -> Callable[[], None]:
    """Have every later event passed to ``subscriber``; the function that comes back ends that, if called twice too."""
    _subscribers.append(subscriber)

    def unsubscribe() -> None:
        if subscriber in _subscribers:
            _subscribers.remove(subscriber)

    return unsubscribe


def emit(event: Event) -> None:
    """Tell all subscribers, and the log."""
    _log.log(event.level, "%s: %s", event.name, event.message)
    for subscriber in tuple(_subscribers):
        try:
            subscriber(event)
        except Exception:  # noqa: BLE001 - a listener's fault must not become that of the training step
            _log.exception("a subscriber failed on %s", event.name)
