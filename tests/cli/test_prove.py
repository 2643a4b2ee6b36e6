# SPDX-License-Identifier: Apache-2.0
"""``prove`` without torch: what is made of the events of a proof's process, and that the process is never left behind.

The processes here are real but only print events; real proofs are run in tests/fixes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fixes import catalog
from megatron_fixes.catalog.expectation import VARIANTS
from megatron_fixes.cli import proof_process
from megatron_fixes.cli.proof_events import (
    Failure,
    Fetch,
    Result,
    Start,
    case_lines,
    ending,
    exit_code,
    parse,
    progress_line,
    table_rows,
    to_json,
)
from megatron_fixes.cli.prove import default_release, known_variants
from megatron_fixes.errors import MegatronFixesError, RefusedError, UsageError

Cli = Callable[..., Any]
CATALOG = catalog.load()
CASES = {
    "ddp": {"outcome": "defect", "summary": "wrong mean gradients", "seconds": 1.5, "ranks": 4, "by_rank": []},
    "pipeline": {"outcome": "clean", "summary": "all right", "seconds": 1.5, "ranks": 8, "by_rank": []},
}


def result(variant: str = "vanilla", outcome: str = "defect", expected: str = "defect", **other: Any) -> dict[str, Any]:
    row = {"event": "result", "release": "0.16.1", "backend": "gloo", "id": "MF0003", "variant": variant}
    return {**row, "outcome": outcome, "expected": expected, "evidence": CASES, **other}


def read(**fields: Any) -> Result:
    event = parse(json.dumps(fields))
    assert isinstance(event, Result)
    return event


def script(*events: Any, after: str = "") -> list[str]:
    """A process that prints events (or bare lines), and then does something."""
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    return [sys.executable, "-c", f"import os, sys, time\nfor line in {lines!r}: print(line, flush=True)\n{after}"]


def test_events_are_told_apart_and_noise_is_none() -> None:
    assert parse('{"event": "fetch", "release": "0.16.1"}') == Fetch("0.16.1")
    start = '{"event": "start", "release": "0.16.1", "variant": "vanilla", "fixes": ["MF0001"]}'
    assert parse(start) == Start("0.16.1", "vanilla", ("MF0001",))
    for noise in ("", "NCCL version 2.27", "{}", '{"event": "other"}', "[1]", '{"event": "result"}'):
        assert parse(noise) is None


def test_progress_says_what_is_going_on() -> None:
    assert progress_line(Fetch("0.16.1")) == "fetching 0.16.1"
    assert progress_line(Start("0.16.1", "patched", ("MF0001", "MF0003"))) == "0.16.1 patched: MF0001, MF0003"
    assert progress_line(read(**result())) == "0.16.1 vanilla: MF0003 defect, as expected"
    assert "NOT as expected (clean)" in progress_line(read(**result(expected="clean")))


def test_variants_of_a_fix_stand_together_with_a_line_a_case() -> None:
    results = [read(**result(v, id=fix_id)) for v in ("vanilla", "patched") for fix_id in ("MF0001", "MF0003")]
    rows = table_rows(results)
    assert [row[1:3] for row in rows] == [(i, v) for i in ("MF0001", "MF0003") for v in ("vanilla", "patched")]
    assert rows[0] == ("0.16.1", "MF0001", "vanilla", "defect", "yes", "ddp: wrong mean gradients\npipeline: all right")
    assert table_rows([read(**result(expected="clean"))])[0][4] == "NO: clean"


def test_a_reason_stands_where_no_case_ran() -> None:
    assert case_lines({"reason": "no patch for 0.17.0 yet"}) == ["no patch for 0.17.0 yet"]
    assert case_lines({"reason": "this proof has no case for nccl", "no_case": True}) == [
        "this proof has no case for nccl"
    ]


def test_json_is_one_object_a_release() -> None:
    results = [read(**result()), read(**result(release="0.16.0")), read(**result("patched", "clean", "clean"))]
    first, second = to_json(results)
    assert list(first) == ["release", "tree", "backend", "results"]
    assert first["tree"] == "megatron-core 0.16.1 as published"
    assert [list(row) for row in first["results"]] == [["id", "variant", "outcome", "expected", "evidence"]] * 2
    assert (first["release"], second["release"], len(second["results"])) == ("0.16.1", "0.16.0", 1)
    assert first["results"][0]["evidence"] == CASES


def test_exit_code_is_1_if_one_outcome_is_not_the_expected_one() -> None:
    good, bad = read(**result()), read(**result("patched", "defect", "clean"))
    assert (exit_code([good]), exit_code([good, bad])) == (0, 1)
    assert ending([good]) == "1 of 1 outcomes as expected, on megatron-core 0.16.1 as published"
    assert ending([good, bad]).endswith("0.16.1 MF0003 patched (got defect, expected clean)")


@pytest.mark.parametrize(("code", "kind"), [(1, RefusedError), (2, UsageError), (70, MegatronFixesError)])
def test_an_error_event_keeps_its_exit_code(code: int, kind: type[MegatronFixesError]) -> None:
    error = Failure("no torch", hint="Install it.", exit_code=code).error()
    assert type(error) is kind and (error.exit_code, error.hint) == (code, "Install it.")


def test_default_release_is_the_newest_with_a_patch() -> None:
    assert CATALOG.patch("MF0003", default_release(CATALOG, ["MF0003"])) is not None
    newest = default_release(CATALOG, list(CATALOG.matrix.fixes))
    assert any(CATALOG.patch(fix_id, newest) for fix_id in CATALOG.matrix.fixes)
    assert default_release(CATALOG, []) == list(CATALOG.matrix.releases)[-1]


def test_variants_come_in_their_own_order() -> None:
    assert known_variants([]) == VARIANTS
    assert known_variants(["PATCHED", "vanilla"]) == VARIANTS[:2]
    assert known_variants(["patched"]) == ("patched",)


def test_listening_passes_events_on_and_skips_noise() -> None:
    heard: list[Any] = []
    results, failure = proof_process.listen(script("noise", {"event": "fetch", "release": "x"}, result()), heard.append)
    assert failure is None and results == [read(**result())]
    assert heard == [Fetch("x"), read(**result())]


def test_a_process_that_dies_is_an_error_with_its_last_lines() -> None:
    results, failure = proof_process.listen(script(result(), after="raise RuntimeError('boom')"), lambda event: None)
    assert len(results) == 1 and failure is not None
    assert failure.exit_code == 70 and "RuntimeError: boom" in failure.message
    _, failure = proof_process.listen(script(after="os.kill(os.getpid(), 9)"), lambda event: None)
    assert failure is not None and failure.exit_code == 1 and "Killed" in failure.message


def test_no_result_at_all_is_an_error() -> None:
    _, failure = proof_process.listen(script(), lambda event: None)
    assert failure is not None and failure.exit_code == 1


def test_the_error_that_it_says_wins_over_its_exit_code() -> None:
    said = {"event": "error", "message": "no torch", "context": "", "hint": "Install it.", "exit_code": 2}
    _, failure = proof_process.listen(script(said, after="sys.exit(2)"), lambda event: None)
    assert isinstance(failure, UsageError) and failure.message == "no torch"


def test_the_process_does_not_import_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("PYTHONSAFEPATH needs Python 3.11")
    (tmp_path / "megatron_fixes").mkdir()
    (tmp_path / "megatron_fixes" / "__init__.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-c", f"import megatron_fixes; print({json.dumps(json.dumps(result()))})"]
    results, failure = proof_process.listen(command, lambda event: None)
    assert failure is None and len(results) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("stubborn", [False, True])
def test_no_process_is_left_behind(number: signal.Signals, stubborn: bool, tmp_path: Path) -> None:
    ignore = "import signal; signal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN)\n" if stubborn else ""
    (tmp_path / "child.py").write_text(f"{ignore}import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    # Stands for the command line: the same listening, interrupted from outside.
    parent = (
        "import sys\nfrom megatron_fixes.cli import proof_process\nproof_process.PATIENCE_S = 0.3\n"
        "real = proof_process.parse\n"
        "proof_process.parse = lambda line: print(line, flush=True) or real(line)\n"
        "from megatron_fixes.cli.signals import ending_by_exception\nwith ending_by_exception():\n"
        f"    proof_process.listen([sys.executable, {str(tmp_path / 'child.py')!r}], print)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, "-c", parent]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.send_signal(number)
        process.wait(timeout=20)
        assert process.returncode in (-number, 1, 128 + number)
    deadline = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
