#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Repeats proofs and counts their outcomes, to show that a proof is deterministic: one outcome, however often.

``python scripts/repeat_proofs.py --times 200 [--release 0.16.1] [MF0003 …]``; ends with 1 if any proof flips.
"""

from __future__ import annotations

import sys
from collections import Counter

import program

from megatron_fixes import catalog
from megatron_fixes.catalog.expectation import expected_outcome
from megatron_fixes.patching.ids import known_fixes
from megatron_fixes.proofs.__main__ import run_parent, variant_tree


@program.tells_errors
def main() -> int:
    """Run, count, and compare with what the matrix expects."""
    parser = program.parser(__doc__)
    parser.add_argument("fixes", nargs="*")
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--release", default="0.16.1")
    options = parser.parse_args()
    if options.times < 1:
        parser.error(f"got --times {options.times}, expected 1 or more")
    known, flips = catalog.load(), 0
    fix_ids = known_fixes(known.matrix, options.fixes) or list(known.matrix.fixes)
    for variant in ("vanilla", "patched"):
        with variant_tree(known, options.release, variant) as tree:
            for fix_id in fix_ids:
                results = run_parent(tree, "gloo", [fix_id] * options.times)
                outcomes = Counter(result["outcome"] for result in results)
                expected = expected_outcome(known, fix_id, options.release, variant)
                flips += outcomes != {expected: options.times}
                print(f"{options.release} {variant} {fix_id}: {dict(outcomes)}, expected {expected}", flush=True)
    return 1 if flips else 0


if __name__ == "__main__":
    sys.exit(main())
