# SPDX-License-Identifier: Apache-2.0
"""``apply`` and ``revert`` on real files: all or nothing, twice is once, and back to the byte."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import (
    BARE,
    BUFFER,
    CATALOG,
    GATED,
    IDS,
    NOT_NEEDED,
    PATCHES,
    RELEASE,
    SERIES,
    expected,
    files_of,
    findings,
    nothing,
    requiring,
)

SLUG = "pp-double-grad-reduce-multi-distopt"
Cli = Callable[..., Any]
# No other fix requires it: what is required comes before in the series.
LAST = PATCHES[-1]


def beforehand(fix_ids: list[str]) -> dict[str, str]:
    """What to know of some fixes before they are put in."""
    fixes = CATALOG.matrix.fixes
    return {fix_id: fixes[fix_id].before_you_apply for fix_id in fix_ids if fixes[fix_id].before_you_apply}


def test_apply_twice_then_revert_as_processes_gives_the_same_bytes(process: Cli, tree: Path, contents: Any) -> None:
    before = contents(tree)
    first = process("apply", tree)
    assert (first.code, first.err) == (0, "")
    for fix_id in IDS:
        assert f"applied   {fix_id}" in first.out
    assert first.out.splitlines()[-1] == f"to take them out: megatron-fixes revert {tree}"
    patched = contents(tree)
    assert [path for path in before if patched[path] != before[path]] == [p for p in before if p in files_of()]
    assert findings(process("scan", tree, "--json")) == expected(applied=IDS)
    second = process("apply", tree)
    assert (second.code, second.out.splitlines()[-1]) == (0, nothing())
    assert contents(tree) == patched
    back = process("revert", tree)
    assert back.code == 0 and all(f"restored  {path}\n" in back.out for path in files_of())
    assert contents(tree) == before
    again = process("revert", tree)
    assert (again.code, again.out.splitlines()[-1]) == (0, "nothing to revert")


def test_the_result_is_what_git_apply_gives(cli: Cli, git: Cli, tree: Path, contents: Any) -> None:
    assert cli("apply", tree).code == 0
    ours = {path: content for path, content in contents(tree).items() if not path.startswith(".megatron-fixes/")}
    assert cli("revert", tree).code == 0
    git(tree, "init", "-q")
    git(tree, "apply", *(str(patch.path) for patch in PATCHES))
    assert contents(tree) == ours


def test_what_to_know_beforehand_is_said_of_fixes_that_are_put_in_and_of_no_others(cli: Cli, tree: Path) -> None:
    assert "an optimizer state that was saved without" in beforehand(IDS)["MF0027"]
    for arguments, told in ((["--dry-run"], IDS), (["--only", "MF0001"], []), ([], IDS), ([], [])):
        out = cli("apply", tree, *arguments).out.splitlines()
        notes = [line for line in out if line.startswith("note ")]
        assert notes == [f"note      {fix_id}  {sentence}" for fix_id, sentence in beforehand(told).items()]
    assert f"beforehand  {beforehand(IDS)['MF0027'][:60]}" in cli("explain", "MF0027").out
    assert "beforehand" not in cli("explain", "MF0001").out


def test_json_of_both_has_the_agreed_shape(cli: Cli, tree: Path) -> None:
    done = cli("apply", tree, "--json")
    head = {"target": str(tree), "release": RELEASE}
    applied = {"applied": IDS, "already": NOT_NEEDED, "required": [], "files": files_of(), "notes": []}
    applied.update(without_patch=BARE, gated=GATED, before_you_apply=beforehand(IDS))
    assert done.json == {**head, **applied, "recovered": None, "dry_run": False}
    applied.update(before_you_apply={}, applied=[], already=sorted([*IDS, *NOT_NEEDED]), files=[])
    assert cli("apply", tree, "--json").json == {**head, **applied, "recovered": None, "dry_run": False}
    done = cli("revert", tree, "--json")
    assert done.json == {
        **head,
        **{"reverted": IDS, "forgotten": [], "files": files_of(), "notes": [], "recovered": None},
    }


@pytest.mark.parametrize(
    "arguments", [["--only", "mf0003"], ["--only", " MF0003 , mf0003"], ["--only=MF0003,"], ["--only", SLUG]]
)
def test_only_takes_ids_and_slugs_however_they_are_written(cli: Cli, tree: Path, arguments: list[str]) -> None:
    assert cli("apply", tree, *arguments, "--json").json["applied"] == ["MF0003"]
    assert cli("apply", tree, "--only", "MF0001", "--only", "MF0003", "--json").json["applied"] == ["MF0001"]


@pytest.mark.parametrize("ids", ["MF9999", "x", "", ","])
def test_only_refuses_what_is_no_fix(cli: Cli, tree: Path, contents: Any, ids: str) -> None:
    before = contents(tree)
    done = cli("apply", tree, "--only", ids)
    assert done.code == 2 and done.err.startswith("error: got ")
    assert contents(tree) == before


def test_dry_run_writes_nothing_and_prints_a_diff_that_git_takes(
    cli: Cli, git: Cli, tree: Path, contents: Any, tmp_path: Path
) -> None:
    before = contents(tree)
    done = cli("apply", tree, "--dry-run")
    assert done.code == 0 and "dry run: nothing was written" in done.out
    assert contents(tree) == before
    assert cli("apply", tree, "--dry-run", "--json").json["dry_run"] is True
    assert contents(tree) == before
    (tmp_path / "dry.patch").write_text(done.out, encoding="utf-8")
    git(tree, "init", "-q")
    git(tree, "apply", str(tmp_path / "dry.patch"))
    by_git = contents(tree)
    git(tree, "apply", "-R", str(tmp_path / "dry.patch"))
    assert contents(tree) == before
    assert cli("apply", tree).code == 0
    assert contents(tree) == by_git != before


def test_drift_refuses_the_whole_and_names_what_fits(cli: Cli, tree: Path, buffer: Path, contents: Any) -> None:
    old = b"torch.cuda.default_stream().wait_stream(self.communication_stream)"
    buffer.write_bytes(buffer.read_bytes().replace(old, b"pass"))
    before = contents(tree)
    done = cli("apply", tree, "--json")
    assert done.code == 1
    assert list(done.json["error"]) == ["message", "context", "hint"]
    assert done.json["error"]["message"].startswith("nothing was changed: MF0001 drifted")
    assert done.err.startswith("error: nothing was changed")
    assert contents(tree) == before


def test_a_fix_without_a_patch_is_not_nothing_to_do(process: Cli, checkout: Path, tree: Path) -> None:
    series = checkout / "patches" / "core_v0.16" / "series"
    series.write_text("".join(line for line in series.read_text().splitlines(True) if LAST.fix_id not in line))
    (checkout / "patches" / LAST.name).unlink()
    table = checkout / "megatron_fixes" / "catalog" / "fingerprints.json"
    known = json.loads(table.read_bytes())
    del known["patches"][LAST.name]
    table.write_text(json.dumps(known))
    assert process("apply", tree, root=checkout).code == 0
    done = process("apply", tree, root=checkout)
    assert done.code == 0, done.err
    assert f"{LAST.fix_id} is needed, but there is no patch for {RELEASE} yet" in done.out
    assert done.out.splitlines()[-1] == nothing(bare=sorted([*BARE, LAST.fix_id]))


def test_crlf_is_refused_with_one_hint(cli: Cli, tree: Path, buffer: Path, contents: Any) -> None:
    buffer.write_bytes(buffer.read_bytes().replace(b"\n", b"\r\n"))
    before = contents(tree)
    done = cli("apply", tree)
    assert done.code == 1 and done.err.count("hint:") == 1 and "convert the file to LF" in done.err
    inside = [patch.fix_id for patch in PATCHES if BUFFER in files_of([patch.fix_id])]
    fitting = sorted(set(IDS).difference(inside, requiring(inside)))
    ways = f"Apply only what fits: --only {','.join(fitting)}; or the" if fitting else "The"
    assert f"hint: {ways} file has CRLF line ends and the patch LF: convert" in done.err
    assert all(line.startswith(("error: ", "  where: ", "  hint: ")) for line in done.err.splitlines())
    assert contents(tree) == before


@pytest.mark.parametrize("command", ["scan", "apply", "revert"])
@pytest.mark.parametrize("path", ["", "  "])
def test_an_unset_shell_variable_is_no_target(
    cli: Cli, tree: Path, contents: Any, monkeypatch: pytest.MonkeyPatch, command: str, path: str
) -> None:
    monkeypatch.chdir(tree)
    before = contents(tree)
    done = cli(command, path)
    assert (done.code, done.out) == (2, "") and "got an empty path" in done.err
    assert contents(tree) == before


def test_a_file_that_cannot_be_written_is_refused(cli: Cli, tree: Path, buffer: Path, contents: Any) -> None:
    buffer.chmod(0o444)
    before = contents(tree)
    done = cli("apply", tree)
    assert (done.code, done.out) == (1, "")
    assert "  where: " in done.err and "  hint: " in done.err
    assert contents(tree) == before


def test_an_installed_package_is_refused_unless_asked_for(cli: Cli, tree: Path, tmp_path: Path, contents: Any) -> None:
    site = tmp_path / "site-packages"
    os.rename(tree, site)
    before = contents(site)
    done = cli("apply", site)
    assert done.code == 1 and "--installed" in done.err
    assert contents(site) == before
    assert cli("apply", site, "--installed").code == 0
    assert cli("revert", site).code == 0
    assert contents(site) == before


def test_revert_names_the_command_for_what_git_applied(cli: Cli, git: Cli, tree: Path, contents: Any) -> None:
    before = contents(tree)
    git(tree, "init", "-q")
    git(tree, "apply", *(str(patch.path) for patch in PATCHES))
    done = cli("revert", tree)
    assert done.code == 1 and "git apply" in done.err
    command = done.err.split("Take them out with: ")[1].strip()
    subprocess.run(command, shell=True, check=True, timeout=60)
    assert contents(tree) == before
    assert cli("revert", tree).code == 0


def test_the_command_also_works_inside_another_repository(cli: Cli, git: Cli, tree: Path, contents: Any) -> None:
    before = contents(tree)
    git(tree, "init", "-q", str(tree.parent))
    assert cli("apply", tree).code == 0
    (tree / ".megatron-fixes" / "journal.json").unlink(missing_ok=True)
    for path in sorted((tree / ".megatron-fixes").rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    (tree / ".megatron-fixes").rmdir()
    command = cli("revert", tree).err.split("Take them out with: ")[1].strip()
    subprocess.run(command, shell=True, check=True, timeout=60)
    assert contents(tree) == before


def test_revert_leaves_what_git_had_applied_before_and_says_so(cli: Cli, git: Cli, tree: Path, contents: Any) -> None:
    git(tree, "init", "-q")
    git(tree, "apply", str(PATCHES[0].path))
    before = contents(tree)
    assert cli("apply", tree, "--json").json["already"] == sorted([IDS[0], *NOT_NEEDED])
    done = cli("revert", tree)
    assert done.code == 0 and f"{PATCHES[0].fix_id} stayed" in done.out
    assert contents(tree) == before


def test_a_patch_of_which_one_byte_changed_is_not_used(process: Cli, checkout: Path, tree: Path, contents: Any) -> None:
    patch = checkout / "patches" / PATCHES[0].name
    content = patch.read_bytes()
    patch.write_bytes(content.replace(b"current_stream", b"current_Stream", 1))
    assert patch.read_bytes() != content
    before = contents(tree)
    done = process("apply", tree, root=checkout)
    assert done.code == 1 and done.err.startswith("error: got sha256 ")
    assert f"  where: {patch}" in done.err
    assert contents(tree) == before


def test_a_gated_fix_is_applied_by_name_only(process: Cli, checkout: Path, tree: Path, buffer: Path) -> None:
    patch, gated = checkout / "patches" / LAST.name, sorted([*GATED, LAST.fix_id])
    numerics = f"Numerics: {LAST.header.numerics}\n".encode()
    assert numerics in patch.read_bytes()
    patch.write_bytes(patch.read_bytes().replace(numerics, b"Numerics: gated\n"))
    table = checkout / "megatron_fixes" / "catalog" / "fingerprints.json"
    known = json.loads(table.read_bytes())
    known["patches"][LAST.name] = hashlib.sha256(patch.read_bytes()).hexdigest()
    table.write_text(json.dumps(known))
    pristine = buffer.read_bytes()
    buffer.write_bytes(pristine.replace(b"torch.cuda.default_stream()", b"mine()"))
    hint = process("apply", tree, root=checkout).err.split("hint: ")[1]
    assert LAST.fix_id not in hint
    buffer.write_bytes(pristine)
    done = process("apply", tree, root=checkout)
    assert done.code == 0 and f"only applied by name: --only {LAST.fix_id}" in done.out
    done = process("apply", tree, root=checkout)
    assert f"{LAST.fix_id} is needed, but only applied by name: --only {LAST.fix_id}" in done.out
    assert done.out.splitlines()[-1] == nothing(gated=gated)
    done = process("apply", tree, "--json", root=checkout)
    assert (done.json["applied"], done.json["gated"]) == ([], gated)
    done = process("apply", tree, "--only", LAST.fix_id, "--json", root=checkout)
    assert done.json["applied"] == [LAST.fix_id]


def test_a_gated_fix_that_drifted_keeps_no_other_out(cli: Cli, tree: Path) -> None:
    router = tree / "megatron/core/transformer/moe/router.py"
    before, after = b"def apply_z_loss(self, logits,", b"def apply_z_loss(self, logits, mine,"
    assert GATED == ["MF0023"] and before in router.read_bytes()
    router.write_bytes(router.read_bytes().replace(before, after))
    assert cli("apply", tree, "--only", "MF0023").code == 1
    done = cli("apply", tree, "--json")
    assert (done.code, done.json["applied"], done.json["gated"]) == (0, list(IDS), [])


def test_a_local_part_of_the_version_makes_no_other_release_of_it(cli: Cli, tree: Path) -> None:
    plain = cli("apply", tree, "--dry-run", "--json").json["applied"]
    info = tree / "megatron/core/package_info.py"
    info.write_text(re.sub("PRE_RELEASE = .*", "PRE_RELEASE = '+mine'", info.read_text("utf-8")), "utf-8")
    done = cli("apply", tree, "--dry-run", "--json")
    assert done.json["release"] == "0.16.1+mine"
    assert (done.code, done.json["applied"]) == (0, plain)


def test_what_is_required_comes_along_and_is_said(cli: Cli, tree: Path) -> None:
    wanted = next(patch for patch in SERIES.patches if patch.fix_id in IDS and patch.header.requires)
    closure = [patch.fix_id for patch in SERIES.closure([wanted.fix_id])]
    done = cli("apply", tree, "--only", wanted.fix_id)
    assert done.code == 0
    for fix_id in wanted.header.requires:
        assert f"pulled in {fix_id} because {wanted.fix_id} requires it" in done.out
    assert findings(cli("scan", tree, "--json")) == expected(applied=closure)
    assert cli("revert", tree).code == 0
    done = cli("apply", tree, "--only", wanted.fix_id, "--json")
    assert (done.json["applied"], done.json["required"]) == (closure, closure[:-1])


@pytest.mark.parametrize("only", [(), (LAST.fix_id,), tuple(GATED), (LAST.fix_id, *GATED), (*IDS, *GATED)])
def test_revert_names_the_command_that_puts_in_what_was_there(
    cli: Cli, tree: Path, contents: Any, only: tuple[str, ...]
) -> None:
    named = ["--only", ",".join(only)] if only else []
    assert cli("apply", tree, *named).code == 0
    patched = findings(cli("scan", tree, "--json"))
    last = cli("revert", tree).out.splitlines()[-1]
    again = last.removeprefix("to put them in again: megatron-fixes ").split()
    assert again[:2] == ["apply", str(tree)] and bool(again[2:]) == bool(only)
    assert cli(*again).code == 0
    assert findings(cli("scan", tree, "--json")) == patched


def test_one_fix_of_several_is_taken_out_the_way_that_help_tells(cli: Cli, tree: Path) -> None:
    assert cli("revert", tree, "--only", IDS[0]).err.splitlines()[-1] == "  hint: See `megatron-fixes revert --help`."
    told = " ".join(cli("revert", "--help").out.split())
    assert "revert, then put the others in again with `apply --only`" in told
    others = [fix_id for fix_id in IDS if fix_id not in (IDS[0], *requiring(IDS[:1]))]
    assert cli("apply", tree).code == 0
    assert cli("revert", tree).code == 0
    assert cli("apply", tree, "--only", ",".join(others)).code == 0
    assert findings(cli("scan", tree, "--json")) == expected(applied=others)


@pytest.fixture
def committed(git: Cli, tree: Path) -> Path:
    """The tree as a git repository with one commit, so that git can bring files back."""
    git(tree, "init", "-q")
    git(tree, "add", ".")
    git(tree, "commit", "-qm", "as published")
    return tree


def test_revert_says_that_the_fixes_were_out_already(cli: Cli, git: Cli, committed: Path, contents: Any) -> None:
    before = contents(committed)
    assert cli("apply", committed).code == 0
    git(committed, "checkout", ".")
    done = cli("revert", committed)
    assert done.code == 0
    assert f"{', '.join(IDS)} out already, so only the journal was removed; no file was changed" in done.out
    assert not [word for word in ("reverted ", "restored ", "put them in again") if word in done.out]
    assert contents(committed) == before
    assert not (committed / ".git/megatron-fixes").exists()


def test_revert_names_only_the_files_that_it_restored(cli: Cli, git: Cli, committed: Path, contents: Any) -> None:
    before = contents(committed)
    assert cli("apply", committed).code == 0
    git(committed, "checkout", files_of()[0])
    done = cli("revert", committed, "--json")
    assert (done.code, done.json["files"], done.json["reverted"]) == (0, files_of()[1:], IDS)
    assert contents(committed) == before
