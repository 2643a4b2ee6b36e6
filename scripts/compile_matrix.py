#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Generates ``megatron_fixes/catalog/matrix.json`` from ``compat_matrix.yaml``, for the overlay.

The overlay works while a training job imports Megatron, where a YAML parser costs too much. Run after a change to
the matrix; ``--check`` only compares.
"""

from __future__ import annotations

import sys

import msgspec

from megatron_fixes.catalog.data import compiled_matrix_path, matrix_path
from megatron_fixes.catalog.matrix import load_matrix


def main(arguments: list[str]) -> int:
    """Write the compiled matrix, or with ``--check`` say whether it is what would be written."""
    content = msgspec.json.format(msgspec.json.encode(load_matrix(matrix_path())), indent=1) + b"\n"
    path = compiled_matrix_path()
    if "--check" in arguments:
        same = path.is_file() and path.read_bytes() == content
        print("matrix.json is up to date" if same else "matrix.json is out of date: run this without --check")
        return 0 if same else 1
    path.write_bytes(content)
    print(f"wrote {path.name}: {len(content)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
