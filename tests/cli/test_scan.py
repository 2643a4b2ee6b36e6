# SPDX-License-Identifier: Apache-2.0
"""``scan`` on real files: verdicts, remedies, what differs in a drifted function; nothing is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fixes.catalog.verdict import Difference
from megatron_fixes.cli.scan import MAX_DIFFERENCE_LINES, difference_lines
from megatron_fixes.overlay.tables import load_tables
from megatron_fixes.proofs.releases import fetch

from .. import synthetic
from .conftest import (
    BUFFER,
    CATALOG,
    GATED,
    IDS,
    PATCHES,
    RELEASE,
    copy_files,
    expected,
    findings,
    needing_line,
    requiring,
    touching,
)

Cli = Callable[..., Any]
# In start_grad_sync, which MF0001 touches, and other fixes do.
OLD = b"self.communication_stream.wait_stream(torch.cuda.default_stream())"


def test_json_has_the_agreed_shape(cli: Cli, tree: Path) -> None:
    done = cli("scan", tree, "--json")
    assert (done.code, done.err) == (0, "")
    assert list(done.json) == [
        *("target", "release", "release_source", "yanked", "looks_like"),
        *("interrupted", "from_other_patches", "fixes"),
    ]
    assert (done.json["from_other_patches"], done.json["yanked"]) == ([], False)
    like = done.json["looks_like"]
    assert RELEASE in like["releases"] and like["functions"] == like["of"]
    assert done.json["interrupted"] is None
    assert (done.json["target"], done.json["release"]) == (str(tree), RELEASE)
    assert done.json["release_source"] == "megatron/core/package_info.py"
    keys = {("id", "slug", "verdict", "remedy", "gated", "reason", "differences", "misfit")}
    assert {tuple(fix) for fix in done.json["fixes"]} == keys
    assert [fix["id"] for fix in done.json["fixes"]] == sorted(CATALOG.matrix.fixes)
    assert findings(done) == expected()


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with fixes of its own, all of which have a patch and are put in by ``apply``."""
    synthetic.use(synthetic.build(tmp_path / "distribution"), monkeypatch)
    return synthetic.write_tree(tmp_path / "small")


def test_check_fails_while_a_fix_is_needed(cli: Cli, small: Path) -> None:
    assert cli("scan", small, "--check").code == 1
    assert cli("apply", small, "--only", "MF9001,MF9002").code == 0
    assert cli("scan", small, "--check").code == 1
    assert cli("apply", small).code == 0
    assert cli("scan", small, "--check").code == 0


def test_a_pipe_gets_one_line_a_fix_their_counts_and_the_next_command(cli: Cli, tree: Path) -> None:
    lines = cli("scan", tree).out.splitlines()
    reasons = {fix["id"]: fix["reason"] for fix in cli("scan", tree, "--json").json["fixes"]}
    assert f"target   {tree}" in lines
    assert f"release  {RELEASE} (megatron/core/package_info.py)" in lines
    for fix_id, (verdict, remedy) in expected().items():
        (row,) = [line for line in lines if line.startswith(fix_id)]
        assert row.split()[:4] == [fix_id, verdict, remedy or "-", CATALOG.matrix.fixes[fix_id].slug]
        assert row.endswith(reasons[fix_id]) and CATALOG.matrix.fixes[fix_id].symptom not in row
    verdicts = [verdict for verdict, _ in expected().values()]
    fitting = [remedy for _, remedy in expected().values()].count("patch")
    have = "has" if fitting == 1 else "have"
    said = f"{verdicts.count('needed')} needed, of which {fitting} {have} a patch that fits"
    upstream = verdicts.count("fixed-upstream")
    assert f"{said}; {upstream} fixed upstream" in lines and verdicts.count("needed") + upstream == len(verdicts)
    assert lines[-1] == f"next: megatron-fixes apply {tree}"


