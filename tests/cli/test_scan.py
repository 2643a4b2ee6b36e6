# SPDX-License-Identifier: Apache-2.0
"""``scan`` on real 0.16.1 files: verdicts, remedies, what differs in a drifted function; nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fixes import catalog
from megatron_fixes.catalog.verdict import Difference
from megatron_fixes.cli.scan import MAX_DIFFERENCE_LINES, difference_lines

from .. import synthetic

Cli = Callable[..., Any]
BUFFER = "megatron/core/distributed/param_and_grad_buffer.py"
CATALOG = catalog.load()
PATCHES = [patch for patch in CATALOG.series["core_v0.16"].patches if "0.16.1" in patch.header.applies_to]
# In start_grad_sync, which MF0001 and MF0003 touch.
OLD = b"self.communication_stream.wait_stream(torch.cuda.default_stream())"


def verdicts(done: Any) -> dict[str, tuple[str, str | None]]:
    return {fix["id"]: (fix["verdict"], fix["remedy"]) for fix in done.json["fixes"]}


def test_json_has_the_agreed_shape(cli: Cli, tree: Path) -> None:
    done = cli("scan", tree, "--json")
    assert (done.code, done.err) == (0, "")
    assert list(done.json) == ["target", "release", "release_source", "interrupted", "from_other_patches", "fixes"]
    assert done.json["from_other_patches"] == []
    assert done.json["interrupted"] is None
    assert (done.json["target"], done.json["release"]) == (str(tree), "0.16.1")
    assert done.json["release_source"] == "megatron/core/package_info.py"
    keys = {("id", "slug", "verdict", "remedy", "reason", "differences", "misfit")}
    assert {tuple(fix) for fix in done.json["fixes"]} == keys
    assert [fix["id"] for fix in done.json["fixes"]] == sorted(CATALOG.matrix.fixes)
    assert verdicts(done) == {patch.fix_id: ("needed", "patch") for patch in PATCHES}


def test_check_fails_while_a_fix_is_needed(cli: Cli, tree: Path) -> None:
    assert cli("scan", tree, "--check").code == 1
    assert cli("apply", tree).code == 0
    assert cli("scan", tree, "--check").code == 0


def test_a_pipe_gets_one_line_a_fix_and_the_next_command(cli: Cli, tree: Path) -> None:
    lines = cli("scan", tree).out.splitlines()
    assert f"target   {tree}" in lines
    assert "release  0.16.1 (megatron/core/package_info.py)" in lines
    for patch in PATCHES:
        row = next(line for line in lines if line.startswith(patch.fix_id))
        assert row.split()[:4] == [patch.fix_id, "needed", "patch", CATALOG.matrix.fixes[patch.fix_id].slug]
        assert row.endswith(CATALOG.matrix.fixes[patch.fix_id].symptom)
    assert lines[-1] == f"next: megatron-fixes apply {tree}"


def test_scan_writes_nothing(cli: Cli, tree: Path, contents: Any) -> None:
    before = contents(tree)
    cli("scan", tree)
    assert contents(tree) == before


def test_a_drifted_function_is_shown_with_what_differs(cli: Cli, tree: Path, buffer: Path) -> None:
    buffer.write_bytes(buffer.read_bytes().replace(OLD, b"wait_for_everything(self)"))
    done = cli("scan", tree)
    assert done.code == 0
    assert "\nMF0001, MF0003 drifted:\n" in done.out
    assert f"start_grad_sync in {BUFFER}, nearest known text: 0.16.1" in done.out
    assert ": wait_for_everything(self)" in done.out
    assert done.out.splitlines()[-1] == "next: megatron-fixes explain MF0001"
    assert cli("scan", tree, "--check").code == 1
    done = cli("scan", tree, "--json")
    assert verdicts(done)["MF0001"] == ("drifted", None)
    (difference,) = done.json["fixes"][0]["differences"]
    assert list(difference) == ["function", "nearest", "changes"]
    assert difference["function"].startswith(f"{BUFFER}::") and "0.16.1" in difference["nearest"]
    assert any("wait_for_everything" in change for change in difference["changes"])


def test_a_patch_that_does_not_fit_is_shown_with_the_place(cli: Cli, tree: Path, buffer: Path) -> None:
    # Comments don't count for the verdict, but a hunk needs its lines.
    buffer.write_bytes(buffer.read_bytes().replace(b"# The RS/AR communication stream needs", b"# THE STREAM"))
    done = cli("scan", tree, "--json")
    assert verdicts(done) == {"MF0001": ("needed", "does-not-fit"), "MF0003": ("needed", "patch")}
    assert f"does not fit: {BUFFER}:" in done.json["fixes"][0]["reason"]
    assert done.json["fixes"][0]["misfit"].startswith(f"{BUFFER}:") and done.json["fixes"][1]["misfit"] is None
    done = cli("scan", tree)
    assert "MF0001 does not fit:" in done.out and "THE STREAM" in done.out
    assert done.out.splitlines()[-1] == f"next: megatron-fixes apply {tree} --only MF0003"


def test_a_tree_patched_by_git_is_applied(cli: Cli, git: Cli, tree: Path) -> None:
    git(tree, "init", "-q")
    git(tree, "apply", *(str(patch.path) for patch in PATCHES))
    assert verdicts(cli("scan", tree, "--json")) == {patch.fix_id: ("applied", None) for patch in PATCHES}


def test_a_tree_in_the_working_directory_that_was_not_looked_at_is_pointed_out(
    cli: Cli, tree: Path, release_tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = f"note: {tree} lies here too; to look at it: megatron-fixes scan .\n"
    monkeypatch.chdir(tree)
    monkeypatch.setattr("sys.path", [str(release_tree)])
    for command in ("scan", "doctor"):
        for options in ([], ["--json"]):
            done = cli(command, *options)
            assert done.code == 0 and note in done.err and str(release_tree) in done.out
    assert cli("scan", release_tree).err == cli("scan", ".").err == ""
    monkeypatch.chdir(tree.parent)
    assert cli("scan").err == ""
    monkeypatch.chdir(tree)
    monkeypatch.setattr("sys.path", [])
    done = cli("scan")
    assert done.code == 2 and "hint: Look at the tree in the working directory: megatron-fixes scan ." in done.err
    assert note in cli("doctor").err


def test_an_applied_tree_is_not_said_to_be_what_prove_looks_at(cli: Cli, tree: Path) -> None:
    assert cli("apply", tree).code == 0
    last = cli("scan", tree).out.splitlines()[-1]
    assert last == "next: megatron-fixes prove --release 0.16.1 shows them on the published release"


def test_a_path_that_is_not_megatron_is_the_users_mistake(cli: Cli, tmp_path: Path) -> None:
    done = cli("scan", tmp_path)
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines()[0].startswith("error: got a directory without megatron/core")
    assert f"  where: {tmp_path}" in done.err.splitlines()
    assert "  hint: " in done.err


def test_an_interrupted_apply_is_said_and_not_mended(cli: Cli, process: Cli, tree: Path, contents: Any) -> None:
    killed = (
        "import os, sys\n"
        "from megatron_fixes.cli.main import main\n"
        "from megatron_fixes.patching import transaction\n"
        "transaction.put_in_place = lambda *_: os._exit(9)\n"
        "main(sys.argv[1:])\n"
    )
    assert process("apply", tree, program=["-c", killed]).code == 9
    before = contents(tree)
    assert "an earlier apply was cut short; the next apply or revert will undo it" in cli("scan", tree).out
    assert "an earlier apply was cut short" in cli("scan", tree, "--json").json["interrupted"]
    done = cli("apply", tree, "--dry-run")
    assert done.code == 0 and "an earlier apply was cut short" in done.out
    assert contents(tree) == before
    done = cli("apply", tree)
    assert done.code == 0 and "mended: an interrupted apply was undone" in done.out
    assert cli("scan", tree, "--check").code == 0


@pytest.mark.parametrize("applied", [False, True])
def test_each_touched_file_is_parsed_as_it_is_and_as_it_would_be_however_many_fixes_there_are(
    cli: Cli, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, applied: bool
) -> None:
    from megatron_fixes.patching import scan

    synthetic.use(synthetic.build(tmp_path / "distribution"), monkeypatch)
    small = synthetic.write_tree(tmp_path / "small")
    if applied:
        assert cli("apply", small).code == 0
    parsed: list[bytes] = []
    real = scan.functions

    def count(content: bytes, only: frozenset[str]) -> Any:
        assert len(only) == 2  # of the three in each file
        parsed.append(content)
        return real(content, only)

    monkeypatch.setattr(scan, "functions", count)
    scan._prints.cache_clear()
    assert cli("scan", small).code == 0
    as_it_is, patched = synthetic.patched(), synthetic.patched(*synthetic.IDS)
    texts = [*patched.values()] if applied else [*as_it_is.values(), *patched.values()]
    assert sorted(parsed) == sorted(texts)


def test_differences_are_cut_at_the_limit() -> None:
    change = Difference("a.py::f", "0.16.1", tuple(f"+ {line}: x" for line in range(50)))
    lines = difference_lines([change])
    assert len(lines) == MAX_DIFFERENCE_LINES + 1
    assert lines[-1].strip() == "... and 31 more"
