# SPDX-License-Identifier: Apache-2.0
"""The happens-before recorder of the proofs: ``StreamOrderChecker`` over the streams of ``shim``.

Reads and writes alone; frees are left out: what memory a real allocator would hand out is not what these proofs are
about.
"""

from __future__ import annotations

from megatron_fixes.collectives import StreamOrderChecker
from megatron_fixes.proofs import host_memory, shim


def recording() -> StreamOrderChecker:
    """Record everything that happens inside the block; the shim must be installed.

    Returns:
        A checker, whose ``races`` are complete when the block ends.
    """
    return StreamOrderChecker(frees=False, tools=(shim.__file__, host_memory.__file__))
