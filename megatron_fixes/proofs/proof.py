# SPDX-License-Identifier: Apache-2.0
"""What a proof is: cases that run on real ranks, and a judgement over what each rank saw.

A proof module defines ``PROOF``. Each ``Case`` says how many ranks it takes on which backend; its ``run`` is
called once on each rank, inside an initialised default process group, and returns JSON-able evidence. ``judge``
is a pure function over the evidence of all ranks, so that one rank's silence can't pass for health. The outcome
of a proof is the worst of its cases: ``timeout``, ``not-runnable``, ``defect``, ``clean``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatron_fixes.catalog.expectation import Outcome

Backend = Literal["gloo", "nccl"]
Evidence = dict[str, Any]

WORST_FIRST: tuple[Outcome, ...] = ("timeout", "not-runnable", "defect", "clean")


@dataclass(frozen=True)
class Judgement:
    """What the evidence of one case shows, with one sentence for a person."""

    outcome: Outcome
    summary: str


@dataclass(frozen=True)
class Case:
    """One scenario of a proof.

    Attributes:
        name: Short and stable; the key of the evidence.
        backend: ``gloo`` on CPU under the shim, or ``nccl`` with one GPU a rank.
        world_size: Ranks to start.
        run: Called on each rank as ``run(rank)``; returns evidence.
        judge: Called once with the evidence of all ranks in rank order.
        timeout_s: All ranks must be done by then.
        control: It shows no defect but what must stay right: expected clean with and without the fix.
    """

    name: str
    backend: Backend
    world_size: int
    run: Callable[[int], Evidence]
    judge: Callable[[Sequence[Evidence]], Judgement]
    timeout_s: float = 60.0
    control: bool = False


@dataclass(frozen=True)
class Proof:
    """The cases that show one fix's defect and its absence."""

    fix_id: str
    cases: tuple[Case, ...]

    def on(self, backend: Backend) -> tuple[Case, ...]:
        """The cases that run on a backend."""
        return tuple(case for case in self.cases if case.backend == backend)


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """The worst of some outcomes; ``not-runnable`` if there are none."""
    return min(outcomes, key=WORST_FIRST.index, default="not-runnable")


def overall(shown: Sequence[Outcome], controls: Sequence[Outcome]) -> Outcome:
    """The outcome of a proof, from those of the cases that show the defect and of the controls.

    A control that is not clean is told as itself, except that beside a defect it leaves open what caused what:
    nothing is shown then.
    """
    outcome, control = worst(shown), worst([*controls, "clean"])
    if outcome == "defect" and control == "defect":
        return "not-runnable"
    return worst([outcome, control])
