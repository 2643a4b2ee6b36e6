# SPDX-License-Identifier: Apache-2.0
"""Each hunk of each patch is needed: without it the proof does not pass.

A hunk that makes the same edit in several lines is taken out of the newest of them.

Needs torch (CPU) and the megatron-core packages, which are fetched once into the cache.
"""

from __future__ import annotations

import json
import re

import pytest
from unidiff import Hunk, PatchSet

from megatron_fixes import catalog
from megatron_fixes.patching.hunks import apply_patch
from megatron_fixes.proofs.__main__ import run_parent, variant_tree

CATALOG = catalog.load()


def edit(hunk: Hunk) -> tuple[str, ...]:
    """The lines that a hunk adds and removes, without where and around what."""
    return tuple(str(line) for line in hunk if line.line_type in "+-")


# The newest line comes last and stays.
EDITS = {
    (patch.fix_id, file.path, edit(hunk)): (patch, number, at)
    for series in CATALOG.series.values()
    for patch in series.patches
    for number, file in enumerate(PatchSet(patch.text))
    for at, hunk in enumerate(file)
}
HUNKS = [
    pytest.param(patch, number, at, id=f"{patch.name.split('-')[0]}-file{number + 1}-hunk{at + 1}")
    for patch, number, at in EDITS.values()
]


@pytest.mark.parametrize(("patch", "number", "at"), HUNKS)
def test_without_any_one_hunk_the_proof_does_not_pass(patch: catalog.PatchFile, number: int, at: int) -> None:
    release = patch.header.applies_to[-1]
    file = PatchSet(patch.text)[number]
    left_out = file[at]
    head = f"diff --git {file.source_file} {file.target_file}\n--- {file.source_file}\n+++ {file.target_file}\n"
    rest = head + "".join(str(hunk) for hunk in file if hunk is not left_out)
    requires = patch.header.requires
    with variant_tree(CATALOG, release, "patched" if requires else "vanilla", requires) as base:
        original = (base / file.path).read_bytes()
    with variant_tree(CATALOG, release, "patched", [patch.fix_id]) as tree:
        changed = apply_patch(rest, {file.path: original}, source="all hunks but one") if len(file) > 1 else {}
        (tree / file.path).write_bytes(changed.get(file.path, original))
        (result,) = run_parent(tree, "gloo", [patch.fix_id], briefly=True)
    assert result["outcome"] in ("defect", "not-runnable")
    if result["outcome"] == "not-runnable":
        # The code broke without the hunk, over a name in it; it is not that the proof found no ground to stand on.
        added = "".join(line.value for line in left_out if line.is_added)
        complained = set(re.findall(r"'(\w+)'", json.dumps(result["evidence"])))
        assert set(re.findall(r"\w+", added)) & complained, result["evidence"]
