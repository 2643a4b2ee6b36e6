# SPDX-License-Identifier: Apache-2.0
"""Verdicts follow the text, need every touched function, and never call an unknown text fine."""

from __future__ import annotations

import pytest

from megatron_fixes.catalog.fingerprint import functions
from megatron_fixes.catalog.known import ABSENT, Known, KnownFunction, Place
from megatron_fixes.catalog.matrix import Cell, Fix
from megatron_fixes.catalog.verdict import Finding, Seen, judge

OLD = "def start():\n    a()\n    b()\n\ndef finish():\n    c()\n    d()\n"
FIXED = OLD.replace("a()", "a(1)").replace("c()", "c(1)")
UPSTREAM = OLD.replace("a()", "a(2)").replace("c()", "c(2)")
BEFORE = OLD.replace("b()", "e()").replace("d()", "e()")
TEXTS = {
    (OLD, "0.2.0", ()),
    (OLD, "0.2.1", ()),
    (FIXED, "0.2.0", ("MF0001",)),
    (FIXED, "0.2.1", ("MF0001",)),
    (UPSTREAM, "0.3.0", ()),
    (BEFORE, "0.1.0", ()),
}


def known() -> Known:
    table: dict[str, dict[str, KnownFunction]] = {}
    for text, release, fixes in sorted(TEXTS):
        for name, (found,) in functions(text).items():
            row = table.setdefault(f"m.py::{name}", {})
            places = (*(row[found.hash].places if found.hash in row else ()), Place(release, fixes))
            row[found.hash] = KnownFunction(found.hash, places, tuple(s.hash for s in found.statements))
    names = ("m.py::finish", "m.py::start")
    return Known(1, {}, {"MF0001": names}, {name: tuple(row.values()) for name, row in table.items()})


def fix() -> Fix:
    verdicts = {"0.1.0": "not-affected", "0.2.0": "needed", "0.2.1": "needed", "0.3.0": "fixed-upstream"}
    cells = {release: Cell(verdict, ("gloo",)) for release, verdict in verdicts.items()}  # type: ignore[arg-type]
    return Fix("slug", "symptom", "hit", "0.2.0", (), cells)


def look(text: str) -> dict[str, Seen]:
    found = functions(text)
    return {f"m.py::{n}": Seen(tuple(found.get(n, ())), source=tuple(text.splitlines())) for n in ("start", "finish")}


def verdict(text: str, claimed: str | None = None) -> Finding:
    return judge("MF0001", fix(), known(), look(text), claimed)


@pytest.mark.parametrize(
    ("text", "expected", "release"),
    [
        (OLD, "needed", "0.2.0"),
        (FIXED, "applied", "0.2.0"),
        (UPSTREAM, "fixed-upstream", "0.3.0"),
        (BEFORE, "not-affected", "0.1.0"),
    ],
)
def test_a_known_text_gets_its_verdict_whatever_the_target_claims(text: str, expected: str, release: str) -> None:
    for claimed in (None, "0.1.0", "0.2.0", "0.3.0", "9.9.9"):
        finding = verdict(text, claimed)
        assert (finding.verdict, finding.release) == (expected, release)


def test_a_claim_that_the_text_contradicts_is_pointed_out() -> None:
    assert verdict(OLD, "0.3.0").reason == "finish, start as in 0.2.0 - 0.2.1, though the target calls itself 0.3.0"
    assert verdict(OLD, "0.2.1").reason == "finish, start as in 0.2.0 - 0.2.1"


def test_the_claimed_release_breaks_a_tie() -> None:
    assert verdict(OLD, "0.2.1").release == "0.2.1"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (OLD.replace("a()", "a(1)"), "half applied: start has the fix, finish has not"),
        (OLD.replace("a()", "a(2)"), "a mixture of releases"),
        (OLD.replace("a()", "other()"), "start is not a known text"),
        (OLD.split("def finish", maxsplit=1)[0], "finish not found in m.py"),
        (OLD + OLD, "start defined 2 times in m.py"),
    ],
)
def test_any_text_that_no_release_explains_is_drifted_and_says_why(text: str, reason: str) -> None:
    finding = verdict(text, "0.2.0")
    assert (finding.verdict, finding.release) == ("drifted", None)
    assert reason in finding.reason


def test_a_missing_file_is_drifted() -> None:
    seen = {name: Seen(problem="m.py not found") for name in ("m.py::start", "m.py::finish")}
    finding = judge("MF0001", fix(), known(), seen, "0.3.0")
    assert (finding.verdict, finding.reason) == ("drifted", "m.py not found")


def test_a_drifted_function_shows_its_own_lines_and_how_many_known_ones_are_gone() -> None:
    (difference,) = verdict(OLD.replace("    b()\n", "    mine()\n    b()\n").replace("    a()\n", "")).differences
    assert difference.function == "m.py::start"
    assert any("2: mine()" in change and change.startswith("+") for change in difference.changes)
    assert any(change.startswith("- 1 known statement") for change in difference.changes)