def test_where_a_fix_is_needed_the_commands_that_tell_what_each_does_are_named_and_work(cli: Cli, tree: Path) -> None:
    needed = [fix_id for fix_id, (verdict, _) in expected().items() if verdict == "needed"]
    (line,) = [line for line in cli("scan", tree).out.splitlines() if line.startswith("what each does: ")]
    overview, one = line.removeprefix("what each does: ").split("; one of them: ")
    for command, names in ((overview, needed), (one, needed[:1])):
        done = cli(*command.removeprefix("megatron-fixes ").split())
        told = " ".join(done.out.split())
        assert done.code == 0 and all(CATALOG.matrix.fixes[fix_id].symptom in told for fix_id in names)
    assert cli("apply", tree).code == cli("apply", tree, "--only", ",".join(GATED)).code == 0
    assert "what each does" not in cli("scan", tree).out


def test_the_counts_tell_what_is_in_what_differs_and_what_can_not_be_put_in(cli: Cli, small: Path) -> None:
    def count() -> str:
        (line,) = [line for line in cli("scan", small).out.splitlines() if re.match(r"\d+ needed", line)]
        return line

    assert count() == "3 needed, of which 3 have a patch that fits"
    assert cli("apply", small).code == 0
    assert count() == "0 needed; 3 applied"
    (small / synthetic.FIRST).write_text((small / synthetic.FIRST).read_text().replace("return total", "return 1"))
    assert count() == "0 needed; 1 applied; 2 drifted"


def test_a_gated_fix_is_shown_as_such_and_the_command_that_names_it_puts_it_in(cli: Cli, tree: Path) -> None:
    lines = cli("scan", tree).out.splitlines()
    assert [line.split()[0] for line in lines if "(gated: only by name)" in line] == GATED
    assert {fix["id"] for fix in cli("scan", tree, "--json").json["fixes"] if fix["gated"]} == set(GATED)
    assert lines[-2] == f"only by name: megatron-fixes apply {tree} --only {','.join(GATED)}"
    assert cli(*lines[-2].removeprefix("only by name: megatron-fixes ").split()).code == 0
    lines = cli("scan", tree).out.splitlines()
    assert [line for line in lines if line.startswith("next: ")] == [f"next: megatron-fixes apply {tree}"]


def test_check_is_about_what_apply_puts_in_and_not_about_gated_fixes(cli: Cli, tree: Path) -> None:
    assert cli("scan", tree, "--check").code == 1
    assert cli("apply", tree).code == 0
    done = cli("scan", tree, "--check")
    assert done.code == 0 and f"megatron-fixes apply {tree} --only {','.join(GATED)}" in done.out
    router = tree / "megatron/core/transformer/moe/router.py"
    router.write_text(router.read_text().replace("def apply_z_loss(self,", "def apply_z_loss(self, mine,"))
    assert findings(cli("scan", tree, "--json"))["MF0023"] == ("drifted", None)
    assert cli("scan", tree, "--check").code == 0
    assert "gated ones don't count" in " ".join(cli("scan", "--help").out.split())


def name_it(tree: Path, release: str | None) -> None:
    """Give a tree another release, or take its name away."""
    info = tree / "megatron/core/package_info.py"
    if release is None:
        info.unlink()
    else:
        major, minor, patch = release.split(".")
        info.write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = ''\n")


@pytest.mark.parametrize("name", ["0.99.0", None])
@pytest.mark.parametrize("release", ["0.13.1", "0.16.1"])
def test_a_tree_that_names_no_known_release_is_mended_as_what_it_looks_like(
    cli: Cli, tmp_path: Path, contents: Any, release: str, name: str | None
) -> None:
    published = fetch(release, CATALOG.matrix)
    tree, named = copy_files(published, tmp_path / "tree"), copy_files(published, tmp_path / "named")
    name_it(tree, name)
    out = cli("scan", tree).out
    head = (
        f"{name} (megatron/core/package_info.py); this is no release" if name else "unknown (no file or tag names it); "
    )
    assert f"release  {head}" in out
    assert re.search(rf"its code is that of 0\.\d+\.0 - {release} in (\d+) of \1 functions that fixes touch", out)
    who = f"megatron-core {name}" if name else "a megatron-core that names no release"
    assert f"the overlay puts nothing into {who}, which is not known here: only apply takes it" in out
    before = contents(tree)
    (release_line,) = [line for line in out.splitlines() if line.startswith("release  ")]
    for options in (["--dry-run"], []):
        done = cli("apply", tree, *options)
        assert done.code == 0 and done.out.splitlines()[1] == release_line
    assert cli("apply", named).code == 0
    for path in load_tables().paths.values():
        assert not (named / path).exists() or (tree / path).read_bytes() == (named / path).read_bytes()
    last = f"next: nothing is left to do; megatron-fixes prove --release {release} shows what they do"
    assert cli("scan", tree).out.splitlines()[-1] == last
    assert cli("scan", tree, "--check").code == 0
    assert cli("revert", tree).out.splitlines()[1] == release_line
    assert contents(tree) == before


