# SPDX-License-Identifier: Apache-2.0
"""``megatron-fixes run``: starts a training command with the overlay on, in it and in every process it starts.

Sets the overlay's variables and replaces this process by the command, so that signals, exit code and output are
its own. What ends with ``.py``, and ``-m`` or ``-c``, is run by this interpreter; all else is a program, such
as torchrun. Refused where this interpreter reads no ``megatron-fixes.pth``: the variable alone would do nothing
there. Not handled: whether a program belongs to this environment.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from megatron_fixes import config
from megatron_fixes.cli.options import only_option
from megatron_fixes.errors import RefusedError, UsageError
from megatron_fixes.patching.ids import known_fixes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def command_line(arguments: Sequence[str], python: str) -> list[str]:
    """The command to start: this interpreter goes before a script, ``-m`` and ``-c``."""
    first = arguments[0]
    return [python, *arguments] if first.endswith(".py") or first in ("-m", "-c") else list(arguments)


def environment(only: Sequence[str], strict: bool, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of the command; ``--only`` goes before what the environment says, and that before ``all``."""
    asked = ",".join(only) or environ.get(config.FIXES, "")
    changes = {config.FIXES: asked if config.asked_fixes(asked) else config.ALL}
    if strict:
        changes[config.STRICT] = "1"
    return {**environ, **changes}


@click.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@only_option
@click.option("--strict", is_flag=True, help="Stop before training if a fix that was asked for can't be in force.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND [ARGS]...")
def run_command(only: tuple[str, ...], strict: bool, arguments: tuple[str, ...]) -> int:
    """Run a training command with the needed fixes put in at import; nothing on disk changes.

    \b
    megatron-fixes run -- train.py --lr 1e-4
    megatron-fixes run --strict -- torchrun --nproc-per-node 8 train.py
    """
    from megatron_fixes import overlay
    from megatron_fixes.catalog import load

    if not arguments:
        raise UsageError("got no command, expected one after --", hint="For example: megatron-fixes run -- train.py")
    only = known_fixes(load().matrix, only)
    facts = overlay.where_from()
    if facts.pth_problem:
        raise RefusedError(
            f"the overlay would not be in the command's processes: {facts.pth_problem}", context=sys.prefix
        )
    line = command_line(arguments, sys.executable)
    try:
        os.execvpe(line[0], line, environment(only, strict, os.environ))
    except OSError as error:
        raise UsageError(
            f"can't start {line[0]}: {error.strerror}", hint="Name a Python script, -m MODULE, or a program on PATH."
        ) from error