def test_a_changed_signature_alone_is_shown() -> None:
    (difference,) = verdict(OLD.replace("def start():", "def start(x):")).differences
    assert difference.changes == ("+ the signature or decorators differ",)


def test_releases_are_put_in_order_of_version() -> None:
    newer = {**fix().cells, "0.10.0": Cell("needed", ("gloo",))}
    table = {
        name: tuple(
            KnownFunction(
                f.hash, (*f.places, Place("0.10.0", ())) if f.places[0].release == "0.2.0" else f.places, f.statements
            )
            for f in rows
        )
        for name, rows in known().functions.items()
    }
    wider = Known(1, {}, known().touches, table)
    finding = judge("MF0001", Fix("slug", "s", "h", "0.2.0", (), newer), wider, look(OLD), None)
    assert finding.reason == "finish, start as in 0.2.0 - 0.2.1, 0.10.0"


def adding() -> Known:
    """As ``known``, with a fix that also adds ``m.py::help`` to 0.2.0."""
    (added,) = functions("def help():\n    pass\n")["help"]
    absent = tuple(Place(release, ()) for release in ("0.1.0", "0.2.0", "0.2.1", "0.3.0"))
    texts = (
        KnownFunction(ABSENT, absent, ()),
        KnownFunction(added.hash, tuple(Place(release, ("MF0001",)) for release in ("0.2.0", "0.2.1")), ()),
    )
    return Known(
        1, {}, {"MF0001": (*known().touches["MF0001"], "m.py::help")}, {**known().functions, "m.py::help": texts}
    )


@pytest.mark.parametrize(
    ("text", "expected", "reason"),
    [
        (OLD, "needed", "finish, start as in 0.2.0 - 0.2.1"),
        (BEFORE, "not-affected", "finish, start as in 0.1.0"),
        (FIXED + "\ndef help():\n    pass\n", "applied", "finish, start, help as in 0.2.0 - 0.2.1 with the fix"),
        (FIXED, "drifted", "half applied: finish, start has the fix, help has not"),
        (OLD + "\ndef help():\n    pass\n", "drifted", "half applied: help has the fix, finish, start has not"),
        (OLD + "\ndef help():\n    mine()\n", "drifted", "help is not a known text (nearest: 0.2.0 with MF0001)"),
        (UPSTREAM + "\ndef help():\n    pass\n", "drifted", "a mixture of releases"),
    ],
)
def test_a_function_that_the_fix_adds_is_expected_with_it_and_missed_without(
    text: str, expected: str, reason: str
) -> None:
    found = functions(text)
    names = adding().touches["MF0001"]
    seen = {name: Seen(tuple(found.get(name.split("::")[1], ())), source=tuple(text.splitlines())) for name in names}
    finding = judge("MF0001", fix(), adding(), seen, "0.2.0" if text != BEFORE else "0.1.0")
    assert (finding.verdict, finding.reason[: len(reason)]) == (expected, reason)


def test_what_the_other_code_looks_like_breaks_a_tie_before_what_is_claimed() -> None:
    same = {name: rows for name, rows in known().functions.items()}
    start = [f for f in same["m.py::start"] if f.places[0].release == "0.2.0" and not f.places[0].fixes]
    assert len(start) == 1
    alike = KnownFunction(start[0].hash, (*start[0].places, Place("0.3.0", ())), start[0].statements)
    same["m.py::start"] = tuple(alike if f is start[0] else f for f in same["m.py::start"])
    table = Known(1, {}, {"MF0001": ("m.py::start",)}, same)
    for claimed, like, verdict_, reason in (
        (None, None, "needed", "start as in 0.2.0 - 0.2.1"),
        ("0.99.0", "0.3.0", "fixed-upstream", "start as in 0.3.0"),
        ("0.2.0", "0.3.0", "fixed-upstream", "start as in 0.3.0"),
        (None, "0.2.1", "needed", "start as in 0.2.0 - 0.2.1"),
        (None, "0.1.0", "needed", "start as in 0.2.0 - 0.2.1, though its other code is that of 0.1.0"),
    ):
        finding = judge("MF0001", fix(), table, look(OLD), claimed, like)
        assert (finding.verdict, finding.reason) == (verdict_, reason)
    assert judge("MF0001", fix(), known(), look(OLD), None, "0.3.0").release == "0.2.1"  # the nearest one


