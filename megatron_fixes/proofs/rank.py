# SPDX-License-Identifier: Apache-2.0
"""One rank of one NCCL case as a process: ``python -m megatron_fixes.proofs.rank TREE FIX CASE RANK DIR PARENT``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megatron_fixes.proofs.parent import load, prepare, run_rank
from megatron_fixes.proofs.ranks import die_with


def main(arguments: list[str]) -> None:
    """Import, run, write evidence, and leave without tearing the process group down (its peers may be gone)."""
    tree, fix_id, name, rank, folder, parent = arguments
    die_with(int(parent))
    prepare(Path(tree), "nccl")
    case = next(case for case in load(fix_id, Path(tree)).on("nccl") if case.name == name)
    run_rank(case, int(rank), Path(folder))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
