# SPDX-License-Identifier: Apache-2.0
"""A tree that names no known release is judged by the release that its code is, and gets that one's patches.

Asked of each release as published: under a name that is not its own, with fixes in it, cut down to a few files, and
with one file of another release.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from megatron_fixes import catalog
from megatron_fixes.catalog.series import PatchFile
from megatron_fixes.errors import DoesNotFitError, RefusedError
from megatron_fixes.patching import scan as scanning
from megatron_fixes.patching.plan import make_plan
from megatron_fixes.patching.scan import looks_like, read_files, scan_files
from megatron_fixes.patching.target import Target, find_target
from megatron_fixes.proofs.releases import fetch

CATALOG = catalog.load()
RELEASES = tuple(CATALOG.matrix.releases)
BUFFER = "megatron/core/distributed/param_and_grad_buffer.py"
CLIPPING = "megatron/core/optimizer/clip_grads.py"
OPTIMIZER = "megatron/core/optimizer/optimizer.py"


def target(release: str) -> Target:
    return find_target(fetch(release, CATALOG.matrix))


def files_of(release: str) -> dict[str, bytes]:
    return read_files(target(release), CATALOG)


@pytest.mark.parametrize("claimed", [None, "0.99.0"])
@pytest.mark.parametrize("release", RELEASES)
def test_a_release_under_another_name_gets_the_same_verdicts_and_the_same_bytes(
    release: str, claimed: str | None
) -> None:
    files = files_of(release)
    like = looks_like(CATALOG, files, claimed)
    assert like is not None and release in like.alike
    assert like.functions == like.of and CATALOG.matrix.releases[like.release].line == line_of(release)
    assert not CATALOG.matrix.releases[like.release].yanked
    for row in scan_files(files, CATALOG, claimed):
        cell = CATALOG.matrix.fixes[row.finding.fix_id].cells[release]
        assert row.finding.verdict == cell.verdict
        patch = CATALOG.patch(row.finding.fix_id, release)
        assert row.remedy == (None if cell.verdict != "needed" else "patch" if patch else "none")
        assert "though" not in row.finding.reason
    named, nameless = make_plan(target(release), CATALOG), make_plan(replace(target(release), release=claimed), CATALOG)
    assert [patch.name for patch in nameless.patches] == [patch.name for patch in named.patches]
    assert nameless.changes == named.changes


def line_of(release: str) -> str:
    return CATALOG.matrix.releases[release].line


@pytest.mark.parametrize("release", RELEASES)
def test_with_the_fixes_in_it_a_tree_looks_like_the_same_release(release: str) -> None:
    files = files_of(release)
    plan = make_plan(target(release), CATALOG)
    after = {**files, **{path: content for path, (_, content) in plan.changes.items()}}
    before, patched = looks_like(CATALOG, files, None), looks_like(CATALOG, after, None)
    assert before is not None and patched is not None
    assert (patched.release, patched.functions) == (before.release, patched.of)
    found = {row.finding.fix_id: row.finding.verdict for row in scan_files(after, CATALOG, None)}
    assert {found[patch.fix_id] for patch in plan.patches} == {"applied"}


def test_the_release_that_is_claimed_is_taken_among_those_that_are_alike() -> None:
    for claimed in ("0.18.0", "0.18.1", "0.18.2"):
        like = looks_like(CATALOG, files_of("0.18.0"), claimed)
        assert like is not None
        assert (like.release, like.alike) == (claimed, ("0.18.0", "0.18.1", "0.18.2"))


def test_of_a_few_files_nothing_is_inferred() -> None:
    files = {BUFFER: files_of("0.16.1")[BUFFER]}
    assert looks_like(CATALOG, files, None) is None
    assert looks_like(CATALOG, {}, None) is None
    verdicts = {row.finding.fix_id: row.finding.verdict for row in scan_files(files, CATALOG, None)}
    assert verdicts["MF0013"] == "drifted"  # its file is not there, which says nothing


def test_a_tree_that_calls_itself_another_release_is_told_by_its_code() -> None:
    like = looks_like(CATALOG, files_of("0.17.1"), "0.16.1")
    assert like is not None and like.release == "0.17.1"
    rows = {row.finding.fix_id: row.finding for row in scan_files(files_of("0.17.1"), CATALOG, "0.16.1")}
    assert {row.release for row in rows.values()} == {"0.17.1"}


@pytest.mark.parametrize("path", [BUFFER, OPTIMIZER])
@pytest.mark.parametrize(
    ("release", "donor"), [("0.16.1", "0.14.0"), ("0.16.1", "0.18.2"), ("0.13.1", "0.12.3"), ("0.18.2", "0.15.3")]
)
def test_with_one_file_of_another_release_all_is_put_in_or_what_is_named_instead(
    release: str, donor: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = {**files_of(release), path: files_of(donor)[path]}
    monkeypatch.setattr("megatron_fixes.patching.plan.read_files", lambda *_: mixed)
    tree = replace(target(release), release="0.99.0")
    try:
        plan = make_plan(tree, CATALOG)
    except RefusedError as error:
        named = re.search(r"--only ([MF0-9,]+)", error.hint)
        assert named is not None
        plan = make_plan(tree, CATALOG, named[1].split(","))
    ids = [patch.fix_id for patch in plan.patches]
    assert ids and len(ids) == len(set(ids))


def test_patches_of_two_lines_that_fit_one_by_one_only_are_refused_once_and_clearly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # No release's files give such a mixture; a fork's may.
    mixed = {**files_of("0.16.1"), CLIPPING: files_of("0.18.2")[CLIPPING]}
    monkeypatch.setattr("megatron_fixes.patching.plan.read_files", lambda *_: mixed)
    real = scanning.apply_all

    def strictly(known: catalog.Catalog, patches: Sequence[PatchFile], *rest: object) -> dict[str, bytes]:
        if len({patch.name.split("/")[0] for patch in patches}) > 1:
            raise DoesNotFitError("lines don't mix", context=patches[-1].name)
        return real(known, patches, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(scanning, "apply_all", strictly)
    tree = replace(target("0.16.1"), release=None)
    with pytest.raises(RefusedError) as refused:
        make_plan(tree, CATALOG)
    message = str(refused.value.message)
    assert "MF0022 does not fit (the target is a mixture of releases, and beside other fixes " in message
    named = re.search(r"--only ([MF0-9,]+)", refused.value.hint)
    assert named is not None
    plan = make_plan(tree, CATALOG, named[1].split(","))
    assert {patch.name.split("/")[0] for patch in plan.patches} == {"core_v0.16"}
