# SPDX-License-Identifier: Apache-2.0
"""What a running proof says, line by line, and what is made of it: progress, a table, JSON, an exit code. Pure.

``python -m megatron_fixes.proofs`` prints one JSON object a line. A line that is none of the known events (a
library that prints to stdout) is passed over here; the caller keeps it for the case that the process dies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from megatron_fixes.errors import MegatronFixesError, RefusedError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

BACKENDS = ("gloo", "nccl")


class Fetch(msgspec.Struct, frozen=True, tag="fetch", tag_field="event"):
    """A release is about to be fetched; not said of one that is at hand."""

    release: str


class Fetched(msgspec.Struct, frozen=True, tag="fetched", tag_field="event"):
    """A release is at hand."""

    release: str


class Start(msgspec.Struct, frozen=True, tag="start", tag_field="event"):
    """A release is about to be imported in one variant; results of the fixes follow in this order."""

    release: str
    variant: str
    fixes: tuple[str, ...]


class Result(msgspec.Struct, frozen=True, tag="result", tag_field="event"):
    """One proof's outcome on one release and variant, and the one that the matrix leads one to expect."""

    release: str
    backend: str
    id: str
    variant: str
    outcome: str
    expected: str
    evidence: dict[str, Any]

    @property
    def no_case(self) -> bool:
        """Whether the proof has nothing to run on this backend, so that there is no outcome."""
        return bool(self.evidence.get("no_case"))

    @property
    def as_expected(self) -> bool:
        """Whether the outcome is the expected one."""
        return self.outcome == self.expected


class Failure(msgspec.Struct, frozen=True, tag="error", tag_field="event"):
    """The run ended early; the fields are those of an error."""

    message: str
    context: str = ""
    hint: str = ""
    exit_code: int = 70

    def error(self) -> MegatronFixesError:
        """The same as an error of this process, with the same exit code."""
        kind = {1: RefusedError, 2: UsageError}.get(self.exit_code, MegatronFixesError)
        return kind(self.message, context=self.context, hint=self.hint)


Event = Fetch | Fetched | Start | Result | Failure
_DECODER: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


def parse(line: str) -> Event | None:
    """Read a line; None if it is no event."""
    try:
        return _DECODER.decode(line)
    except msgspec.DecodeError:
        return None


def progress_line(event: Event) -> str:
    """An event as one line for a person; empty for what needs no line."""
    if isinstance(event, Fetch):
        return f"fetching {event.release}"
    if isinstance(event, Start):
        return f"{event.release} {event.variant}: {', '.join(event.fixes) or 'nothing to prove'}"
    if isinstance(event, Result) and event.no_case:
        return f"{event.release} {event.variant}: {event.id} has no case for {event.backend}"
    if isinstance(event, Result):
        end = "as expected" if event.as_expected else f"NOT as expected ({event.expected})"
        return f"{event.release} {event.variant}: {event.id} {event.outcome}, {end}"
    return ""


def case_lines(evidence: dict[str, Any]) -> list[str]:
    """What was seen, one line a case."""
    lines = [f"{name}: {case['summary']}" for name, case in evidence.items() if _is_case(case)]
    reason = evidence.get("reason")
    return lines + ([str(reason)] if reason else [])


def _is_case(value: object) -> bool:
    return isinstance(value, dict) and "summary" in value


def table_rows(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """One row a result: release, fix, variant, outcome, whether that was expected, what each case saw.

    The variants of one fix on one release stand together.
    """
    releases = [result.release for result in results]
    return [
        (
            result.release,
            result.id,
            result.variant,
            result.outcome,
            "yes" if result.as_expected else f"NO: {result.expected}",
            "\n".join(case_lines(result.evidence)),
        )
        for result in sorted(results, key=lambda result: (releases.index(result.release), result.id))
    ]


def to_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The results by release and backend, as plain values, in the order in which they came."""
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results:
        grouped.setdefault((result.release, result.backend), []).append(
            {
                "id": result.id,
                "variant": result.variant,
                "outcome": result.outcome,
                "expected": result.expected,
                "evidence": result.evidence,
            }
        )
    return [
        {"release": release, "tree": published([release]), "backend": backend, "results": rows}
        for (release, backend), rows in grouped.items()
    ]


def published(releases: Iterable[str]) -> str:
    """What was proved: never a tree of the user's."""
    names = list(dict.fromkeys(releases))
    return f"megatron-core {names[0]} as published" if len(names) == 1 else f"{len(names)} releases as published"


def without_case(results: Sequence[Result]) -> MegatronFixesError | None:
    """The mistake of naming fixes whose proofs have no case for the backend, or None."""
    lacking = [result for result in results if result.no_case]
    if not lacking:
        return None
    ids, backend = ", ".join(dict.fromkeys(result.id for result in lacking)), lacking[0].backend
    others = ", ".join(name for name in BACKENDS if name != backend)
    message = f"got --backend {backend}, expected one that the proof of {ids} has a case for: no case for {backend}"
    return UsageError(f"{message}; backends: {others}", hint=f"Repeat with --backend {others} for {ids}.")


def ending(results: Sequence[Result]) -> str:
    """The last line: how many outcomes were as expected, on what, and which were not."""
    wrong = [result for result in results if not result.as_expected]
    named = [f"{r.release} {r.id} {r.variant} (got {r.outcome}, expected {r.expected})" for r in wrong]
    where = published(result.release for result in results)
    counts = f"{len(results) - len(wrong)} of {len(results)} outcomes as expected, on {where}"
    return f"{counts}; not as expected: {', '.join(named)}" if named else counts


def exit_code(results: Sequence[Result]) -> int:
    """0 if every outcome was the expected one, else 1."""
    return 0 if all(result.as_expected for result in results) else 1
