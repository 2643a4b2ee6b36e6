# SPDX-License-Identifier: Apache-2.0
"""The real patches on the real releases: every closed subset applies, in every allowed order, to one result.

Subsets are those of the groups of fixes that share files (``patching/groups.py``): the others can't meet.

Needs the megatron-core packages, which are fetched once into the cache; nothing of them is imported.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fixes import catalog
from megatron_fixes.patching.groups import independent_groups
from megatron_fixes.patching.hunks import apply_patch, touched_paths
from megatron_fixes.patching.lint import lint
from megatron_fixes.patching.scan import scan, verdicts
from megatron_fixes.patching.target import find_target
from megatron_fixes.proofs.releases import fetch

CATALOG = catalog.load()
RELEASES = tuple(CATALOG.matrix.releases)
PATCHES = [(line, patch) for line, series in CATALOG.series.items() for patch in series.patches]
ROOT = Path(__file__).parents[2]


def series_of(release: str) -> catalog.Series:
    return CATALOG.series[CATALOG.matrix.releases[release].line]


def pristine(release: str) -> dict[str, bytes]:
    tree = fetch(release, CATALOG.matrix)
    paths = {path for patch in series_of(release).patches for path in touched_paths(patch.text)}
    return {path: (tree / path).read_bytes() for path in paths}


def test_no_patch_or_series_breaks_a_rule() -> None:
    assert [str(fault) for fault in lint(catalog.patches_root(), CATALOG.matrix)] == []


def test_the_newest_patch_of_an_open_defect_names_a_thread_about_it_if_there_is_one() -> None:
    for fix_id, fix in CATALOG.matrix.fixes.items():
        heads = [patch.header for patch in CATALOG.patches_of(fix_id)]
        assert {head.bug for head in heads} <= {"none", *(link.url for link in fix.links)}, fix_id
        if fix.first_fixed() is None:
            same = [link.url for link in fix.links if link.kind == "same"]
            assert (heads[-1].bug in same) if same else heads[-1].bug == "none", fix_id


GROUPS = [
    pytest.param(release, group, id=f"{release}-{'+'.join(group.ids())}")
    for release in RELEASES
    for group in independent_groups(series_of(release))
]


@pytest.mark.parametrize(("release", "group"), GROUPS)
def test_every_closed_subset_applies_in_every_allowed_order_to_one_result(release: str, group: catalog.Series) -> None:
    """By induction: whichever fix of a subset comes last, the bytes are the same; and so for the subset before it."""
    subsets = {frozenset(p.fix_id for p in subset): subset for subset in group.closed_subsets()}
    after: dict[frozenset[str], dict[str, bytes]] = {frozenset(): pristine(release)}
    for ids in sorted(subsets, key=len)[1:]:
        results = []
        for last in subsets[ids]:
            if (before := after.get(ids - {last.fix_id})) is not None:
                results.append({**before, **apply_patch(last.text, before, source=last.name)})
        assert results
        assert all(result == results[0] for result in results)
        after[ids] = results[0]
        found = verdicts(CATALOG, results[0], release)
        assert {fix_id for fix_id, finding in found.items() if finding.verdict == "applied"} == ids


@pytest.mark.parametrize("release", RELEASES)
def test_scan_says_of_every_release_what_the_matrix_says(release: str) -> None:
    rows = {row.finding.fix_id: row for row in scan(find_target(fetch(release, CATALOG.matrix)), CATALOG)}
    for fix_id, fix in CATALOG.matrix.fixes.items():
        needed = fix.cells[release].verdict == "needed"
        assert rows[fix_id].finding.verdict == fix.cells[release].verdict
        assert rows[fix_id].finding.release == release
        assert rows[fix_id].remedy == (None if not needed else "patch" if CATALOG.patch(fix_id, release) else "none")


@pytest.mark.parametrize(("line", "patch"), PATCHES, ids=[patch.name for _, patch in PATCHES])
def test_index_lines_name_the_real_bytes_before_and_after(line: str, patch: catalog.PatchFile) -> None:
    def blob(content: bytes) -> str:
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    # One of the releases: 0.17.0 and 0.17.1 differ elsewhere in files that one patch mends in both.
    named = []
    for release in patch.header.applies_to:
        files = pristine(release)
        for required in series_of(release).closure(patch.header.requires):
            files.update(apply_patch(required.text, files, source=required.name))
        changed = apply_patch(patch.text, files, source=patch.name)
        named.append(all(f"index {blob(files[p])}..{blob(after)} 100644" in patch.text for p, after in changed.items()))
    assert any(named)


@pytest.mark.parametrize("release", [r for r in RELEASES if series_of(r).patches])
def test_plain_git_apply_gives_the_same_bytes(tmp_path: Path, release: str) -> None:
    files = pristine(release)
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for patch in series_of(release).patches:
        subprocess.run(["git", "-C", tmp_path, "apply", patch.path], check=True)
        files.update(apply_patch(patch.text, files, source=patch.name))
    assert {path: (tmp_path / path).read_bytes() for path in files} == files


def test_the_table_of_fingerprints_is_what_would_be_recorded_now() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "record_fingerprints.py"), "--check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
