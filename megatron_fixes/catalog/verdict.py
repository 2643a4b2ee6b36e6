# SPDX-License-Identifier: Apache-2.0
"""What a fix is to a target, decided from the fingerprints of the functions that the fix touches.

A verdict needs every touched function to be known, and *one* release whose text explains all of them:

* all carry the fix -> ``applied``;
* none does -> what the matrix says of that release: ``needed``, ``fixed-upstream`` or ``not-affected``;
* some do, or no one release explains them all, or a function is unknown or doubled -> ``drifted``.

A function that a fix or a release adds is known to be absent elsewhere; where it is not, a missing one is unknown.
A function that the fix touches in other lines only has one text with and without it, which says nothing of the fix.
Statements outside functions, such as imports, only keep a fix from being ``applied`` if those that it brings are not
there: a fork may have them for its own reasons.

The release that the target's other code looks like (``likeness``), else the one that it claims, only breaks ties: a
fork that calls itself 0.16.1 but holds 0.17's text is judged by its text. Where several other releases explain the text
and disagree, a fix that is in it is in it, and else ``needed`` wins. Pure: no file is read here.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from packaging.version import Version

from megatron_fixes.catalog.fingerprint import OUTSIDE
from megatron_fixes.catalog.known import ABSENT
from megatron_fixes.catalog.ranges import compact

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from megatron_fixes.catalog.fingerprint import FunctionPrint
    from megatron_fixes.catalog.known import Known, KnownFunction
    from megatron_fixes.catalog.matrix import Fix

Verdict = Literal["needed", "applied", "fixed-upstream", "not-affected", "drifted"]
_DOUBT = ("needed", "not-affected", "fixed-upstream")


@dataclass(frozen=True)
class Seen:
    """One touched function in the target.

    Attributes:
        prints: Its definitions; not exactly one means that it can't be judged.
        problem: Why the file could not be looked into (missing, not Python), or empty.
        missing: The target has no such file; for a function that some release has not either, that is no problem.
        source: The file's lines, to show what differs.
    """

    prints: tuple[FunctionPrint, ...] = ()
    problem: str = ""
    source: Sequence[str] = ()
    missing: bool = False


@dataclass(frozen=True)
class Difference:
    """How a drifted function differs from the nearest known text of it.

    Attributes:
        function: ``path::qualname``.
        nearest: Where the nearest known text is found, such as ``0.16.1 with MF0001``.
        changes: One line a change: the target's own statements with their lines, and how many known ones are gone.
    """

    function: str
    nearest: str
    changes: tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """What a fix is to a target, with the reason in one sentence.

    Attributes:
        release: The release whose text explains the touched functions; None when ``drifted``.
        half: The files that have a part of the fix, where it is half applied.
    """

    fix_id: str
    verdict: Verdict
    reason: str
    release: str | None = None
    differences: tuple[Difference, ...] = ()
    half: tuple[str, ...] = ()


def judge(
    fix_id: str, fix: Fix, known: Known, seen: Mapping[str, Seen], claimed: str | None, like: str | None = None
) -> Finding:
    """Decide what a fix is to a target.

    Args:
        fix_id: The fix.
        fix: Its row of the matrix.
        known: The table of known functions.
        seen: Every function of ``known.touches[fix_id]`` as the target has it.
        claimed: The release that the target says it is, or None.
        like: The release that its code looks like, or None.
    """
    standing = like or claimed
    titles = _titles(known.touches[fix_id])
    places: dict[str, dict[str, bool | None]] = {}
    problems: list[str] = []
    differences: list[Difference] = []
    outside = {name for name in known.touches[fix_id] if name.split("::")[1].startswith(OUTSIDE)}
    for function in known.touches[fix_id]:
        if function in outside:
            continue
        name = function.split("::")[1]
        here = seen[function]
        if here.problem and not (here.missing and known.find(function, ABSENT)):
            problems.append(here.problem)
        elif len(here.prints) > 1:
            problems.append(f"{name} defined {len(here.prints)} times in {function.split('::')[0]}")
        elif match := known.find(function, here.prints[0].hash if here.prints else ABSENT):
            places[function] = _carries(fix_id, match)
        elif not here.prints:
            problems.append(f"{name} not found in {function.split('::')[0]}")
        else:
            difference = compare(function, here, known, standing)
            differences.append(difference)
            problems.append(f"{titles[function]} is not a known text (nearest: {difference.nearest})")
    present = [function for function in places if seen[function].prints]
    if not problems and not present and any(standing not in releases for releases in places.values()):
        # Absence alone is no evidence of another release than the one that the target claims or looks like.
        problems.append(f"none of {', '.join(function.split('::')[1] for function in places)} found")
    if problems:
        return Finding(fix_id, "drifted", "; ".join(dict.fromkeys(problems)), differences=tuple(differences))
    finding = _explain(fix_id, fix, places, present, claimed, like)
    lost = [
        name for name in outside if finding.verdict == "applied" and _lost(fix_id, name, known, seen, finding.release)
    ]
    if lost:
        paths = ", ".join(sorted({name.split("::")[0] for name in lost}))
        reason = (
            f"half applied: functions have the fix, {len(lost)} of its statements outside functions are not in {paths}"
        )
        return Finding(fix_id, "drifted", reason, half=_files_of(present))
    return finding


def _files_of(functions: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({function.split("::")[0] for function in functions}))


def _carries(fix_id: str, text: KnownFunction) -> dict[str, bool | None]:
    """Whether the fix is in a text, by release; None where the release has that text with the fix and without."""
    found: dict[str, set[bool]] = {}
    for place in text.places:
        found.setdefault(place.release, set()).add(fix_id in place.fixes)
    return {release: None if len(carrying) > 1 else carrying.pop() for release, carrying in found.items()}


def _lost(fix_id: str, name: str, known: Known, seen: Mapping[str, Seen], release: str | None) -> bool:
    """Whether a statement outside functions, which the fix brings to this release, is not there."""
    texts = (known_text for known_text in known.functions[name] if known_text.hash != ABSENT)
    brought = any(place.release == release and fix_id in place.fixes for text in texts for place in text.places)
    return brought and not seen[name].prints


def _explain(
    fix_id: str,
    fix: Fix,
    places: Mapping[str, Mapping[str, bool | None]],
    present: Sequence[str],
    claimed: str | None,
    like: str | None,
) -> Finding:
    standing = like or claimed
    names = {function: function.split("::")[1].rsplit(".", 1)[-1] for function in places}
    titles = _titles(list(places))
    common = set.intersection(*(set(releases) for releases in places.values()))
    if not common:
        texts = [f"{'' if f in present else 'no '}{titles[f]} as in {compact(r, fix.cells)}" for f, r in places.items()]
        return Finding(fix_id, "drifted", "a mixture of releases: " + "; ".join(texts))
    verdicts: dict[str, Verdict] = {}
    for release in common:
        carrying = {releases[release] for releases in places.values()} - {None}
        if carrying == {True}:
            verdicts[release] = "applied"
        elif carrying == {False}:
            verdicts[release] = fix.cells[release].verdict
    if not verdicts:
        release = standing if standing in common else min(common, key=Version)
        having = [f for f, releases in places.items() if releases[release]]
        outside = [titles[f] for f, releases in places.items() if releases[release] is False]
        inside = ", ".join(titles[f] for f in having)
        reason = f"half applied: {inside} has the fix, {', '.join(outside)} has not"
        return Finding(fix_id, "drifted", reason, half=_files_of(having))
    if standing in verdicts:
        release = standing
    else:
        order = ("applied", *_DOUBT)
        far = _distances(fix.cells, like)
        release = min(verdicts, key=lambda r: (order.index(verdicts[r]), far[r], Version(r)))
    verdict = verdicts[release]
    functions = ", ".join(dict.fromkeys(names[function] for function in present or places))
    alike = [release for release, other in verdicts.items() if other == verdict]
    text = f"{functions} as in {compact(alike, fix.cells)}" + (" with the fix" if verdict == "applied" else "")
    if standing is not None and standing not in verdicts:
        claim = f"the target calls itself {claimed}"
        text += f", though {claim if standing == claimed else f'its other code is that of {like}'}"
    return Finding(fix_id, verdict, text, release)


def _titles(functions: Sequence[str]) -> dict[str, str]:
    """What to call functions, so that no two have one title: with their file where a name is found in several."""
    names = {function: function.split("::")[1] for function in functions}
    several = [*names.values()]
    return {f: name if several.count(name) == 1 else f"{name} in {f.split('::')[0]}" for f, name in names.items()}


def _distances(releases: Iterable[str], like: str | None) -> dict[str, int]:
    """How many releases each one is away from the one that the target looks like; 0 if it looks like none."""
    ordered = sorted(releases, key=Version)
    at = ordered.index(like) if like in ordered else None
    return {release: 0 if at is None else abs(place - at) for place, release in enumerate(ordered)}


def compare(function: str, here: Seen, known: Known, release: str | None = None) -> Difference:
    """Show what differs between a function of the target and the nearest known text of it.

    Where several texts are as near, or one text is that of several releases, ``release`` is named if it is among them.
    """
    mine = here.prints[0].statements
    nearest = known.nearest(function, [statement.hash for statement in mine], release)
    if nearest is None:
        return Difference(function, "none", ())
    changes = []
    matcher = difflib.SequenceMatcher(
        a=list(nearest.statements), b=[statement.hash for statement in mine], autojunk=False
    )
    for tag, a_start, a_end, b_start, b_end in matcher.get_opcodes():
        if tag == "equal":
            continue
        for statement in mine[b_start:b_end]:
            text = here.source[statement.line - 1].strip() if 0 < statement.line <= len(here.source) else ""
            changes.append(f"+ {statement.line}: {text}")
        gone = a_end - a_start
        if gone:
            at = mine[min(b_start, len(mine) - 1)].line if mine else here.prints[0].line
            changes.append(f"- {gone} known statement{'s' if gone > 1 else ''} gone near line {at}")
    if not changes:
        changes.append("+ the signature or decorators differ")
    return Difference(function, _name(nearest, release), tuple(changes))


def _name(known: KnownFunction, release: str | None) -> str:
    """The nearest place of a text: in the release that is asked about, else the newest; with as few fixes as can be."""
    place = max(known.places, key=lambda place: (place.release == release, Version(place.release), -len(place.fixes)))
    return place.release + (f" with {', '.join(place.fixes)}" if place.fixes else "")
