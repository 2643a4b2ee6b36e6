# SPDX-License-Identifier: Apache-2.0
"""run starts what was named, with the overlay's variables, and refuses where they would do nothing.

That the started processes do run mended code is shown in tests/overlay, where the wheel is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from megatron_fixes.cli.run import command_line, environment

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["train.py", "--lr", "1"], ["python", "train.py", "--lr", "1"]),
        (["-m", "pretrain", "-x"], ["python", "-m", "pretrain", "-x"]),
        (["-c", "pass"], ["python", "-c", "pass"]),
        (["torchrun", "--nproc-per-node", "8", "train.py"], ["torchrun", "--nproc-per-node", "8", "train.py"]),
    ],
)
def test_scripts_and_modules_run_in_this_interpreter_and_programs_by_themselves(
    given: list[str], expected: list[str]
) -> None:
    assert command_line(given, "python") == expected


@pytest.mark.parametrize(
    ("only", "strict", "before", "fixes"),
    [
        ((), False, {}, "all"),
        ((), False, {"MEGATRON_FIXES": "MF0001"}, "MF0001"),
        (("MF0003",), False, {"MEGATRON_FIXES": "MF0001"}, "MF0003"),
        ((), True, {"MEGATRON_FIXES": "0"}, "all"),
    ],
)
def test_only_goes_before_the_environment_and_that_before_all(
    only: tuple[str, ...], strict: bool, before: dict[str, str], fixes: str
) -> None:
    made = environment(only, strict, {**before, "PATH": "x"})
    assert (made["MEGATRON_FIXES"], made["PATH"]) == (fixes, "x")
    assert ("MEGATRON_FIXES_STRICT" in made) == strict


def test_without_a_command_it_says_how(cli: Callable[..., object]) -> None:
    done = cli("run")
    assert done.code == 2  # type: ignore[attr-defined]
    assert "megatron-fixes run -- train.py" in done.err  # type: ignore[attr-defined]


def test_an_unknown_fix_is_refused_before_anything_starts(cli: Callable[..., object]) -> None:
    done = cli("run", "--only", "MF9999", "--", "train.py")
    assert done.code == 2  # type: ignore[attr-defined]
    assert "MF9999" in done.err  # type: ignore[attr-defined]
