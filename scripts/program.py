# SPDX-License-Identifier: Apache-2.0
"""What every script does alike: its help begins as its docstring does, and a failure is one sentence and an exit code.

Standard library only. Not handled: errors that are not ours, which stay tracebacks for maintainers to read.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from typing import TYPE_CHECKING, ParamSpec

from megatron_fixes.errors import MegatronFixesError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

P = ParamSpec("P")


def parser(about: str | None) -> argparse.ArgumentParser:
    """A parser of arguments, for the script with this docstring."""
    return argparse.ArgumentParser(description=(about or "").partition("\n")[0].replace("``", ""))


@contextlib.contextmanager
def needs_environment() -> Iterator[None]:
    """End with 2, and with a word on which Python to take, where what is imported inside is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "megatron_fixes":
            raise
        print(
            f"error: got no module {error.name} in {sys.executable}, expected this project's requirements",
            file=sys.stderr,
        )
        print(f"  hint: Run `make setup` once, then `.venv/bin/python {sys.argv[0]} ...`.", file=sys.stderr)
        raise SystemExit(2) from None


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
