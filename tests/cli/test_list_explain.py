# SPDX-License-Identifier: Apache-2.0
"""``list`` and ``explain``: what the matrix and the patches know, as a table, on one screen and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fixes import catalog
from megatron_fixes.catalog.ranges import compact
from megatron_fixes.cli.explain import MEANS, NUMERICS, changed_lines
from megatron_fixes.patching.hunks import touched_paths

Cli = Callable[..., Any]
CATALOG = catalog.load()
FIXES = CATALOG.matrix.fixes
KNOWN = ["0.14.0", "0.15.0", "0.15.1", "0.9.0", "0.16.0", "0.10.0"]


@pytest.mark.parametrize(
    ("releases", "text"),
    [
        ([], ""),
        (["0.15.0"], "0.15.0"),
        (["0.15.1", "0.14.0", "0.15.0"], "0.14.0 - 0.15.1"),
        (["0.9.0", "0.10.0"], "0.9.0 - 0.10.0"),
        (["0.14.0", "0.15.1", "0.16.0"], "0.14.0, 0.15.1 - 0.16.0"),
        (KNOWN, "0.9.0 - 0.16.0"),
    ],
)
def test_ranges_break_where_a_release_is_missing(releases: list[str], text: str) -> None:
    assert compact(releases, KNOWN) == text


def test_list_says_of_each_fix_what_is_affected_and_patched(cli: Cli) -> None:
    done = cli("list", "--json")
    assert [fix["id"] for fix in done.json["fixes"]] == sorted(FIXES)
    for fix in done.json["fixes"]:
        known = FIXES[fix["id"]]
        assert (fix["slug"], fix["symptom"]) == (known.slug, known.symptom)
        assert (fix["affected"], fix["fixed_in"]) == (list(known.affected()), known.first_fixed())
        assert set(fix["patch_for"]) <= set(fix["affected"])
        (row,) = [line for line in cli("list").out.splitlines() if line.startswith(fix["id"])]
        assert compact(fix["affected"], CATALOG.matrix.releases) in row


def test_list_of_a_release_shows_its_column(cli: Cli) -> None:
    done = cli("list", "--release", "0.17.0", "--json")
    assert done.json["release"] == "0.17.0"
    for fix in done.json["fixes"]:
        cell = FIXES[fix["id"]].cells["0.17.0"]
        assert (fix["verdict"], fix["tested"]) == (cell.verdict, list(cell.tested))
        patch = "patch" if CATALOG.patch(fix["id"], "0.17.0") else "none"
        assert fix["remedy"] == (patch if cell.verdict == "needed" else None)


def test_list_takes_several_releases_tags_and_all(cli: Cli) -> None:
    several = cli("list", "--release", "core_v0.16.1, v0.17.0", "--release", "0.16.1", "--json")
    assert [column["release"] for column in several.json] == ["0.16.1", "0.17.0"]
    assert [c["release"] for c in cli("list", "--release", "all", "--json").json] == list(CATALOG.matrix.releases)
    rows = cli("list", "--release", "0.16.1,0.17.0").out.splitlines()[1:]
    assert [row.split()[:2] for row in rows] == [[r, f] for r in ("0.16.1", "0.17.0") for f in sorted(FIXES)]


@pytest.mark.parametrize("fix_id", FIXES)
def test_explain_fits_on_one_screen_and_names_files_that_exist(
    cli: Cli, fix_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    done = cli("explain", fix_id.lower())
    lines = done.out.splitlines()
    # A patch takes a line, and there may be one for each line of Megatron-LM. A screen has some 50 lines.
    assert done.code == 0 and len([line for line in lines if "git apply" not in line]) <= 45
    assert max(len(line) for line in lines if "git apply" not in line) <= 100
    assert FIXES[fix_id].symptom in " ".join(done.out.split())
    assert f"megatron-fixes prove {fix_id} --release " in done.out
    commands = [line[12:] for line in lines if line[12:].startswith("git apply")]
    paths = [shlex.split(command, comments=True)[2] for command in commands]
    patches = [series.get(fix_id) for series in CATALOG.series.values()]
    assert [Path(path) for path in paths] == [patch.path for patch in patches if patch]
    for patch in filter(None, patches):
        added, removed = changed_lines(patch)
        releases = compact(patch.header.applies_to, CATALOG.matrix.releases)
        assert f"{releases} (+{added} -{removed})" in " ".join(done.out.split())
        assert set(touched_paths(patch.text)) <= {line[12:] for line in lines}


def test_gated_fixes_are_listed_as_such(cli: Cli) -> None:
    gated = [fix_id for fix_id in sorted(FIXES) if CATALOG.is_gated(fix_id)]
    assert gated and gated != sorted(FIXES)
    for arguments in ([], ["--release", "0.16.1"]):
        done = cli("list", *arguments)
        assert [line.split()[0] for line in done.out.splitlines() if "(gated: only by name)" in line] == gated
        assert [fix["id"] for fix in cli("list", *arguments, "--json").json["fixes"] if fix["gated"]] == gated


def test_explain_takes_a_slug_too(cli: Cli) -> None:
    slug = FIXES["MF0003"].slug
    for name in (slug, slug.upper(), f"MF0003-{slug}", f"MF0003-{slug}.patch", " mf0003 "):
        assert cli("explain", name).out == cli("explain", "MF0003").out
    done = cli("explain", "no-such-fix")
    assert done.code == 2 and "got no-such-fix" in done.err


def test_explain_as_json_says_the_same(cli: Cli) -> None:
    done = cli("explain", "MF0003", "--json").json
    assert done["proof"] == "megatron_fixes.proofs.mf0003"
    assert done["tested"]["0.16.1"] == list(FIXES["MF0003"].cells["0.16.1"].tested)
    patch = CATALOG.patch("MF0003", "0.16.1")
    assert patch is not None
    (found,) = [known for known in done["patches"] if "0.16.1" in known["releases"]]
    assert found["path"] == str(patch.path)
    assert (found["added"], found["removed"]) == changed_lines(patch)


def test_changed_lines_are_counted_in_the_diff_only() -> None:
    for series in CATALOG.series.values():
        for patch in series.patches:
            diff = patch.text[patch.text.index("\ndiff --git ") :].splitlines()
            added = sum(line.startswith("+") for line in diff) - sum(line.startswith("+++ b/") for line in diff)
            removed = sum(line.startswith("-") for line in diff) - sum(line.startswith("--- a/") for line in diff)
            assert changed_lines(patch) == (added, removed)


def test_every_word_of_matrix_and_header_has_an_explanation() -> None:
    assert {means for fix in FIXES.values() for cell in fix.cells.values() for means in cell.tested} <= set(MEANS)
    assert set(NUMERICS) == {"neutral", "changing", "gated"}
