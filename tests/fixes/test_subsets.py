# SPDX-License-Identifier: Apache-2.0
"""Whichever fixes are chosen, what is in is mended and nothing else is.

Fixes that share no file can't meet in one; so every closed subset is tried of those that do share files, and the
whole series is in ``test_table``. ``--all-subsets`` tries every closed subset of the whole series (``nox -s subsets``);
that every order of every subset gives the same bytes is in ``tests/catalog/test_patches.py``.

Needs torch (CPU) and the megatron-core packages, which are fetched once into the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_fixes import catalog
from megatron_fixes.patching.hunks import touched_paths
from megatron_fixes.proofs.__main__ import run_parent, variant_tree

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

CATALOG = catalog.load()


def sharing_files(series: catalog.Series) -> list[set[str]]:
    """The fixes of a series in groups that have no file in common."""
    groups: list[tuple[set[str], set[str]]] = []
    for patch in series.patches:
        ids, paths = {patch.fix_id}, set(touched_paths(patch.text))
        for other in [group for group in groups if group[1] & paths]:
            groups.remove(other)
            ids, paths = ids | other[0], paths | other[1]
        groups.append((ids, paths))
    return [ids for ids, _ in groups]


def subsets(line: str, *, every: bool) -> Iterator[tuple[str, ...]]:
    """Closed subsets of a line's series, but neither nothing nor all."""
    series = CATALOG.series[line]
    groups = sharing_files(series)
    for chosen in list(series.closed_subsets())[1:-1]:
        ids = tuple(patch.fix_id for patch in chosen)
        if every or any(set(ids) <= group for group in groups):
            yield ids


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = metafunc.config.getoption("--all-subsets")
    cases = [(line, ids) for line in CATALOG.series for ids in subsets(line, every=every)]
    metafunc.parametrize(("line", "ids"), cases, ids=[f"{line}-{'-'.join(ids)}" for line, ids in cases])


def test_a_closed_subset_mends_what_is_in_it_and_nothing_else(line: str, ids: tuple[str, ...]) -> None:
    release = CATALOG.matrix.lines()[line][-1]
    series = CATALOG.series[line]
    with variant_tree(CATALOG, release, "patched", ids) as tree:
        results = list(run_parent(tree, "gloo", series.ids(), briefly=True))
    assert {result["id"]: result["outcome"] for result in results} == {
        fix_id: "clean" if fix_id in ids else "defect" for fix_id in series.ids()
    }