def test_a_release_that_was_withdrawn_is_said_to_be(cli: Cli, tree: Path) -> None:
    assert "yanked" not in cli("scan", tree).out
    for yanked in [release for release, row in CATALOG.matrix.releases.items() if row.yanked]:
        copy_files(fetch(yanked, CATALOG.matrix), tree)
        head = f"{yanked} (megatron/core/package_info.py), withdrawn from PyPI by its maintainers (yanked)"
        assert f"release  {head}" in cli("scan", tree).out.splitlines()
        assert cli("scan", tree, "--json").json["yanked"] is True
        assert "yanked" in cli("list", "--release", yanked).out


def test_a_tree_that_calls_itself_another_release_than_its_code_is_told(cli: Cli, tree: Path) -> None:
    name_it(tree, "0.19.2")
    (line,) = [line for line in cli("scan", tree).out.splitlines() if line.startswith("release")]
    assert "0.19.2 (megatron/core/package_info.py); its code is that of 0.16.0 - 0.16.1 in " in line
    assert "overlay" not in cli("scan", tree).out


def test_scan_writes_nothing(cli: Cli, tree: Path, contents: Any) -> None:
    before = contents(tree)
    cli("scan", tree)
    assert contents(tree) == before


def test_a_drifted_function_is_shown_with_what_differs(cli: Cli, tree: Path, buffer: Path) -> None:
    buffer.write_bytes(buffer.read_bytes().replace(OLD, b"wait_for_everything(self)"))
    drifted = touching("start_grad_sync")
    blocked = requiring(drifted)
    rows = {**expected(), **dict.fromkeys(drifted, ("drifted", None))}
    rows.update(dict.fromkeys(blocked, ("needed", "does-not-fit")))
    done = cli("scan", tree)
    assert done.code == 0 and "MF0001" in drifted
    assert f"\n{', '.join(drifted)} drifted:\n" in done.out
    assert f"start_grad_sync in {BUFFER}, nearest known text: {RELEASE}" in done.out
    assert ": wait_for_everything(self)" in done.out
    fitting = ",".join(sorted(set(IDS).difference(drifted, blocked)))
    step = f"apply {tree} --only {fitting}" if fitting else f"explain {drifted[0]}"
    assert done.out.splitlines()[-1] == f"next: megatron-fixes {step}"
    assert cli("scan", tree, "--check").code == 1
    done = cli("scan", tree, "--json")
    assert findings(done) == rows
    for fix in done.json["fixes"]:
        for difference in fix["differences"]:
            assert list(difference) == ["function", "nearest", "changes"]
            assert difference["function"].startswith(f"{BUFFER}::") and RELEASE in difference["nearest"]
            assert any("wait_for_everything" in change for change in difference["changes"])
        assert len(fix["differences"]) == (fix["id"] in drifted)


def test_where_nothing_fits_the_next_step_is_to_read_on(cli: Cli, small: Path) -> None:
    for path in (synthetic.FIRST, synthetic.SECOND):
        (small / path).write_text((small / path).read_text().replace("return total", "return 1 + total"))
    assert cli("scan", small).out.splitlines()[-1] == "next: megatron-fixes explain MF9001"


def test_a_patch_that_does_not_fit_is_shown_with_the_place(cli: Cli, tree: Path, buffer: Path) -> None:
    # Comments don't count for the verdict, but a hunk needs its lines.
    buffer.write_bytes(buffer.read_bytes().replace(b"# The RS/AR communication stream needs", b"# THE STREAM"))
    done = cli("scan", tree, "--json")
    lacking = needing_line("# The RS/AR communication stream needs")
    misfits = sorted([*lacking, *requiring(lacking)])
    assert "MF0001" in lacking
    assert findings(done) == {**expected(), **dict.fromkeys(misfits, ("needed", "does-not-fit"))}
    for fix in done.json["fixes"]:
        assert (f"does not fit: {BUFFER}:" in fix["reason"]) == (fix["id"] in misfits)
        assert (fix["misfit"] or "").startswith(f"{BUFFER}:") == (fix["id"] in misfits) == (fix["misfit"] is not None)
    done = cli("scan", tree)
    assert re.search(r"^(MF\d+, )*MF0001(, MF\d+)* does not fit:$", done.out, re.MULTILINE) and "THE STREAM" in done.out
    fitting = ",".join(sorted(set(IDS).difference(misfits)))
    assert done.out.splitlines()[-1] == f"next: megatron-fixes apply {tree} --only {fitting}"


