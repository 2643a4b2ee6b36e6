# SPDX-License-Identifier: Apache-2.0
"""A patch with a mistake in it does not pass its proof on the newest release that it is for (``mistakes``).

Needs torch (CPU) and the megatron-core packages, which are fetched once into the cache. Real DistributedDataParallel,
schedules and optimizers, real gloo process groups.
"""

from __future__ import annotations

import importlib

import pytest

from megatron_fixes import catalog
from megatron_fixes.proofs.__main__ import run_parent, variant_tree

CATALOG = catalog.load()
MISTAKES = [
    pytest.param(fix_id, *edit, id=f"{fix_id}-{mistake.replace(' ', '-')}")
    for fix_id in CATALOG.matrix.fixes
    if CATALOG.patched_releases(fix_id)
    for mistake, edit in importlib.import_module(f"tests.fixes.mistakes.{fix_id.lower()}").MISTAKES.items()
]


@pytest.mark.parametrize(("fix_id", "file", "right", "wrong"), MISTAKES)
def test_a_patch_with_a_mistake_in_it_does_not_pass(fix_id: str, file: str, right: str, wrong: str) -> None:
    newest = CATALOG.patched_releases(fix_id)[-1]
    with variant_tree(CATALOG, newest, "patched", [fix_id]) as tree:
        path = tree / file
        text = path.read_text("utf-8")
        assert text.count(right) == 1
        path.write_text(text.replace(right, wrong), "utf-8")
        (result,) = run_parent(tree, "gloo", [fix_id], briefly=True)
    assert result["outcome"] != "clean", result["evidence"]
