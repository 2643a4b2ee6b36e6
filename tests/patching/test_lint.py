# SPDX-License-Identifier: Apache-2.0
"""The lint finds each kind of fault in real patches that were spoilt, with file and line, all in one run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fixes.catalog.data import matrix_path, patches_root
from megatron_fixes.catalog.matrix import load_matrix
from megatron_fixes.patching.lint import lint

MATRIX = load_matrix(matrix_path())
P1 = "core_v0.16/MF0001-multi-distopt-default-stream-race.patch"
P3 = "core_v0.16/MF0003-pp-double-grad-reduce-multi-distopt.patch"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copytree(patches_root(), tmp_path / "patches")
    return tmp_path / "patches"


def faults(root: Path) -> list[str]:
    return [str(fault) for fault in lint(root, MATRIX)]


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        (P1, "Fix-Id: MF0001", "Fix-Id: MF0003", "got MF0003, expected MF0001 as in the file's name"),
        (P1, "Fix-Id: MF0001", "Fix-Id: MF0999", "MF0999 has no row in compat_matrix.yaml"),
        (P1, "Applies-To: 0.16.0 0.16.1", "Applies-To: 0.16.0", "expected 0.16.0 0.16.1 as in the matrix"),
        (P1, "Fixed-In: 0.17.0", "Fixed-In: 0.18.0", "expected 0.17.0 as in the matrix"),
        (P1, "Upstream-Status: Backport", "Upstream-Status: Pending", "Backport goes with a release"),
        (P3, "Fixed-In: open", "Fixed-In: 0.18.0 (commit 0123456789)", "expected open as in the matrix"),
        (
            P1,
            "Proof: megatron_fixes.proofs.mf0001",
            "Proof: megatron_fixes.proofs.mf0003",
            "expected megatron_fixes.proofs.mf0001",
        ),
        (P1, "Requires:", "Requires: MF0003", "expected it earlier in the series"),
        (P1, " 100644\n", " 100755\n", "expected 40-digit hashes and mode 100644"),
        (P1, "index b192f182d9b55cf79d5e2689b21ab4d542a199a6", "index b192f182d9", "expected 40-digit hashes"),
        (P1, "/megatron/core/", "/megatron/training/", "below a/megatron/core/"),
        (
            P3,
            "+        self.grad_reduce_dispatched = False\n",
            "+        assert self.grad_reduce_dispatched\n",
            "adds an assert",
        ),
        (
            P3,
            "+        self.grad_reduce_dispatched = False\n",
            "+        self.grad_reduce_dispatched = False \n",
            "trailing space",
        ),
        (P1, "@@ -416,10 +416,10 @@", "@@ -416,10 +416,11 @@", ""),
        ("core_v0.16/series", "MF0003", "MF0004", "is listed but not there"),
        ("core_v0.16/series", "MF0003", "#MF0003", "is not listed in the series"),
        (
            "core_v0.16/series",
            "MF0001-",
            "MF0001-multi-distopt-default-stream-race.patch\nMF0001-",
            "listed a second time",
        ),
    ],
)
def test_each_fault_is_found_in_a_spoilt_copy(root: Path, name: str, old: str, new: str, message: str) -> None:
    path = root / name
    text = path.read_text("utf-8")
    assert old in text
    path.write_text(text.replace(old, new), "utf-8")
    found = faults(root)
    assert any(message in fault and "core_v0.16" in fault for fault in found), found


def test_a_hunk_with_two_lines_of_context_is_found(root: Path) -> None:
    path = root / P1
    text = path.read_text("utf-8")
    head, last = text.rsplit("\n ", 1)
    spoilt = head.replace("@@ -526,7 +526,7 @@", "@@ -526,6 +526,6 @@") + "\n"
    assert last.startswith('            f"Communication call')
    path.write_text(spoilt, "utf-8")
    assert any("3 and 2 lines of context, expected 3 and 3" in fault for fault in faults(root))


def test_too_many_changed_lines_are_found(root: Path) -> None:
    path = root / P3
    text = path.read_text("utf-8")
    line = "+        self.grad_reduce_dispatched = False\n"
    many = text.replace("@@ -188,6 +188,9 @@", "@@ -188,6 +188,109 @@").replace(line, line * 101, 1)
    path.write_text(many, "utf-8")
    assert any("expected at most 100" in fault for fault in faults(root))


def test_a_gated_fix_must_be_marked_in_the_series_and_no_other(root: Path) -> None:
    series = root / "core_v0.16" / "series"
    text = series.read_text()
    series.write_text(text.replace("  # gated", ""))
    assert any("MF0023" in fault and "'# gated'" in fault for fault in faults(root))
    series.write_text(text.replace(Path(P3).name, Path(P3).name + "  # gated"))
    assert any("MF0003" in fault and "'# gated'" in fault for fault in faults(root))


def test_a_wrong_name_and_a_wrong_folder_are_found(root: Path) -> None:
    (root / "v0.16").mkdir()
    (root / P1).rename(root / "core_v0.16" / "stream.patch")
    (root / "core_v0.16" / "series").write_text("stream.patch\n" + Path(P3).name + "\n")
    found = faults(root)
    assert any("expected core_vX.Y" in fault for fault in found)
    assert any("expected MFNNNN-<slug>.patch" in fault for fault in found)


def test_faults_of_all_files_come_in_one_run_and_end_with_1(root: Path) -> None:
    for name in (P1, P3):
        path = root / name
        path.write_text(path.read_text("utf-8").replace("Numerics: changing", "Numerics: so-so"), "utf-8")
    command = [sys.executable, "-m", "megatron_fixes.patching.lint", str(root)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert {line.split(":")[0] for line in done.stdout.splitlines()} == {str(root / P1), str(root / P3)}
