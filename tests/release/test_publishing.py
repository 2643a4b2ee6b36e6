# SPDX-License-Identifier: Apache-2.0
"""Notes, evidence from pytest's own report, and what gh is asked.

The whole way is ``ci/release_rehearsal``, which takes minutes: here are its parts. Not handled: GitHub itself.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_fixes.catalog import load
from megatron_fixes.errors import RefusedError
from megatron_fixes.release import layout, signature
from tests.loading import ROOT, load_program
from tests.release.conftest import LAYOUT, Released

CHANGELOG = load_program("scripts/changelog.py")
NOTES = load_program("scripts/release_notes.py")
EVIDENCE = load_program("scripts/release_evidence.py")
PUBLISH = load_program("scripts/publish_github.py")
SIGN = load_program("scripts/sign_release.py")
CATALOG = load()
LOG = "# Log\n\n## Unreleased\n\n## 0.2.0rc1 - 2026-12-02\n\n- Rc.\n\n## 0.1.0 - 2026-12-01\n\n### Added\n\n- One.\n"


def test_notes_tell_each_line_what_it_gets_symptom_first() -> None:
    text = NOTES.notes(CATALOG, "0.1.0", LOG, signed=True)
    lines = text.split("### core_v")[1:]
    assert [one.partition(":")[0] for one in lines] == [
        name.removeprefix("core_v") for name in reversed(CATALOG.matrix.lines())
    ]
    for fix_id, fix in CATALOG.matrix.fixes.items():
        for line, releases in CATALOG.matrix.lines().items():
            part = next(one for one in lines if one.startswith(line.removeprefix("core_v") + ":"))
            part = part.partition("\n## ")[0]
            mended = [one for one in releases if (patch := CATALOG.patch(fix_id, one)) and not patch.gated]
            assert (f"- {fix.symptom} **{fix_id}**" in part) == bool(mended)


def test_gated_fixes_stand_apart_and_the_section_is_the_versions_own() -> None:
    text = NOTES.notes(CATALOG, "0.1.0", LOG, signed=True)
    by_name = text.partition("## Only by name")[2].partition("## What changed")[0]
    assert re.findall(r"\*\*(MF\d+)\*\*", by_name) == [one for one in CATALOG.matrix.fixes if CATALOG.is_gated(one)]
    changed = text.partition("## What changed")[2].partition("## Check")[0]
    assert changed.strip() == "### Added\n\n- One."


@pytest.mark.parametrize(("version", "signed"), [("0.1.0", True), ("0.2.0rc1", False)])
def test_notes_say_first_that_it_is_a_prerelease_and_that_nobody_signed_it(version: str, signed: bool) -> None:
    text = NOTES.notes(CATALOG, version, LOG, signed=signed)
    assert ("**This is a pre-release" in text[:100]) == ("rc" in version)
    assert ("UNSIGNED" in text) != signed
    assert layout.Layout(version).patches in text


def test_notes_of_a_first_release_with_all_that_is_unreleased_fit_into_a_github_release() -> None:
    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    text = NOTES.notes(CATALOG, "9.9.9", CHANGELOG.released(log, "9.9.9", "2026-12-01"), signed=True)
    assert len(text) < 125_000  # GitHub's limit


def test_notes_of_a_version_without_a_section_are_refused() -> None:
    with pytest.raises(RefusedError, match=r"no section 0\.3\.0"):
        NOTES.notes(CATALOG, "0.3.0", LOG, signed=True)


def test_a_release_is_first_a_draft_with_all_its_files(tmp_path: Path) -> None:
    (create,) = PUBLISH.draft_commands("0.1.0", [tmp_path / "a"], tmp_path / "notes", "none")
    assert create[2:6] == ["create", "v0.1.0", "--draft", "--verify-tag"] and create[-1] == str(tmp_path / "a")
    assert "--prerelease" not in create
    delete, create = PUBLISH.draft_commands("0.2.0rc1", [], tmp_path / "notes", "draft")
    assert delete == ["gh", "release", "delete", "v0.2.0rc1", "--yes"]
    assert "--prerelease" in create


@pytest.mark.parametrize(
    ("version", "public", "latest"),
    [
        ("0.1.0", [], "true"),
        ("0.10.0", ["v0.9.0", "v0.2.0"], "true"),
        ("0.1.5", ["v0.2.0"], "false"),
        ("0.1.5", ["v0.2.0rc1", "v1", "nightly"], "true"),
        ("0.2.0rc1", [], "false"),
        ("0.2.0rc1", ["v0.1.0"], "false"),
    ],
)
def test_the_latest_is_the_highest_final_version(version: str, public: list[str], latest: str, tmp_path: Path) -> None:
    command = PUBLISH.publish_command(version, tmp_path, public)
    assert command[2:5] == ["edit", f"v{version}", "--draft=false"] and command[-1] == f"--latest={latest}"


def test_a_public_release_is_never_touched(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="public already"):
        PUBLISH.draft_commands("0.1.0", [], tmp_path / "notes", "public")


def test_only_what_the_committed_key_has_signed_is_published(released: Released, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    committed = tmp_path / "docs" / "release_key.pub"
    unsigned = {**released.files, layout.SIGNATURE: signature.UNSIGNED}
    junk = {**released.files, layout.SIGNATURE: b"junk\n"}
    assert SIGN.require_sound({**unsigned, layout.KEYLESS: b"{}"}) == LAYOUT.version
    assert not SIGN.require_signed(unsigned, tmp_path)
    for files in (released.files, junk):
        with pytest.raises(RefusedError, match=r"got a signature and no docs/release_key\.pub"):
            SIGN.require_signed(files, tmp_path)
    shutil.copy(released.public, committed)
    assert SIGN.require_signed(released.files, tmp_path)
    for files, said in ((unsigned, "UNSIGNED: got no signature"), (junk, "no SSH signature")):
        with pytest.raises(RefusedError, match=said):
            SIGN.require_signed(files, tmp_path)
    for spoilt in (
        {name: content for name, content in unsigned.items() if name != LAYOUT.wheel},
        {**unsigned, LAYOUT.wheel: b""},
        {**unsigned, "another": b""},
        {},
    ):
        with pytest.raises(RefusedError):
            SIGN.require_sound(spoilt)


@pytest.mark.parametrize("changed", [False, True])
def test_a_draft_that_was_changed_after_it_was_verified_stays_one(
    changed: bool, released: Released, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docs").mkdir()
    shutil.copy(released.public, tmp_path / "docs" / "release_key.pub")
    (tmp_path / "notes.md").touch()
    monkeypatch.setattr(PUBLISH, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", f"{ROOT / 'ci' / 'rehearsal'}:{os.environ['PATH']}")
    monkeypatch.setenv("GH_LOG", str(tmp_path / "gh"))
    monkeypatch.setenv("GH_STATE", "none")
    PUBLISH.draft(LAYOUT.version, released.folder, tmp_path / "notes.md")
    PUBLISH.fetch(LAYOUT.version, tmp_path / "fetched")
    with pytest.raises(RefusedError, match="is there already"):
        PUBLISH.fetch(LAYOUT.version, tmp_path / "fetched")
    if changed:
        (tmp_path / "gh.draft" / layout.KEYLESS).write_text("{}", encoding="utf-8")
        with pytest.raises(RefusedError, match="other files than were verified"):
            PUBLISH.publish(LAYOUT.version, tmp_path / "fetched", tmp_path / "notes.md")
    else:
        assert PUBLISH.publish(LAYOUT.version, tmp_path / "fetched", tmp_path / "notes.md").endswith("public, signed")
    assert ("--draft=false" in (tmp_path / "gh").read_text(encoding="utf-8")) != changed


@pytest.mark.parametrize("script", ["sign_release", "publish_github"])
def test_where_a_key_or_a_right_to_write_is_no_package_is_needed(script: str) -> None:
    command = [sys.executable, "-S", str(ROOT / "scripts" / f"{script}.py"), "--help"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_evidence_counts_tests_by_folder_skips_by_reason_and_names_failures(tmp_path: Path) -> None:
    (tmp_path / "tests" / "fixes").mkdir(parents=True)
    (tmp_path / "tests" / "fixes" / "test_one.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "@pytest.mark.skip(reason='needs 1 CUDA device, found 0')\ndef test_gpu(): pass\n"
        "def test_bad(): raise ValueError\n"
        "@pytest.fixture\ndef broken(): raise ValueError\ndef test_error(broken): pass\n",
        encoding="utf-8",
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=report.xml", "tests"]
    subprocess.run([*command, "-o", "junit_family=xunit2"], cwd=tmp_path, capture_output=True)
    passed, skipped, failed = EVIDENCE.counted(tmp_path / "report.xml")
    assert (passed, skipped) == ({"fixes": 1}, {"needs 1 CUDA device, found 0": 1})
    assert [name.partition("::")[2] for name in failed] == ["test_bad", "test_error"]


def test_checks_are_run_without_what_would_narrow_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTEST_ADDOPTS", "ARGS", "MAKEFLAGS", "CHECKS"):
        monkeypatch.setenv(name, "-k nothing")
    assert not {"PYTEST_ADDOPTS", "ARGS", "MAKEFLAGS", "CHECKS"} & set(EVIDENCE.settled())
    assert set(EVIDENCE.TARGETS) == set(EVIDENCE.CHECKS)


def test_a_key_in_the_environment_signs_and_its_file_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELEASE_KEY", "a key\n")
    with SIGN.key_file(None) as path:
        assert path.read_text(encoding="utf-8") == "a key\n" and path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()
    with SIGN.key_file(Path("named")) as path:
        assert path == Path("named")
    monkeypatch.setenv("RELEASE_KEY", "")
    with SIGN.key_file(None) as path:
        assert path is None
