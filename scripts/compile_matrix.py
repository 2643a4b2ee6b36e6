#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Generates ``megatron_fixes/catalog/matrix.json`` from ``compat_matrix.yaml``, for the overlay.

The overlay works while a training job imports Megatron, where a YAML parser costs too much. Run after a change to
the matrix; ``--check`` only compares.
"""

from __future__ import annotations

import sys

from generated import only_check, settle

from megatron_fixes.catalog.data import compiled_matrix_path, matrix_path
from megatron_fixes.catalog.matrix import load_matrix

if __name__ == "__main__":
    only_compared = only_check(__doc__)
    sys.exit(settle(lambda: load_matrix(matrix_path()), compiled_matrix_path(), check=only_compared))
