# SPDX-License-Identifier: Apache-2.0
"""``python -m megatron_fixes``: the same as the command ``megatron-fixes``."""

import sys

from megatron_fixes.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
