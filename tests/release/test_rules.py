# SPDX-License-Identifier: Apache-2.0
"""When a release may be built: each fact that is not right refuses it, by one sentence of its own."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron_fixes.errors import RefusedError
from megatron_fixes.release import layout
from tests.loading import load_program

RULES = load_program("scripts/release_rules.py")
CHANGELOG = load_program("scripts/changelog.py")
HEAD, TREE = "a" * 40, "b" * 40
LOG = (
    "# Changelog\n\n## Unreleased\n\n## 0.1.0 - 2026-12-01\n\n### Added\n\n- One.\n\n## 0.0.9 - 2026-11-01\n\n- Zero.\n"
)


def check(name: str, **other: Any) -> Any:
    facts = {"outcome": "green", "tree": TREE, "commit": HEAD, "date": "2026-12-01T00:00:00Z", "seconds": 1.0}
    facts |= {"machine": "a machine", "command": f"make {name}"}
    if name == "tests":
        facts |= {"passed": {"fixes": 3, "release": 9}, "skipped": {"needs 2 CUDA devices, found 0": 4}}
    return RULES.Check(name=name, **{**facts, **other})


def checks(**other: Any) -> dict[str, Any]:
    return {name: check(name) for name in RULES.CHECKS} | other


GOOD = RULES.Facts(version="0.1.0", package="0.1.0", head=HEAD, tree=TREE, tag=HEAD, log=LOG, checks=checks())


@pytest.mark.parametrize(
    "facts", [GOOD, dataclasses.replace(GOOD, tag=None)], ids=["the tag stands here", "there is no tag yet"]
)
def test_a_release_of_which_everything_agrees_is_not_refused(facts: Any) -> None:
    assert RULES.refusals(facts) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"package": "0.2.0"}, "version: the package is 0.2.0, the release would be 0.1.0"),
        ({"tag": "c" * 40}, f"tag: v0.1.0 stands at {'c' * 40}, what is checked out is {HEAD}"),
        ({"log": LOG.replace("## 0.1.0 - 2026-12-01", "## 0.1.1 - 2026-12-01")}, "has no section 0.1.0"),
        ({"log": LOG.replace("## 0.1.0 - 2026-12-01\n", "## 0.1.0\n")}, "the section 0.1.0 has no date"),
        ({"log": LOG.replace("## 0.1.0 - 2026-12-01", "## 0.1.0 - soon")}, "the section 0.1.0 has no date"),
        ({"log": LOG.replace("## 0.1.0 - 2026-12-01", "## 0.1.0 - 2026-99-99")}, "the section 0.1.0 has no date"),
        ({"log": LOG.replace("### Added\n\n- One.\n\n", "")}, "the section 0.1.0 has nothing in it"),
        ({"log": LOG.replace("Unreleased\n", "Unreleased\n\n- Late.\n")}, "something stands under Unreleased"),
        ({"stale": ("README.md",)}, "tables: README.md is not what the matrix says"),
        (
            {"uncovered": ("sm_90 x CUDA 12.4 x fp8: ran, but", "another")},
            "sm_90 x CUDA 12.4 x fp8: ran, but, and 1 more",
        ),
        ({"checks": {}}, "there is no evidence"),
        ({"checks": checks(lint=check("lint", tree="c" * 40))}, f"lint: the evidence is of tree {'c' * 40}"),
        ({"checks": checks(matrix=check("matrix", outcome="red", said="sm_80"))}, "matrix: red on 2026-12-01"),
        ({"checks": checks(tests=check("tests", passed={"release": 9}))}, "tests: no proof ran (tests/fixes)"),
        (
            {"checks": checks(tests=check("tests", skipped={"0.13.0 is not in the cache": 2}))},
            "tests: some were skipped: 2 x 0.13.0 is not in the cache",
        ),
    ],
)
def test_each_fact_that_is_not_right_refuses_with_one_sentence_and_what_to_do(wrong: dict[str, Any], said: str) -> None:
    found = RULES.refusals(dataclasses.replace(GOOD, **wrong))
    assert len(found) == (3 if wrong == {"checks": {}} else 1)
    for refusal in found:
        assert said in refusal.message
        assert re.search(r"\bmake [a-z]|git checkout v|python scripts|^(Write|Move) it", refusal.hint)


@pytest.mark.parametrize("name", ["lint", "tests", "matrix"])
def test_every_check_is_needed(name: str) -> None:
    (refusal,) = RULES.refusals(dataclasses.replace(GOOD, checks={k: v for k, v in checks().items() if k != name}))
    assert refusal.message == f"{name}: there is no evidence"
    assert f"CHECKS={name}" in refusal.hint


@pytest.mark.parametrize(
    ("reason", "allowed"),
    [
        ("needs 1 CUDA device, found 0", True),
        ("this system lets nobody mount a file system of his own", True),
        ("needs unshare, and leave to make a network namespace", True),
        ("import-linter needs Python 3.11", False),
        ("git is not installed", False),
        ("could not import 'torch'; needs 1 CUDA device, found 0", False),
    ],
)
def test_only_reasons_that_records_cover_or_that_are_the_systems_own_may_skip_a_test(
    reason: str, allowed: bool
) -> None:
    facts = dataclasses.replace(GOOD, checks=checks(tests=check("tests", skipped={reason: 1})))
    assert (RULES.refusals(facts) == []) == allowed


def test_evidence_of_another_form_is_none() -> None:
    good = msgspec.json.encode(check("lint"))
    assert msgspec.json.decode(good, type=RULES.Check) == check("lint")
    negative = good.replace(b'"passed":{}', b'"passed":{"fixes":-1}')
    assert negative != good
    for spoilt in (
        negative,
        good.replace(b'"green"', b'"yellow"'),
        good.replace(b'"tree"', b'"wood"'),
        good[:-1] + b',"x":1}',
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(spoilt, type=RULES.Check)


@pytest.mark.parametrize(
    ("version", "pre"), [("0.1.0", False), ("0.2.0rc1", True), ("1.0.0a2", True), ("1.0.0b1", True)]
)
def test_a_prerelease_is_told_by_its_version(version: str, pre: bool) -> None:
    assert layout.is_prerelease(version) == pre


def test_what_is_unreleased_goes_under_a_version_and_the_section_stays() -> None:
    text = CHANGELOG.released(LOG.replace("Unreleased\n", "Unreleased\n\n- New.\n"), "0.2.0rc1", "2026-12-02")
    found = CHANGELOG.sections(text)
    assert list(found) == ["Unreleased", "0.2.0rc1", "0.1.0", "0.0.9"]
    assert found["0.2.0rc1"] == CHANGELOG.Section("2026-12-02", "- New.")
    assert found["Unreleased"].body == ""
    assert found["0.1.0"] == CHANGELOG.sections(LOG)["0.1.0"]


@pytest.mark.parametrize(
    ("log", "version", "said"),
    [
        (LOG, "0.2.0", "nothing under Unreleased"),
        (LOG.replace("## Unreleased\n", ""), "0.2.0", "nothing under Unreleased"),
        (LOG.replace("Unreleased\n", "Unreleased\n\n- New.\n"), "0.1.0", "a section 0.1.0 already"),
        (f"{LOG}\n## 0.1.0 - 2026-12-03\n", "0.2.0", "two sections 0.1.0"),
    ],
)
def test_a_changelog_with_nothing_to_release_or_of_that_version_is_refused(log: str, version: str, said: str) -> None:
    with pytest.raises(RefusedError, match=said):
        CHANGELOG.released(log, version, "2026-12-02")


def test_the_changelog_of_this_tree_is_read() -> None:
    text = (Path(__file__).parents[2] / "CHANGELOG.md").read_text(encoding="utf-8")
    assert CHANGELOG.UNRELEASED in CHANGELOG.sections(text)
