# SPDX-License-Identifier: Apache-2.0
"""Last part of apply.py: reads the command line and runs the package's own commands, as plain text.

Exit codes and messages are those of ``megatron-fixes``. Not here: list, explain, prove, run, doctor and verify.
"""

from __future__ import annotations

import contextlib
import importlib
import os

from megatron_fixes import __version__
from megatron_fixes.catalog.data import require_whole
from megatron_fixes.cli import output
from megatron_fixes.cli.signals import EndedError, ending_by_exception
from megatron_fixes.errors import MegatronFixesError, RefusedError, UsageError

PROGRAM = "python3 apply.py"
COMMANDS = ("scan", "apply", "revert")
USAGE = f"""usage: {PROGRAM} {{{",".join(COMMANDS)}}} ...

Mend known defects of released Megatron-LM; megatron-fixes {__version__} in one file, for machines without pip.

  {PROGRAM} scan TREE [--check]                  say what each fix is to a tree; writes nothing
  {PROGRAM} apply TREE [--only ID,...] [--dry-run]   put the needed fixes in, all or nothing
  {PROGRAM} revert TREE                          take them out again, to the byte

`{PROGRAM} COMMAND --help` names all options. Exit codes: 0 fine, 1 the check failed or was refused, 2 a mistake
in the command, 70 a bug of ours, 129 the terminal hung up, 130 interrupted, 141 the reader of the output went away,
143 terminated."""


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"megatron-fixes, version {__version__}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        raise UsageError(f"got {name!r}, expected one of {', '.join(COMMANDS)}", hint=f"See `{PROGRAM} --help`.")
    require_whole()
    command = getattr(importlib.import_module(f"megatron_fixes.cli.{name}"), f"{name}_command")
    code: int = command.main(PROGRAM, arguments[1:])
    return code


def _of_us(error: Exception) -> MegatronFixesError:
    if os.environ.get("MEGATRON_FIXES_TRACEBACK"):
        import traceback

        traceback.print_exception(error)
    way = "MEGATRON_FIXES_TRACEBACK=1 shows where it happened."
    if isinstance(error, OSError):
        message = f"got '{error.strerror or error}' from the system"
        return RefusedError(message, context=str(error.filename or ""), hint=f"See to the cause, then repeat; {way}")
    what = f"{type(error).__name__}: {error}".split("\n")[0]
    return MegatronFixesError(f"this is a bug of megatron-fixes {__version__} ({what})", hint=f"Report it; {way}")


def main(arguments: list[str]) -> int:
    """Run the command line; return the exit code."""
    output.settle_streams()
    output.is_terminal = lambda stream=None: False
    try:
        with ending_by_exception():
            return _run(arguments)
    except EndedError as ended:
        with contextlib.suppress(OSError):
            output.note(f"ended by {ended.name}; what a tree holds now, `{PROGRAM} scan` says")
        return ended.exit_code
    except SystemExit as error:
        return int(error.code or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141
    except MegatronFixesError as error:
        failure = error
    except Exception as error:  # noqa: BLE001 - the last resort is to say that it is our bug
        failure = _of_us(error)
    finally:
        output.flush_or_forget()
    output.failure(failure, as_json="--json" in arguments)
    output.flush_or_forget()
    return failure.exit_code
