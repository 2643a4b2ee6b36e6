# SPDX-License-Identifier: Apache-2.0
"""Whichever fixes are chosen, what is in is mended and nothing else is.

Fixes that share no file can't meet in one, so the groups of those that do are looked at one by one
(``patching/groups.py``), on the newest release of each line; the whole series is in ``test_table``. Of each group: each
fix alone with what it requires, and all but one; a group whose patches make the same edits in several lines is looked
at in the newest of them. ``--all-subsets`` tries every closed subset in every line (``nox -s subsets``); that every
order of every subset gives the same bytes is in ``tests/catalog/test_patches.py``.

Needs torch (CPU) and the megatron-core packages, which are fetched once into the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from unidiff import PatchSet

from megatron_fixes import catalog
from megatron_fixes.patching.groups import independent_groups
from megatron_fixes.proofs.__main__ import run_parent, variant_tree

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

CATALOG = catalog.load()


def subsets(group: catalog.Series, *, every: bool) -> Iterator[tuple[str, ...]]:
    """Closed subsets of a group of fixes, but neither nothing nor all."""
    alone = [group.closure([fix_id]) for fix_id in group.ids()]
    for chosen in list(group.closed_subsets())[1:-1]:
        if every or chosen in alone or len(chosen) == len(group.patches) - 1:
            yield tuple(patch.fix_id for patch in chosen)


def edits(group: catalog.Series) -> tuple[object, ...]:
    """What the patches of a group add and remove, without where and around what."""
    return tuple(
        (patch.fix_id, file.path, tuple(str(line) for hunk in file for line in hunk if line.line_type in "+-"))
        for patch in group.patches
        for file in PatchSet(patch.text)
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = metafunc.config.getoption("--all-subsets")
    groups = [group for series in CATALOG.series.values() for group in independent_groups(series)]
    if not every:
        # The newest line comes last and stays.
        groups = list({edits(group): group for group in groups}.values())
    cases = [(group, ids) for group in groups for ids in subsets(group, every=every)]
    metafunc.parametrize(("group", "ids"), cases, ids=[f"{group.line}-{'-'.join(ids)}" for group, ids in cases])


def test_a_closed_subset_mends_what_is_in_it_and_nothing_else(group: catalog.Series, ids: tuple[str, ...]) -> None:
    release = CATALOG.matrix.lines()[group.line][-1]
    with variant_tree(CATALOG, release, "patched", ids) as tree:
        results = list(run_parent(tree, "gloo", group.ids(), briefly=True))
    assert {result["id"]: result["outcome"] for result in results} == {
        fix_id: "clean" if fix_id in ids else "defect" for fix_id in group.ids()
    }
