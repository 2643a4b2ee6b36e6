# SPDX-License-Identifier: Apache-2.0
"""Stands in for click: as much of it as the commands scan, apply and revert use, on top of argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megatron_fixes.errors import UsageError


class Context:
    """What a callback is given; nothing is in it."""


class Parameter:
    """An option or an argument, as a decorator adds it."""

    def __init__(self, names: Sequence[str], settings: dict[str, Any]) -> None:
        self.names = names
        self.settings = settings
        plain = [name for name in names if not name.startswith("-")]
        self.name = plain[0] if plain else names[-1].lstrip("-").replace("-", "_")

    def get_error_hint(self, context: Context) -> str:
        """What a message calls it."""
        return f"'{self.names[0]}'"

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Add it to a parser."""
        given, text = self.settings, self.settings.get("help", "").replace("%", "%%")
        flags = [name for name in self.names if name.startswith("-")]
        if not flags:
            count = None if given.get("required", True) else "?"
            parser.add_argument(self.name, metavar=given.get("metavar", self.name.upper()), nargs=count)
        elif given.get("is_flag"):
            parser.add_argument(*flags, dest=self.name, action="store_true", help=text)
        else:
            parser.add_argument(
                *flags, dest=self.name, action="append", default=[], metavar=given.get("metavar"), help=text
            )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=f"See `{self.prog} --help`.")


class Command:
    """A function with its parameters."""

    def __init__(self, name: str, callback: Callable[..., int]) -> None:
        self.name = name
        self.callback = callback
        self.parameters: list[Parameter] = list(reversed(getattr(callback, "__parameters__", [])))

    def main(self, program: str, arguments: Sequence[str]) -> int:
        """Read the arguments and run; ``SystemExit`` once help was shown."""
        about = (self.callback.__doc__ or "").replace("%", "%%")
        parser = _Parser(f"{program} {self.name}", description=about, allow_abbrev=False)
        for parameter in self.parameters:
            parameter.add_to(parser)
        values = vars(parser.parse_args(list(arguments)))
        for parameter in self.parameters:
            if parameter.settings.get("multiple"):
                values[parameter.name] = tuple(values[parameter.name])
            if (callback := parameter.settings.get("callback")) is not None:
                values[parameter.name] = callback(Context(), parameter, values[parameter.name])
        return self.callback(**values)


def _parameter(*names: str, **settings: Any) -> Callable[[Any], Any]:
    def add(function: Any) -> Any:
        function.__parameters__ = [*getattr(function, "__parameters__", []), Parameter(names, settings)]
        return function

    return add


argument = option = _parameter


def command(name: str) -> Callable[[Callable[..., int]], Command]:
    """Make a command of a function."""
    return lambda function: Command(name, function)
