# SPDX-License-Identifier: Apache-2.0
"""When a release may be built: facts in, refusals out. Pure.

Two things must hold. *Agreement*: the version asked for, that of the package, the tag, the changelog's section and the
generated tables say the same, and every cell of the GPU table has a record made with the present sources. *Evidence*:
lint, tests with proofs, and the matrix were green for exactly this tree. Each refusal says what is to be done.

A test that was skipped is no evidence, except for the reasons in ``MAY_BE_SKIPPED``: what needs a GPU is covered by the
records behind the cells that ``ran``. Not handled: who may release, and whether the changes are good ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

import changelog
import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]
CheckName = Literal["lint", "tests", "matrix"]
CHECKS: tuple[CheckName, ...] = ("lint", "tests", "matrix")
# The folder of tests that run the proofs of fixes on real releases.
PROOFS = "fixes"
MAY_BE_SKIPPED = re.compile(
    r"needs \d+ CUDA devices?, found \d+|there is CUDA here|needs /dev/full"
    r"|this system lets nobody mount a file system of his own|only root can give .*"
    r"|needs unshare, and leave to make a network namespace"
)


class Check(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One check that ran on a clean work tree.

    Attributes:
        tree: Hash of the git tree that it ran on.
        date: When it ended, in UTC.
        command: What a person types to run it.
        passed: Number of tests by folder below ``tests``; only of the check ``tests``.
        skipped: Number of tests by reason.
        said: What failed, in few words.
    """

    name: CheckName
    outcome: Literal["green", "red"]
    tree: str
    commit: str
    date: str
    seconds: float
    machine: str
    command: str
    passed: dict[str, Count] = {}
    skipped: dict[str, Count] = {}
    said: str = ""


@dataclass(frozen=True)
class Facts:
    """What is known of a checkout that should become a release.

    Attributes:
        version: That was asked for, without ``v``.
        package: ``__version__`` in the commit.
        head: The commit that is checked out.
        tree: Hash of its tree.
        tag: The commit of the version's tag; None if there is no such tag.
        log: The text of ``CHANGELOG.md``.
        stale: Generated files that are not what would be generated.
        uncovered: Cells of the GPU table, each with what its record lacks.
        checks: The evidence, by name.
    """

    version: str
    package: str
    head: str
    tree: str
    tag: str | None
    log: str
    stale: tuple[str, ...] = ()
    uncovered: tuple[str, ...] = ()
    checks: Mapping[str, Check] = field(default_factory=dict)


class Refusal(NamedTuple):
    """Why not, and what to do."""

    message: str
    hint: str

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}"


def disagreements(facts: Facts) -> list[Refusal]:
    """Where tag, version, changelog, tables and matrix say different things."""
    version, found = facts.version, []
    prepare = f"Prepare it in one commit: make release-commit VERSION=v{version}"
    if facts.package != version:
        found.append(Refusal(f"version: the package is {facts.package}, the release would be {version}", prepare))
    if facts.tag is not None and facts.tag != facts.head:
        found.append(
            Refusal(
                f"tag: v{version} stands at {facts.tag}, what is checked out is {facts.head}",
                f"Check out what the tag names: git checkout v{version}",
            )
        )
    sections = changelog.sections(facts.log)
    if (section := sections.get(version)) is None:
        found.append(Refusal(f"CHANGELOG.md: has no section {version}", prepare))
    elif not section.date or not section.body:
        lacks = "no date" if not section.date else "nothing in it"
        hint = f"Write it as '## {version} - YYYY-MM-DD', and below it what changed."
        found.append(Refusal(f"CHANGELOG.md: the section {version} has {lacks}", hint))
    if section is not None and (left := sections.get(changelog.UNRELEASED)) and left.body:
        hint = f"Move it into the section {version}, since it is in this commit."
        found.append(Refusal("CHANGELOG.md: something stands under Unreleased", hint))
    if facts.stale:
        hint = "Write them again and commit: python scripts/render_tables.py && python scripts/compile_matrix.py"
        found.append(Refusal(f"tables: {', '.join(facts.stale)} is not what the matrix says", hint))
    if facts.uncovered:
        more = f", and {len(facts.uncovered) - 1} more" if facts.uncovered[1:] else ""
        hint = "make matrix writes docs/records/matrix.json (--record), ci/gpu_smoke on a GPU those of cells that ran."
        found.append(Refusal(f"matrix: {facts.uncovered[0]}{more}", hint))
    return found


def lacks(facts: Facts) -> list[Refusal]:
    """What the evidence does not show for this tree."""
    found = []
    for name in CHECKS:
        check = facts.checks.get(name)
        again = f"Run it on a clean work tree: make evidence CHECKS={name}"
        if check is None:
            found.append(Refusal(f"{name}: there is no evidence", again))
        elif check.tree != facts.tree:
            found.append(Refusal(f"{name}: the evidence is of tree {check.tree}, this is {facts.tree}", again))
        elif check.outcome != "green":
            found.append(Refusal(f"{name}: red on {check.date}: {check.said}", f"Mend it by a commit. {again}"))
        elif name == "tests":
            found += _lacking_tests(check)
    return found


def _lacking_tests(check: Check) -> list[Refusal]:
    found = []
    odd = {reason: count for reason, count in check.skipped.items() if not MAY_BE_SKIPPED.fullmatch(reason)}
    if odd:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in sorted(odd.items()))
        hint = "Run make evidence CHECKS=tests where nothing keeps them from running."
        found.append(Refusal(f"tests: some were skipped: {reasons}", hint))
    if not check.passed.get(PROOFS):
        hint = "Run make evidence CHECKS=tests in an environment with torch: make setup"
        found.append(Refusal(f"tests: no proof ran (tests/{PROOFS})", hint))
    return found


def refusals(facts: Facts) -> list[Refusal]:
    """All reasons not to build a release."""
    return [*disagreements(facts), *lacks(facts)]
