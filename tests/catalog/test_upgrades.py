# SPDX-License-Identifier: Apache-2.0
"""An upgrade that brought a fix along is noticed, and one that did not is not mistaken for it.

Asked of each release as published, as ``scan`` asks it, and of its bare files, which name no release. The other method
that ``benchmarks/upgrades.py`` measures is held to be able to answer either way.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from megatron_fixes import catalog
from megatron_fixes.patching.hunks import touched_paths
from megatron_fixes.patching.scan import Row, read_files, scan, scan_files
from megatron_fixes.patching.target import find_target
from megatron_fixes.proofs.releases import fetch

from ..loading import load_program

CATALOG = catalog.load()
RELEASES = tuple(CATALOG.matrix.releases)


def having(release: str, verdict: str) -> set[str]:
    return {fix_id for fix_id, fix in CATALOG.matrix.fixes.items() if fix.cells[release].verdict == verdict}


def said(rows: list[Row]) -> set[str]:
    return {row.finding.fix_id for row in rows if row.finding.verdict == "fixed-upstream"}


@pytest.mark.parametrize("release", RELEASES)
def test_scan_calls_fixed_upstream_what_the_release_has_and_nothing_that_it_needs(release: str) -> None:
    target = find_target(fetch(release, CATALOG.matrix))
    assert said(scan(target, CATALOG)) == having(release, "fixed-upstream")
    assert said(scan_files(read_files(target, CATALOG), CATALOG, None)) == having(release, "fixed-upstream")


def test_there_are_fixes_that_later_releases_have() -> None:
    assert sum(len(having(release, "fixed-upstream")) for release in RELEASES) > 50


@pytest.fixture(scope="module")
def upgrades() -> ModuleType:
    return load_program("benchmarks/upgrades.py")


def test_a_patch_tried_in_reverse_is_found_where_it_is_and_nowhere_else(upgrades: ModuleType, tmp_path: Path) -> None:
    patch = CATALOG.patches_of("MF0015")[-1]
    release = patch.header.applies_to[-1]
    pristine = fetch(release, CATALOG.matrix)
    for path in touched_paths(patch.text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes((pristine / path).read_bytes())
    assert upgrades.by_script(patch, tmp_path) == upgrades.APPLIES
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply", patch.path], cwd=tmp_path, check=True)
    assert upgrades.by_script(patch, tmp_path) == upgrades.THERE
    for path in touched_paths(patch.text):
        (tmp_path / path).unlink()
    assert upgrades.by_script(patch, tmp_path) == upgrades.STOPS