def test_a_function_that_is_found_in_two_files_is_named_with_its_file() -> None:
    """As MF0019's ``reduce_gradients``, which lies in two files."""
    twice = {**known().functions, "n.py::start": known().functions["m.py::start"]}
    table = Known(1, {}, {"MF0001": ("m.py::finish", "m.py::start", "n.py::start")}, twice)
    changed = look(OLD.replace("b()", "other()"))
    finding = judge("MF0001", fix(), table, {**changed, "n.py::start": changed["m.py::start"]}, "0.2.0")
    assert finding.reason == (
        "start in m.py is not a known text (nearest: 0.2.0); start in n.py is not a known text (nearest: 0.2.0)"
    )
    half = look(FIXED)
    finding = judge("MF0001", fix(), table, {**half, "n.py::start": look(OLD)["m.py::start"]}, "0.2.0")
    assert finding.reason == "half applied: finish, start in m.py has the fix, start in n.py has not"


def test_the_nearest_text_is_named_by_the_release_that_the_target_is() -> None:
    changed = look(OLD.replace("b()", "other()"))
    for claimed, like, nearest in (("0.2.0", None, "0.2.0"), ("9.9.9", "0.2.0", "0.2.0"), (None, None, "0.2.1")):
        finding = judge("MF0001", fix(), known(), changed, claimed, like)
        assert [difference.nearest for difference in finding.differences] == [nearest]


def test_absence_alone_does_not_make_a_target_another_release_than_it_claims() -> None:
    """0.1.0 lacks both functions; a tree that claims 0.2.0 and lacks them has been changed."""
    rows = {n: (*r, KnownFunction(ABSENT, (Place("0.1.0", ()),), ())) for n, r in known().functions.items()}
    lacking = Known(1, {}, known().touches, rows)
    assert judge("MF0001", fix(), lacking, look(""), "0.1.0").verdict == "not-affected"
    finding = judge("MF0001", fix(), lacking, look(""), "0.2.0")
    assert (finding.verdict, finding.reason) == ("drifted", "none of finish, start found")


@pytest.mark.parametrize(("text", "expected"), [(OLD, "needed"), (FIXED, "applied"), (UPSTREAM, "fixed-upstream")])
def test_a_function_that_the_fix_touches_in_other_lines_only_says_nothing_of_it(text: str, expected: str) -> None:
    elsewhere = "\ndef other():\n    pass\n"
    (other,) = functions(elsewhere)["other"]
    touched = [Place(release, fixes) for release in ("0.2.0", "0.2.1") for fixes in ((), ("MF0001",))]
    places = (*touched, Place("0.3.0", ()))
    names = (*known().touches["MF0001"], "m.py::other")
    wider = {**known().functions, "m.py::other": (KnownFunction(other.hash, places, ()),)}
    seen = {**look(text), "m.py::other": Seen((other,))}
    assert judge("MF0001", fix(), Known(1, {}, {"MF0001": names}, wider), seen, None).verdict == expected


@pytest.mark.parametrize(("elsewhere", "expected"), [("0.2.1", "needed"), (None, "drifted")])
def test_a_file_that_some_release_has_not_may_be_missing(elsewhere: str | None, expected: str) -> None:
    absent = KnownFunction(ABSENT, (Place("0.2.1", ()),) if elsewhere else (), ())
    names = (*known().touches["MF0001"], "n.py::other")
    wider = {**known().functions, "n.py::other": (absent,) if elsewhere else ()}
    seen = {**look(OLD), "n.py::other": Seen(problem="n.py not found", missing=True)}
    assert judge("MF0001", fix(), Known(1, {}, {"MF0001": names}, wider), seen, None).verdict == expected


IMPORT = "import threading\n\n"


def importing() -> Known:
    """As ``known``, with a fix that also adds an import to 0.2.0 and 0.2.1; 0.3.0 has it by itself."""
    (name,) = [name for name in functions(IMPORT) if name.startswith("=")]
    absent = (Place("0.1.0", ()), Place("0.2.0", ()), Place("0.2.1", ()))
    there = (Place("0.2.0", ("MF0001",)), Place("0.2.1", ("MF0001",)), Place("0.3.0", ()))
    texts = (KnownFunction(ABSENT, absent, ()), KnownFunction(name[1:], there, ()))
    return Known(
        1, {}, {"MF0001": (*known().touches["MF0001"], f"m.py::{name}")}, {**known().functions, f"m.py::{name}": texts}
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OLD, "needed"),
        (IMPORT + FIXED, "applied"),
        (FIXED, "drifted"),
        (IMPORT + OLD, "needed"),
        (IMPORT + IMPORT + FIXED, "applied"),
        (UPSTREAM, "fixed-upstream"),
    ],
)
def test_a_fix_is_applied_only_with_what_it_adds_outside_functions(text: str, expected: str) -> None:
    found = functions(text)
    names = importing().touches["MF0001"]
    seen = {name: Seen(tuple(found.get(name.split("::")[1], ()))) for name in names}
    finding = judge("MF0001", fix(), importing(), seen, None)
    assert finding.verdict == expected
    if expected == "drifted":
        assert finding.reason == (
            "half applied: functions have the fix, 1 of its statements outside functions are not in m.py"
        )
