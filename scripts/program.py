# SPDX-License-Identifier: Apache-2.0
"""What every script does alike: its help begins as its docstring does, and a failure is one sentence and an exit code.

Standard library only. Not handled: errors that are not ours, which stay tracebacks for maintainers to read.
"""

from __future__ import annotations

import argparse
import functools
import sys
from typing import TYPE_CHECKING, ParamSpec

from megatron_fixes.errors import MegatronFixesError

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")


def parser(about: str | None) -> argparse.ArgumentParser:
    """A parser of arguments, for the script with this docstring."""
    return argparse.ArgumentParser(description=(about or "").partition("\n")[0].replace("``", ""))


def tells_errors(main: Callable[P, int]) -> Callable[P, int]:
    """Where a function that returns an exit code would raise one of our errors, print it and return its code."""

    @functools.wraps(main)
    def run(*arguments: P.args, **options: P.kwargs) -> int:
        try:
            return main(*arguments, **options)
        except MegatronFixesError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code

    return run
