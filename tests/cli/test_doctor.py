# SPDX-License-Identifier: Apache-2.0
"""doctor tells what a job would get from files and metadata alone, tells the two Apexes apart, and imports nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from .conftest import CATALOG, GATED, NOT_NEEDED, RELEASE, copy_files, expected

if TYPE_CHECKING:
    from pathlib import Path

SLUG = "stale-grad-reduce-handle"
NEEDED = ", ".join(fix_id for fix_id, (verdict, _) in expected().items() if verdict == "needed" and fix_id not in GATED)


def doctor(*arguments: str, path: tuple[Path | str, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    environment.pop("PYTHONPATH", None)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, path), root])
    command = [sys.executable, "-m", "megatron_fixes", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=os.path.dirname(root))


def report(*arguments: str, path: tuple[Path | str, ...] = (), **variables: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(doctor("--json", *arguments, path=path, **variables).stdout)
    return result


def package(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(package for package in found["packages"] if package["name"] == name)


def test_it_names_the_megatron_that_would_be_imported_and_what_each_fix_is_to_it(release_tree: Path) -> None:
    found = report(path=(release_tree,))
    core = package(found, "megatron-core")
    assert (core["version"], core["where"]) == (RELEASE, str(release_tree))
    rows = [(fix["id"], (fix["verdict"], fix["remedy"])) for fix in found["fixes"]]
    assert rows == sorted(expected().items())


@pytest.mark.parametrize(
    ("folders", "note"),
    [
        (("multi_tensor_apply", "contrib"), "NVIDIA Apex"),
        (("lib",), "not NVIDIA Apex but an unrelated project of that name: uninstall it"),
    ],
)
def test_it_tells_nvidias_apex_from_its_namesake(tmp_path: Path, folders: tuple[str, ...], note: str) -> None:
    for folder in folders:
        (tmp_path / "apex" / folder).mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").write_text("raise SystemExit('imported')\n")
    found = report(path=(tmp_path,))
    assert package(found, "apex")["note"] == note
    assert any("apex" in sentence for sentence in found["todo"]) == ("unrelated" in note)


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    found = report()
    assert package(found, "TransformerEngine")["version"] is None
    assert package(found, "megatron-core")["version"] is None


def test_it_imports_neither_torch_nor_megatron(release_tree: Path, tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('imported')\n")
    done = doctor(path=(tmp_path, release_tree))
    assert done.returncode == 0, done.stderr
    assert "no metadata" in done.stdout or str(tmp_path) in done.stdout


def test_every_setting_comes_with_its_source() -> None:
    found = report(MEGATRON_FIXES="MF0001", MEGATRON_FIXES_CACHE="/nowhere")
    settings = {setting["name"]: (setting["value"], setting["source"]) for setting in found["overlay"]["settings"]}
    assert settings["MEGATRON_FIXES"] == ("MF0001", "environment MEGATRON_FIXES")
    assert settings["MEGATRON_FIXES_CACHE"] == ("/nowhere", "environment MEGATRON_FIXES_CACHE")
    assert settings["MEGATRON_FIXES_STRICT"] == ("0", "default")


def test_a_tree_that_hides_another_is_pointed_out(release_tree: Path, tmp_path: Path) -> None:
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").write_text("")
    done = doctor("--check", path=(tmp_path, release_tree))
    assert done.returncode == 1
    assert "megatron-core lies in several places" in done.stdout


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({}, f"the overlay is off, and {NEEDED} would be wanted"),
        ({"MEGATRON_FIXES": "MF0999"}, "MEGATRON_FIXES: no fix is called MF0999"),
    ],
)
def test_what_would_run_unmended_needs_doing(release_tree: Path, variables: dict[str, str], sentence: str) -> None:
    done = doctor("--check", path=(release_tree,), **variables)
    assert done.returncode == 1
    assert sentence in done.stdout


def test_a_fix_that_is_asked_for_and_drifted_needs_doing(release_tree: Path, tmp_path: Path) -> None:
    path = "megatron/core/distributed/param_and_grad_buffer.py"
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text("class Other:\n    pass\n")
    (tmp_path / "megatron/core/__init__.py").write_text("")
    info = "megatron/core/package_info.py"
    (tmp_path / info).write_bytes((release_tree / info).read_bytes())
    found = report(path=(tmp_path,), MEGATRON_FIXES="all")
    assert any("MF0003 is asked for and has drifted" in sentence for sentence in found["todo"])


def test_a_gated_fix_is_shown_as_such_and_asked_for_by_name_only(release_tree: Path, tmp_path: Path) -> None:
    said = [line.split(maxsplit=1) for line in doctor(path=(release_tree,)).stdout.splitlines() if line]
    assert [GATED[0], "needed, remedy patch (gated: only by name)"] in said
    gated = {fix["id"] for fix in report(path=(release_tree,))["fixes"] if fix["gated"]}
    assert gated == {fix_id for fix_id in CATALOG.matrix.fixes if CATALOG.is_gated(fix_id)}
    router = "megatron/core/transformer/moe/router.py"
    copy_files(release_tree, tmp_path)
    text = (tmp_path / router).read_text().replace("def apply_z_loss(self,", "def apply_z_loss(self, mine,")
    (tmp_path / router).write_text(text)
    for asked, told in (("all", False), ("all,MF0023", True), ("MF0023", True)):
        todo = report(path=(tmp_path,), MEGATRON_FIXES=asked)["todo"]
        assert any("MF0023 is asked for and has drifted" in sentence for sentence in todo) == told


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        (
            {"MEGATRON_FIXES": "all"},
            "the overlay puts nothing into megatron-core 0.99.0, which is not known here: only apply takes it; "
            "MEGATRON_FIXES_STRICT=1 would stop the job: apply the patches, and unset MEGATRON_FIXES",
        ),
        (
            {},
            f"{NEEDED} would be wanted, and the overlay puts nothing into megatron-core 0.99.0, which is not known "
            "here: only apply takes it: apply the patches",
        ),
    ],
)
def test_a_release_that_is_not_known_is_for_apply_only(
    release_tree: Path, tmp_path: Path, variables: dict[str, str], sentence: str
) -> None:
    tree = copy_files(release_tree, tmp_path / "tree")
    (tree / "megatron/core/package_info.py").write_text("MAJOR = 0\nMINOR = 99\nPATCH = 0\nPRE_RELEASE = ''\n")
    found = report(path=(tree,), **variables)
    assert sentence in found["todo"]
    assert not any("set MEGATRON_FIXES=all" in told for told in found["todo"])


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("MEGATRON_FIXES_STRICT", "maybe", "got 'maybe', expected 1 or 0; taken as 1"),
        ("MEGATRON_FIXES_TRACEBACK", "maybe", "got 'maybe', expected 1 or 0; taken as 1"),
        ("MEGATRON_GUARDS", "lifecycel", "got the guard 'lifecycel', expected some of lifecycle, streams, teardown"),
        ("MEGATRON_GUARDS_DEADLINE_S", "soon", "got 'soon', expected a number of seconds, more than 0"),
        ("MEGATRON_GUARDS_ABORT", "maybe", "got 'maybe', expected 1 or 0; no guard would be installed"),
    ],
)
def test_a_wrong_setting_needs_doing(name: str, value: str, sentence: str) -> None:
    others = {"MEGATRON_GUARDS_ABORT": "never"} if name == "MEGATRON_GUARDS" else {}
    todo = report(**{**others, name: value})["todo"]
    assert [told for told in todo if told.startswith(f"{name}: {sentence}")]
    assert len([told for told in todo if told.startswith("MEGATRON_")]) == 1 + len(others)
    assert not [told for told in report(**{name: "0"})["todo"] if told.startswith("MEGATRON_")]


def test_a_fix_that_is_asked_for_and_not_needed_is_said_to_be(release_tree: Path) -> None:
    asked = f"{NOT_NEEDED[0]},MF0001"
    lines = doctor(path=(release_tree,), MEGATRON_FIXES=asked).stdout.splitlines()
    said = f"(asked for, and not needed by {RELEASE})"
    assert [line.split()[0] for line in lines if line.endswith(said)] == [NOT_NEEDED[0]]
    assert said not in doctor(path=(release_tree,), MEGATRON_FIXES="all").stdout


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("MEGATRON_FIX", "MEGATRON_FIXES"),
        ("megatron_fixes", "MEGATRON_FIXES"),
        ("MEGATRON_FIXES_STRCT", "MEGATRON_FIXES_STRICT"),
        ("MEGATRON_GUARD", "MEGATRON_GUARDS"),
        ("MEGATRON_GUARDS_DEADLINE", "MEGATRON_GUARDS_DEADLINE_S"),
    ],
)
def test_a_misspelt_variable_needs_doing(name: str, near: str) -> None:
    sentence = f"{name}: nothing reads a variable of that name; did you mean {near}?"
    assert sentence in report(**{name: "1"}, MEGATRON_FIXES_SAID="12345678")["todo"]
    assert not [told for told in report(MEGATRON_FIXES_SAID="12345678")["todo"] if "nothing reads" in told]


@pytest.mark.parametrize(("word", "near"), [("al", "all"), ("MF003", "MF0003"), ("stale-grad", SLUG)])
def test_a_fix_that_there_is_not_needs_doing_and_the_nearest_is_named(word: str, near: str) -> None:
    assert f"MEGATRON_FIXES: no fix is called {word}; did you mean {near}?" in report(MEGATRON_FIXES=word)["todo"]
    assert not [told for told in report(MEGATRON_FIXES=SLUG)["todo"] if told.startswith("MEGATRON_FIXES:")]


def test_no_megatron_at_all_needs_doing() -> None:
    assert any("megatron-core: none found" in sentence for sentence in report()["todo"])


@pytest.mark.parametrize("word", ["off", "none", ","])
def test_a_setting_that_names_no_fix_is_not_called_unset(word: str) -> None:
    said = f"off: MEGATRON_FIXES is {word!r}, which names no fix; MEGATRON_FIXES=all turns it on"
    assert said in doctor(MEGATRON_FIXES=word).stdout
    assert "off: MEGATRON_FIXES is not set" in doctor(MEGATRON_FIXES="").stdout


def test_all_fixes_are_named_only_where_none_is_near() -> None:
    known = f"; known: {', '.join(CATALOG.matrix.fixes)}"
    (far,) = [told for told in report(MEGATRON_FIXES="xyzzy")["todo"] if "no fix is called" in told]
    (near,) = [told for told in report(MEGATRON_FIXES="MF003")["todo"] if "no fix is called" in told]
    assert far.endswith(known)
    assert known not in near
