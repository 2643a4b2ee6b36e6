# SPDX-License-Identifier: Apache-2.0
"""``prove`` from its options to its exit code, with the process of the proofs replaced by one that prints events."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from megatron_fixes.catalog.expectation import VARIANTS
from megatron_fixes.cli import proof_process

Cli = Callable[..., Any]


@dataclass
class Stand:
    """What stands in the place of the proofs' process: what it says, and the commands that were asked for."""

    says: str = ""
    commands: list[list[str]] = field(default_factory=list)


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> Stand:
    here, real = Stand(), proof_process.listen

    def listen(command: list[str], heed: Any) -> Any:
        here.commands.append(command)
        return real([sys.executable, "-c", f"print({here.says!r})"], heed)

    monkeypatch.setattr(proof_process, "listen", listen)
    return here


def event(release: str, variant: str, outcome: str, expected: str) -> str:
    row = {"event": "result", "release": release, "backend": "gloo", "id": "MF0003", "variant": variant}
    evidence = {"ddp": {"outcome": outcome, "summary": f"saw {outcome}"}}
    return json.dumps({**row, "outcome": outcome, "expected": expected, "evidence": evidence})


def test_the_process_is_started_as_agreed(cli: Cli, stand: Stand) -> None:
    stand.says = event("0.16.1", "vanilla", "defect", "defect")
    done = cli(
        "prove",
        "mf0003,multi-distopt-default-stream-race",
        "--release",
        "0.16.1, 0.16.0",
        "--variant",
        "vanilla",
        "--backend",
        "gloo",
    )
    options = ["--backend", "gloo", "--variant", "vanilla", "--release", "0.16.1,0.16.0"]
    assert stand.commands == [[sys.executable, "-m", "megatron_fixes.proofs", *options, "MF0003", "MF0001"]]
    assert done.code == 0
    assert done.out.splitlines()[1].split()[:5] == ["0.16.1", "MF0003", "vanilla", "defect", "yes"]
    assert done.err == "0.16.1 vanilla: MF0003 defect, as expected\n"


def test_without_a_release_it_says_which_one_it_takes(cli: Cli, stand: Stand) -> None:
    stand.says = event("0.16.1", "vanilla", "defect", "defect")
    done = cli("prove")
    assert done.err.startswith("no --release given: proving on ")
    assert stand.commands[0][stand.commands[0].index("--variant") + 1] == ",".join(VARIANTS)


def test_an_unexpected_outcome_ends_with_1(cli: Cli, stand: Stand) -> None:
    stand.says = event("0.16.1", "patched", "defect", "clean")
    done = cli("prove", "--release", "0.16.1")
    assert done.code == 1 and "not as expected: 0.16.1 MF0003 patched" in done.out
    assert cli("prove", "--release", "0.16.1", "--json").json["results"][0]["expected"] == "clean"


NO_CASE = {"reason": "this proof has no case for nccl", "no_case": True}


@pytest.mark.parametrize("others", [0, 1])
def test_a_backend_without_a_case_is_the_users_mistake(cli: Cli, stand: Stand, others: int) -> None:
    row = json.loads(event("0.16.1", "vanilla", "not-runnable", "defect"))
    row.update(backend="nccl", evidence=NO_CASE)
    good = event("0.16.1", "vanilla", "defect", "defect").replace("MF0003", "MF0001").replace("gloo", "nccl")
    stand.says = "\n".join([good] * others + [json.dumps(row)])
    done = cli("prove", "MF0003", "--release", "0.16.1", "--backend", "nccl")
    assert done.code == 2
    assert "MF0003 has a case for: no case for nccl; backends: gloo\n" in done.err
    assert "NOT as expected" not in done.err and "MF0003" not in done.out
    assert ("MF0001" in done.out) == bool(others)
    done = cli("prove", "MF0003", "--release", "0.16.1", "--backend", "nccl", "--json")
    assert done.code == 2 and "no case for nccl" in done.json["error"]["message"]


def test_what_was_proved_is_named_and_is_no_tree_of_the_user(cli: Cli, stand: Stand) -> None:
    stand.says = event("0.16.1", "vanilla", "defect", "defect")
    done = cli("prove", "--release", "0.16.1")
    assert done.out.splitlines()[-1].endswith("as expected, on megatron-core 0.16.1 as published")
    assert cli("prove", "--release", "0.16.1", "--json").json["tree"] == "megatron-core 0.16.1 as published"


def test_only_what_is_really_fetched_is_said_to_be(cli: Cli, stand: Stand) -> None:
    stand.says = event("0.16.1", "vanilla", "defect", "defect")
    assert "fetching" not in cli("prove", "--release", "0.16.1").err
    stand.says = '{"event": "fetch", "release": "0.16.1"}\n' + stand.says
    assert cli("prove", "--release", "0.16.1").err.startswith("fetching 0.16.1\n")


def test_a_mistake_that_the_process_saw_is_shown_as_one(cli: Cli, stand: Stand) -> None:
    failure = {
        "event": "error",
        "message": "can't make the cache",
        "context": "/proc/x",
        "hint": "Set it.",
        "exit_code": 2,
    }
    stand.says = json.dumps(failure)
    done = cli("prove", "--release", "0.16.1")
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: can't make the cache\n  where: /proc/x\n  hint: Set it.\n"


def test_json_is_an_object_for_one_release_and_an_array_for_several(cli: Cli, stand: Stand) -> None:
    stand.says = event("0.16.1", "vanilla", "defect", "defect")
    assert cli("prove", "--release", "0.16.1", "--json").json["release"] == "0.16.1"
    stand.says += "\n" + event("0.16.0", "vanilla", "defect", "defect")
    done = cli("prove", "--release", "0.16.1,0.16.0", "--json")
    assert [document["release"] for document in done.json] == ["0.16.1", "0.16.0"]


def test_an_error_after_some_results_keeps_them(cli: Cli, stand: Stand) -> None:
    failure = {"event": "error", "message": "no network", "context": "", "hint": "Try again.", "exit_code": 1}
    stand.says = event("0.16.1", "vanilla", "defect", "defect") + "\n" + json.dumps(failure)
    done = cli("prove", "--release", "all")
    assert done.code == 1 and "MF0003" in done.out
    assert "error: no network\n  hint: Try again.\n" in done.err
    done = cli("prove", "--release", "all", "--json")
    assert done.json["error"]["message"] == "no network"
    assert done.json["results"][0]["release"] == "0.16.1"
