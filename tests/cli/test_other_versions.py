# SPDX-License-Identifier: Apache-2.0
"""A tree that another version of megatron-fixes applied to: other patches, fewer fixes, a journal of another form."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .. import synthetic
from ..synthetic import EDITS, FIRST, IDS, SECOND, patched

Cli = Callable[..., Any]
# MF9001 has another text, and MF9003 is not known any more.
UPDATED = {
    "MF9001": {FIRST: ("len('launch')", "len('mended better')"), SECOND: ("len('wait')", "len('mended')")},
    "MF9002": EDITS["MF9002"],
}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The version that applies, and the one that comes after it."""
    folder = tmp_path_factory.mktemp("distributions")
    return synthetic.build(folder / "first"), synthetic.build(folder / "updated", UPDATED)


@pytest.fixture
def applied(
    distributions: tuple[Path, Path], tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, contents: Any
) -> tuple[Path, dict[str, bytes]]:
    """A tree with the first version's fixes in it, and its bytes of before; the other version is in use."""
    tree = synthetic.write_tree(tmp_path / "tree")
    before = contents(tree)
    synthetic.use(distributions[0], monkeypatch)
    assert cli("apply", tree, "--json").json["applied"] == list(IDS)
    synthetic.use(distributions[1], monkeypatch)
    return tree, before


Applied = tuple[Path, dict[str, bytes]]


def test_revert_brings_back_the_bytes_whatever_the_catalogue_knows(cli: Cli, applied: Applied, contents: Any) -> None:
    tree, before = applied
    done = cli("revert", tree)
    assert (done.code, done.err) == (0, "")
    assert all(f"reverted  {fix_id}" in done.out for fix_id in IDS)
    assert contents(tree) == before


def test_scan_says_what_is_there_and_the_command_it_names_renews_it(
    cli: Cli, applied: Applied, contents: Any, distributions: tuple[Path, Path], process: Cli
) -> None:
    tree, before = applied
    out = cli("scan", tree).out
    assert "MF9001, MF9003 came from patches that this version of megatron-fixes does not have" in out
    assert cli("scan", tree, "--json").json["from_other_patches"] == ["MF9001", "MF9003"]
    command = out.splitlines()[-1].removeprefix("next: ")
    assert command == f"megatron-fixes revert {tree} && megatron-fixes apply {tree}"
    for part in command.split(" && "):
        assert process(*part.split()[1:], root=distributions[1]).code == 0
    assert {path: (tree / path).read_bytes() for path in (FIRST, SECOND)} == patched(*UPDATED, edits=UPDATED)
    assert "came from" not in cli("scan", tree).out
    assert cli("revert", tree).code == 0
    assert contents(tree) == before


def test_apply_is_refused_with_the_reason_and_changes_nothing(cli: Cli, applied: Applied, contents: Any) -> None:
    tree, _ = applied
    before = contents(tree)
    done = cli("apply", tree)
    assert (done.code, done.out) == (1, "")
    assert "came from patches that this version of megatron-fixes does not have" in done.err
    assert f"megatron-fixes revert {tree} && megatron-fixes apply {tree}" in done.err
    assert contents(tree) == before


def test_apply_of_what_is_there_already_says_so_too(cli: Cli, applied: Applied) -> None:
    tree, _ = applied
    done = cli("apply", tree, "--only", "MF9002")
    assert done.code == 0 and "MF9001, MF9003 came from patches" in done.out
    assert cli("apply", tree, "--only", "MF9002", "--dry-run").out.count("came from patches") == 1


def test_a_further_fix_is_stacked_and_all_is_taken_out_at_once(
    distributions: tuple[Path, Path], cli: Cli, tmp_path: Path, contents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = synthetic.write_tree(tmp_path / "tree")
    before = contents(tree)
    synthetic.use(distributions[0], monkeypatch)
    assert cli("apply", tree, "--only", "MF9001,MF9003").code == 0
    synthetic.use(distributions[1], monkeypatch)
    assert cli("apply", tree, "--only", "MF9002").code == 0
    assert cli("revert", tree, "--json").json["reverted"] == list(IDS)
    assert contents(tree) == before


def test_what_git_took_back_is_no_longer_said_to_be_there(cli: Cli, applied: Applied) -> None:
    tree, before = applied
    for path in (FIRST, SECOND):
        (tree / path).write_bytes(before[path])
    assert "came from" not in cli("scan", tree).out
    assert cli("apply", tree).code == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 2, "transactions": []}, "hint: Upgrade megatron-fixes, or revert with the version that wrote it"),
        ({"schema": 0}, "hint: Revert with the version that wrote it"),
        ({"unheard_of": 1}, "hint: look at"),
    ],
)
def test_a_journal_of_another_form_is_kept_and_told_by_every_command(
    cli: Cli, applied: Applied, contents: Any, change: dict[str, Any], said: str
) -> None:
    tree, _ = applied
    journal = tree / ".megatron-fixes/journal.json"
    journal.write_text(json.dumps({**json.loads(journal.read_text()), **change}))
    before = contents(tree)
    for arguments in (["apply"], ["apply", "--only", "MF9002"], ["revert"]):
        done = cli(*arguments, tree)
        assert (done.code, done.out) == (1, "") and said in done.err, done.err
    done = cli("scan", tree)
    assert done.code == 0 and "the journal can't be read" in done.out
    assert "the journal can't be read" in cli("apply", tree, "--dry-run").err
    assert contents(tree) == before


def test_the_first_version_still_reverts_after_the_other_was_refused(
    cli: Cli, applied: Applied, contents: Any, distributions: tuple[Path, Path], process: Cli
) -> None:
    tree, before = applied
    assert cli("apply", tree).code == 1
    assert process("revert", tree, root=distributions[0]).code == 0
    assert contents(tree) == before
