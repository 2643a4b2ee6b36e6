# SPDX-License-Identifier: Apache-2.0
"""The program: ``megatron-fixes`` and ``python -m megatron_fixes`` are both this file."""

import sys


def main() -> int:
    """Run the command line, and return the exit code; Ctrl-C shows no traceback from here on."""
    try:
        from megatron_fixes.cli.start import run

        return run("megatron_fixes.cli.main")
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
