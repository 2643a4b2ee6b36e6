# SPDX-License-Identifier: Apache-2.0
"""The command ``megatron-fixes``: which commands there are, and what a process ends with.

Exit codes: 0 fine, 1 the check failed or the work was refused, 2 the user's mistake, 70 our bug, 129 the terminal hung
up, 130 interrupted, 141 the reader of our output went away, 143 terminated. A command returns its exit code; failures
are raised as ``MegatronFixesError``.

A command's module is imported when it is called, so that ``--help`` and mistyped names cost no more than click
itself. A traceback is shown for our own bugs only, and only where MEGATRON_FIXES_TRACEBACK asks for it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from typing import TYPE_CHECKING

import click

from megatron_fixes import __version__
from megatron_fixes.cli import output
from megatron_fixes.cli.signals import EndedError, ending_by_exception
from megatron_fixes.config import TRACEBACK, switch
from megatron_fixes.errors import MegatronFixesError, RefusedError, UsageError, nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = "megatron-fixes"
INTERRUPTED = 130
READER_GONE = 141

# Command to its line in --help; its module is megatron_fixes.cli.<command>, its function <command>_command.
COMMANDS = {
    "list": "List the known fixes, or what each one is to a release.",
    "scan": "Say what each fix is to a Megatron-LM tree: needed, applied, fixed upstream, ...",
    "apply": "Put the needed fixes into a tree, all or nothing.",
    "revert": "Take them out again, to the byte.",
    "prove": "Show each defect on real megatron-core, and its absence once patched.",
    "explain": "Explain one fix on one screen.",
    "run": "Run a training command with the needed fixes put in at import.",
    "doctor": "Show what a job in this environment would get, and whether the overlay is in it.",
    "verify": "Check files of a release of megatron-fixes: signature, sums, manifest, provenance.",
}


class _Commands(click.Group):
    """Imports a command's module when the command is looked up."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"megatron_fixes.cli.{cmd_name}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            hint = f"Did you mean '{near}'?" if (near := nearest(name, COMMANDS)) else f"See `{PROGRAM} --help`."
            raise UsageError(f"got {name!r}, expected one of {', '.join(COMMANDS)}", hint=hint)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # Before click sees it, which would end with 1: "the check failed".
            ctx.exit(READER_GONE)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 fine, 1 the check failed or was refused, 2 a mistake in the command, 70 a bug of ours, "
    "129 the terminal hung up, 130 interrupted, 141 the reader of the output went away, 143 terminated.",
)
@click.version_option(__version__, prog_name=PROGRAM)
def cli() -> None:
    """Mend known defects of released Megatron-LM.

    \b
    Start with:  megatron-fixes scan [DIR]
    """


def _of_click(error: click.ClickException) -> MegatronFixesError:
    context = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else PROGRAM
    message = error.format_message().rstrip(".")
    return UsageError(message[:1].lower() + message[1:], hint=f"See `{context} --help`.")


def _bug(error: Exception) -> MegatronFixesError:
    if switch(TRACEBACK, os.environ).value:
        import traceback

        traceback.print_exception(error)
    what = f"{type(error).__name__}: {error}".split("\n")[0]
    return MegatronFixesError(
        f"this is a bug of megatron-fixes {__version__}, not a mistake of yours ({what})",
        hint="Report it on the issue tracker of megatron-fixes, with the command as typed and what "
        "MEGATRON_FIXES_TRACEBACK=1 makes it show.",
    )


def _run(arguments: list[str]) -> int:
    if not arguments:
        with click.Context(cli, info_name=PROGRAM) as context:
            output.note(cli.get_help(context))
        return UsageError.exit_code
    code = cli.main(arguments, prog_name=PROGRAM, standalone_mode=False)
    sys.stdout.flush()
    return code if isinstance(code, int) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code; never raises for what a user or a reader of the output did.

    Args:
        arguments: Without the program's name; None for this process's own.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    output.settle_streams()
    try:
        with ending_by_exception():
            return _run(given)
    except (click.Abort, KeyboardInterrupt):
        return _ended("SIGINT", INTERRUPTED, given)
    except EndedError as ended:
        return _ended(ended.name, ended.exit_code, given)
    except BrokenPipeError:
        return READER_GONE
    except click.ClickException as error:
        failure = _of_click(error)
    except MegatronFixesError as error:
        failure = error
    except OSError as error:
        failure = _of_system(error)
    except Exception as error:  # noqa: BLE001 - the last resort is to say that it is our bug
        failure = _bug(error)
    finally:
        output.flush_or_forget()
    return _fail(failure, as_json="--json" in given)


def _ended(name: str, code: int, given: Sequence[str]) -> int:
    """Say which signal ended the command, if anybody is left to read it."""
    look = "; what the tree holds now, `megatron-fixes scan` says" if given[:1] in (["apply"], ["revert"]) else ""
    with contextlib.suppress(OSError):
        output.note(f"ended by {name}{look}")
    return code


def _of_system(error: OSError) -> MegatronFixesError:
    """A file that is read without expecting trouble, or the output itself, gave an error of the system."""
    if switch(TRACEBACK, os.environ).value:
        return _bug(error)
    return RefusedError(
        f"got '{error.strerror or error}' from the system",
        context=str(error.filename or ""),
        hint="See to the cause, then repeat; MEGATRON_FIXES_TRACEBACK=1 shows where it happened.",
    )


def _fail(failure: MegatronFixesError, *, as_json: bool) -> int:
    try:
        output.failure(failure, as_json=as_json)
        sys.stdout.flush()
    except OSError:
        output.flush_or_forget()
    return failure.exit_code
