# SPDX-License-Identifier: Apache-2.0
"""The matrix is refused with the path of what is wrong in it, and has a cell for every fix and release."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from packaging.version import Version

from megatron_fixes.catalog.data import matrix_path
from megatron_fixes.catalog.matrix import load_matrix
from megatron_fixes.errors import DataError
from tests.loading import ROOT

if TYPE_CHECKING:
    from pathlib import Path

TEXT = matrix_path().read_text("utf-8")


def test_every_fix_has_a_cell_for_every_release() -> None:
    matrix = load_matrix(matrix_path())
    assert all(set(fix.cells) == set(matrix.releases) for fix in matrix.fixes.values())
    assert matrix.fixes["MF0001"].first_fixed() == "0.17.0"
    assert matrix.fixes["MF0003"].first_fixed() is None
    assert matrix.fixes["MF0003"].affected()[:2] == ("0.16.0", "0.16.1")


def test_since_is_the_first_release_that_was_seen_to_need_it_or_an_older_one_by_report() -> None:
    matrix = load_matrix(matrix_path())
    for fix_id, fix in matrix.fixes.items():
        first, _, rest = fix.since.partition(" ")
        oldest = fix.affected()[0]
        if rest.startswith("by report"):
            assert Version(first) < Version(min(matrix.releases, key=Version)) <= Version(oldest), fix_id
        else:
            assert first == oldest, fix_id


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
        ("kind: same", "kind: other", "kind"),
        ("kind: same", "kind: related", "what a related link is about"),
        ("kind: same", "kind: same, about: something", "what a related link is about"),
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


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("schema: 1\n", "schema: 1\nschema: 1\n", "schema"),
        ('  "0.12.1": {line', '  "0.12.0": {line', "0.12.0"),
        ("  MF0002:\n", "  MF0001:\n", "MF0001"),
        ("    since: ", "    slug: other\n    since: ", "slug"),
        ('      "0.12.1": {verdict', '      "0.12.0": {verdict', "0.12.0"),
        ("verdict: needed, tested", "verdict: not-affected, verdict: needed, tested", "verdict"),
        ('  "12.1":\n    nvrtc', '  "11.8":\n    nvrtc', "11.8"),
        ("  sm_86: {gpus", "  sm_80: {gpus", "sm_80"),
        ("  sm_86:\n", "  sm_80:\n", "sm_80"),
        ('    "12.1":\n      bf16', '    "11.8":\n      bf16', "11.8"),
        ("      bf16: {status: compiled}\n", "      bf16: {status: compiled}\n" * 2, "bf16"),
    ],
)
def test_a_key_that_stands_twice_is_refused_with_its_line(tmp_path: Path, old: str, new: str, key: str) -> None:
    before, found, after = TEXT.partition(old)
    assert found
    path = tmp_path / "matrix.yaml"
    path.write_text(before + new + after, "utf-8")
    with pytest.raises(DataError, match=f"got the key {key} twice in one mapping, first on line") as caught:
        load_matrix(path)
    assert caught.value.context == f"{path}:{(before + new).rpartition(key)[0].count(chr(10)) + 1}"


@pytest.mark.parametrize("merge", ["*ampere_has_no_fp8", "[*ampere_has_no_fp8, *ampere_has_no_fp8]"])
def test_a_key_beside_a_merge_that_brings_it_wins(tmp_path: Path, merge: str) -> None:
    path, cell = tmp_path / "matrix.yaml", "fp8: *ampere_has_no_fp8"
    assert cell in TEXT
    path.write_text(TEXT.replace(cell, f"fp8: {{<<: {merge}, reason: another}}", 1), "utf-8")
    cells = load_matrix(path).gpus["sm_80"]
    assert [cells[cuda]["fp8"].reason for cuda in ("12.1", "12.4")] == ["another", cells["11.8"]["fp8"].reason]
    assert cells["12.1"]["fp8"].source == cells["11.8"]["fp8"].source


def test_the_json_form_is_read_without_a_yaml_parser() -> None:
    code = "import sys; from megatron_fixes.catalog import load; load(compiled=True); sys.exit('yaml' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