def test_a_tree_patched_by_git_is_applied(cli: Cli, git: Cli, tree: Path) -> None:
    git(tree, "init", "-q")
    git(tree, "apply", *(str(patch.path) for patch in PATCHES))
    assert findings(cli("scan", tree, "--json")) == expected(applied=IDS)


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


def test_an_applied_tree_is_not_said_to_be_what_prove_looks_at(cli: Cli, small: Path) -> None:
    assert cli("apply", small).code == 0
    last = cli("scan", small).out.splitlines()[-1]
    assert last == ("next: nothing is left to do; megatron-fixes prove --release 0.16.1 shows what they do")


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
    assert cli("scan", tree, "--check").code == 1
    done = cli("apply", tree, "--dry-run")
    assert done.code == 0 and "an earlier apply was cut short" in done.out
    assert contents(tree) == before
    done = cli("apply", tree)
    assert done.code == 0 and "mended: an interrupted apply was undone" in done.out
    assert findings(cli("scan", tree, "--json")) == expected(applied=IDS)


MINE = b"# mine\n"


@pytest.mark.parametrize("edited", [False, True])
@pytest.mark.parametrize("applied", [False, True])
def test_each_edited_file_is_parsed_as_it_is_and_as_it_would_be_however_many_fixes_there_are(
    cli: Cli, small: Path, monkeypatch: pytest.MonkeyPatch, applied: bool, edited: bool
) -> None:
    from megatron_fixes.patching import scan

    if applied:
        assert cli("apply", small).code == 0
    for path in synthetic.patched() if edited else ():
        (small / path).write_bytes(MINE + (small / path).read_bytes())
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
    assert sorted(parsed) == (sorted(MINE + text for text in texts) if edited else [])


WATCHED = """\
import os, sys
from megatron_fixes.cli.main import main

seen, tree = [], sys.argv[-1]

def note(event, arguments):
    if event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], (str, bytes, os.PathLike)):
        if (path := os.path.abspath(os.fsdecode(arguments[0]))).startswith(tree):
            seen.append(f"{event} {os.path.relpath(path, tree)}")
    elif event == "compile" and arguments[1] == "<unknown>":  # by ast.parse
        seen.append("parse")

sys.addaudithook(note)
main(sys.argv[1:])
print(*seen, sep="\\n", file=sys.stderr)
"""


def test_with_a_thousand_more_files_in_the_tree_the_same_is_opened_listed_and_parsed(
    process: Cli, tree: Path, buffer: Path
) -> None:
    buffer.write_bytes(MINE + buffer.read_bytes())  # so that something is parsed
    text = buffer.read_bytes()
    few = process("scan", tree, program=["-c", WATCHED])
    folders = [tree, tree / "megatron", buffer.parent, tree / "megatron" / "core" / "more"]
    folders[-1].mkdir()
    for number in range(1000):
        (folders[number % 4] / f"more_{number}.py").write_bytes(text)
    many = process("scan", tree, program=["-c", WATCHED])
    assert (few.code, few.out) == (many.code, many.out)
    assert many.err.splitlines() == few.err.splitlines()
    # The file that names the release, and the edited one as it is and as it would be.
    assert few.err.splitlines().count("parse") == 3 and f"open {BUFFER}" in few.err.splitlines()


def test_differences_are_cut_at_the_limit() -> None:
    change = Difference("a.py::f", "0.16.1", tuple(f"+ {line}: x" for line in range(50)))
    lines = difference_lines([change])
    assert len(lines) == MAX_DIFFERENCE_LINES + 1
    assert lines[-1].strip() == "... and 31 more"
