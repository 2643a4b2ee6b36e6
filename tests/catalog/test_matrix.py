# SPDX-License-Identifier: Apache-2.0
"""The matrix is refused with the path of what is wrong in it, and has a cell for every fix and release."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from megatron_fixes.catalog.data import matrix_path
from megatron_fixes.catalog.matrix import load_matrix
from megatron_fixes.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

TEXT = matrix_path().read_text("utf-8")


def test_every_fix_has_a_cell_for_every_release() -> None:
    matrix = load_matrix(matrix_path())
    assert all(set(fix.cells) == set(matrix.releases) for fix in matrix.fixes.values())
    assert matrix.fixes["MF0001"].first_fixed() == "0.17.0"
    assert matrix.fixes["MF0003"].first_fixed() is None
    assert matrix.fixes["MF0003"].affected()[:2] == ("0.16.0", "0.16.1")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema: 1", "schema: 2", "$.schema"),
        ("verdict: needed", "verdict: unknown", "verdict"),
        ("tested: [gloo]", "tested: []", "tested"),
        ("tested: [gloo]", "tested: [guessed]", "tested"),
        ("line: core_v0.14", "line: 0.14", "line"),
        ('      "0.14.0": {verdict: needed, tested: [recorder, nccl-h200]}\n', "", "0.14.0"),
        ("    slug: multi", "    slugg: multi", "slugg"),
        ("schema: 1", "schema: [1", ""),
        ("tested: [gloo]", "tested: [untested]", "a reason if untested"),
        ("tested: [gloo]", "tested: [gloo, untested], reason: no GPU", "a reason if untested"),
        ("tested: [gloo]", "tested: [gloo], reason: no GPU", "a reason if untested"),
    ],
)
def test_a_broken_matrix_is_refused_with_the_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in TEXT
    path = tmp_path / "matrix.yaml"
    path.write_text(TEXT.replace(old, new, 1), "utf-8")
    with pytest.raises(DataError) as caught:
        load_matrix(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
