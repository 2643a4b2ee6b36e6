# SPDX-License-Identifier: Apache-2.0
"""On every real release and every closed set of fixes, what is loaded is to the byte what ``apply`` writes.

Sets are those of the groups of fixes that share files (``patching/groups.py``), and the whole series.

Found and compiled, not executed: that needs torch (tests/overlay/torch, proofs).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_fixes import catalog, config
from megatron_fixes.cli.scan import for_apply_only
from megatron_fixes.overlay.finder import OverlayFinder
from megatron_fixes.overlay.rules import decide
from megatron_fixes.overlay.tables import load_tables, module_name
from megatron_fixes.patching.groups import independent_groups
from megatron_fixes.patching.plan import make_plan
from megatron_fixes.patching.scan import read_files, scan
from megatron_fixes.patching.target import find_target
from megatron_fixes.proofs.releases import fetch

CATALOG = catalog.load()
SETS = dict.fromkeys(
    (release, tuple(patch.fix_id for patch in chosen))
    for release, row in CATALOG.matrix.releases.items()
    for group in independent_groups(CATALOG.series[row.line])
    for chosen in group.closed_subsets()
)


@pytest.fixture
def finder(tmp_path: Path) -> Iterator[OverlayFinder]:
    """A finder that is on no path, with a cache of its own."""
    made = OverlayFinder()
    yield made
    made.retire()


def loaded(finder: OverlayFinder, tree: Path, asked: tuple[str, ...], cache: Path) -> dict[str, bytes]:
    """The text of every touched module as it would be executed."""
    finder.settle(config.overlay_settings(fixes=asked or ("none",), cache=cache))
    found = {}
    for path in load_tables().paths.values():
        if not (tree / path).is_file():
            continue
        name = module_name(path)
        where = [str((tree / path).parent)]
        spec = finder.find_spec(name, where)
        if spec is None or spec.loader is None:
            found[path] = (tree / path).read_bytes()
            continue
        content: bytes = spec.loader.get_data(spec.origin)  # type: ignore[attr-defined,arg-type]
        code = spec.loader.get_code(name)  # type: ignore[attr-defined]
        assert code.co_filename == spec.origin
        found[path] = content
    return found


@pytest.mark.parametrize(
    ("release", "asked"), SETS, ids=lambda value: value if isinstance(value, str) else "+".join(value)
)
def test_loaded_is_what_apply_writes(
    release: str, asked: tuple[str, ...], finder: OverlayFinder, tmp_path: Path
) -> None:
    tree = fetch(release, CATALOG.matrix)
    expected = {path: (tree / path).read_bytes() for path in load_tables().paths.values() if (tree / path).is_file()}
    needed = {row.finding.fix_id for row in scan(find_target(tree), CATALOG) if row.remedy == "patch"}
    assert needed.issuperset(asked)
    if asked:
        plan = make_plan(find_target(tree), CATALOG, asked)
        assert {patch.fix_id for patch in plan.patches} == set(asked)
        expected.update({path: after for path, (_, after) in plan.changes.items()})
    for _ in range(2):
        assert loaded(finder, tree, asked, tmp_path) == expected


@pytest.mark.parametrize("release", CATALOG.matrix.releases)
def test_all_puts_in_what_apply_without_names_does(release: str, finder: OverlayFinder, tmp_path: Path) -> None:
    tree = fetch(release, CATALOG.matrix)
    plan = make_plan(find_target(tree), CATALOG)
    found = loaded(finder, tree, ("all",), tmp_path)
    assert {path: found[path] for path in plan.changes} == {path: after for path, (_, after) in plan.changes.items()}
    missing = {row.finding.fix_id for row in plan.without_patch}
    refused = {refusal.fix for refusal in finder.process().refusals}
    assert refused == missing


@pytest.mark.parametrize("release", CATALOG.matrix.releases)
def test_no_touched_module_uses_its_file_name(release: str) -> None:
    tree = fetch(release, CATALOG.matrix)
    for path in load_tables().paths.values():
        text = (tree / path).read_bytes() if (tree / path).is_file() else b""
        assert not [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name) and n.id == "__file__"]


def test_the_compiled_matrix_is_the_matrix() -> None:
    assert catalog.load(compiled=True) == CATALOG


def test_an_applied_tree_is_left_as_it_is(finder: OverlayFinder, tmp_path: Path) -> None:
    tree = fetch("0.16.1", CATALOG.matrix)
    plan = make_plan(find_target(tree), CATALOG)
    files = [path for path in load_tables().paths.values() if (tree / path).is_file()]
    texts = {path: plan.changes[path][1] if path in plan.changes else (tree / path).read_bytes() for path in files}
    others = ("megatron/core/package_info.py", "megatron/core/__init__.py")
    for path, content in {**{path: (tree / path).read_bytes() for path in others}, **texts}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    assert loaded(finder, tmp_path, ("all",), tmp_path / "cache") == texts
    (held,) = finder.process().decisions.values()
    states = {row.finding.fix_id: row.finding.verdict for row in plan.already}
    states.update({patch.fix_id: "applied" for patch in plan.patches})
    left = {"gated": plan.gated, "refused": plan.without_patch}
    assert {fix.fix: fix.state for fix in held.decision.fixes} == {
        **states,
        **{row.finding.fix_id: state for state, rows in left.items() for row in rows},
    }
    assert [refusal.fix for refusal in held.decision.refusals] == [row.finding.fix_id for row in plan.without_patch]


def test_all_is_not_refused_for_a_gated_fix_that_drifted() -> None:
    tree = fetch("0.16.1", CATALOG.matrix)
    files = read_files(find_target(tree), CATALOG)
    router = "megatron/core/transformer/moe/router.py"
    files = {**files, router: files[router].replace(b"def apply_z_loss(self,", b"def apply_z_loss(self, mine,")}
    states = {}
    for asked in (["all"], ["all", "MF0023"]):
        decision, _ = decide(CATALOG, files, "0.16.1", "", asked)
        states[asked[-1]] = next(fix.state for fix in decision.fixes if fix.fix == "MF0023")
        assert bool(decision.refusals) == (asked[-1] == "MF0023")
    assert states == {"all": "gated", "MF0023": "refused"}


@pytest.mark.parametrize("claimed", [None, "0.99.0", "0.16.1rc0", "0.16.1", "0.16.1+abc"])
def test_scan_says_of_exactly_those_trees_that_only_apply_takes_them_which_the_overlay_refuses(
    claimed: str | None,
) -> None:
    tree = find_target(fetch("0.16.1", CATALOG.matrix))
    decision, changed = decide(CATALOG, read_files(tree, CATALOG), claimed, "", ["all"])
    refused = [refusal for refusal in decision.refusals if refusal.kind == "unknown-release"]
    assert bool(refused) == bool(for_apply_only(replace(tree, release=claimed), CATALOG)) == (not changed)
    assert all("`megatron-fixes scan` says how" in refusal.hint for refusal in refused)
    # What apply would do with it is the same, whatever it is called.
    assert make_plan(replace(tree, release=claimed), CATALOG).changes == make_plan(tree, CATALOG).changes
