# SPDX-License-Identifier: Apache-2.0
"""What is built: the same bytes under other conditions, from clean commits of the version only, read by other tools."""

from __future__ import annotations

import datetime
import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fixes.errors import RefusedError, UsageError
from megatron_fixes.release import archive, layout, manifest, signature, sums, wheel
from tests.loading import load_program

from .conftest import BUILD, LAYOUT, Released, held, make_key

REPRODUCE = load_program("scripts/reproduce_release.py")
MTIME = 1_767_225_600
SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}


def git(repository: Path, *arguments: str) -> None:
    names = ("user.name=t", "user.email=t@example.invalid")
    subprocess.run(["git", "-C", str(repository), *(w for n in names for w in ("-c", n)), *arguments], check=True)


def test_two_builds_with_nothing_in_common_but_the_commit_are_the_same(repository: Path, released: Released) -> None:
    published = released.folder.parent / "published"
    shutil.copytree(released.folder, published)
    beside = ("SHA256SUMS.sigstore.json", "key.pub", "megatron_fixes-9.9.9.tar.gz")
    for name in beside:
        (published / name).write_text("Not built.\n", encoding="utf-8")
    left_out = sorted({*beside, layout.SIGNATURE} - {"key.pub"})
    assert REPRODUCE.reproduce(repository, LAYOUT.version, published) == ([], left_out)


def test_the_other_build_has_another_date_in_every_way_to_ask_for_it_and_in_its_children() -> None:
    asked = (
        "import datetime as d, subprocess, sys, time\n"
        "now = d.datetime\n"
        "days = [time.strftime('%Y-%m-%d', w) for w in (time.gmtime(), time.localtime(), time.gmtime(time.time()))]\n"
        "days += [time.strftime('%Y-%m-%d'), time.strftime('%Y-%m-%d', time.gmtime(time.time_ns() / 1e9))]\n"
        "days += [time.strftime('%Y-%m-%d', time.strptime(said)) for said in (time.ctime(), time.asctime())]\n"
        "days += [str(d.date.today()), *(str(w.date()) for w in (now.now(), now.today(), now.now(d.timezone.utc)))]\n"
        "print(*days)\n"
        "if len(sys.argv) == 1: subprocess.run([sys.executable, '-c', open(0).read(), 'child'], env={'TZ': 'UTC'})\n"
    )
    environment = {"PYTHONPATH": str(REPRODUCE.ANOTHER_DAY), "TZ": "UTC", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", asked]
    done = subprocess.run(command, input=asked, env=environment, capture_output=True, text=True, check=True)
    today = datetime.datetime.now(datetime.timezone.utc).date()
    expected = {str(today + datetime.timedelta(days=REPRODUCE.AHEAD_DAYS - ago)) for ago in (0, 1)}
    found = [set(line.split()) for line in done.stdout.splitlines()]
    assert len(found) == 2 and all(len(days) == 1 and days <= expected for days in found), done.stdout


def test_a_build_whose_date_was_not_moved_is_refused(
    repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(REPRODUCE, "ANOTHER_DAY", tmp_path)
    with pytest.raises(RefusedError, match="got a date 0 days ahead for the other build, expected 400"):
        REPRODUCE.build_under(repository, LAYOUT.version, tmp_path, REPRODUCE.other_conditions())


@pytest.mark.parametrize(
    ("listed", "locale"),
    [
        ("C\nC.utf8\nPOSIX\n", "C"),
        ("C\nen_US.utf8\nde_DE\ntr_TR\n", "en_US.utf8"),
        ("C\nde_DE.utf8\ntr_TR.utf8\n", "tr_TR.utf8"),
        (None, "C"),
    ],
)
def test_the_other_build_has_a_locale_that_is_there(
    listed: str | None, locale: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if listed is not None:
        (tmp_path / "locale").write_text(f"#!/bin/sh\nprintf '{listed}'\n", encoding="utf-8")
        (tmp_path / "locale").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert REPRODUCE.other_locale() == locale
    assert dict(REPRODUCE.other_conditions().variables)["LC_ALL"] == locale


def test_the_first_differing_byte_is_named(released: Released) -> None:
    inside = archive.unpack(released.files[LAYOUT.patches], source="x")
    name = f"{LAYOUT.root}/NOTICE"
    other = archive.pack({**inside, name: b"?" + inside[name][1:]}, mtime=0, executable=[f"{LAYOUT.root}/apply.py"])
    compare = REPRODUCE.differences
    (said,) = compare({"x.tar.gz": other, "y": b"ab"}, {"x.tar.gz": released.files[LAYOUT.patches], "y": b"ab"})
    assert said.startswith("x.tar.gz: byte ")
    assert f"inside: {name}: byte 0: got 0x3f, expected 0x{inside[name][0]:02x}" in said
    assert compare({"y": b"abc", "z": b""}, {"y": b"ab", "x": b""}) == [
        "x: is missing", "y: byte 2: got 0x63, expected the end", "z: is not expected"
    ]  # fmt: skip


def test_without_a_key_all_files_but_the_signature_are_the_same(
    repository: Path, released: Released, tmp_path: Path
) -> None:
    BUILD.build(BUILD.find_source(repository, LAYOUT.version), tmp_path / "dist")
    files = held(tmp_path / "dist")
    assert files.pop(layout.SIGNATURE) == signature.UNSIGNED
    assert files == {name: content for name, content in released.files.items() if name != layout.SIGNATURE}


def test_the_manifest_names_what_it_was_built_from(repository: Path, released: Released) -> None:
    inside = archive.unpack(released.files[LAYOUT.patches], source="x")
    described = manifest.decode(inside[f"{LAYOUT.root}/{manifest.FILE}"])
    said = subprocess.run(
        ["git", "-C", str(repository), "log", "-1", "--format=%H %ct"], capture_output=True, text=True
    )
    assert [described.commit, str(described.source_date_epoch)] == said.stdout.split()
    assert described.version == LAYOUT.version
    series = inside[f"{LAYOUT.root}/patches/core_v0.16/series"].decode()
    assert all(fix_id in series for fix_id in described.lines["core_v0.16"].fixes)
    matrix = json.loads(inside[f"{LAYOUT.root}/compat_matrix.json"])
    assert set(described.lines["core_v0.16"].releases) == {
        name for name, release in matrix["releases"].items() if release["line"] == "core_v0.16"
    }


def test_wheel_and_sdist_hold_what_the_backend_made(repository: Path, released: Released, tmp_path: Path) -> None:
    files = wheel.read_wheel(released.files[LAYOUT.wheel], source="x")
    record = files[f"megatron_fixes-{LAYOUT.version}.dist-info/RECORD"].decode().splitlines()
    assert {line.split(",")[0] for line in record} == set(files)
    with tarfile.open(fileobj=io.BytesIO(released.files[LAYOUT.sdist])) as opened:
        opened.extractall(tmp_path, **SAFELY)
    made = BUILD.build_with_backend("wheel", tmp_path / f"megatron_fixes-{LAYOUT.version}", tmp_path, MTIME)
    assert wheel.zip_again(made, mtime=MTIME) == released.files[LAYOUT.wheel]


def test_only_files_that_git_has_travel(repository: Path, released: Released) -> None:
    tracked = subprocess.run(["git", "-C", str(repository), "ls-files"], capture_output=True, text=True).stdout.split()
    root = f"megatron_fixes-{LAYOUT.version}/"
    names = {name.removeprefix(root) for name in archive.unpack(released.files[LAYOUT.sdist], source="x")}
    generated = {name for name in names if name.startswith("megatron_fixes.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert names - generated <= set(tracked)


@pytest.fixture
def clone(repository: Path, tmp_path: Path) -> Path:
    place = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", str(repository), str(place)], check=True)
    return place


def test_a_tag_on_the_commit_changes_nothing_and_one_elsewhere_is_refused(clone: Path) -> None:
    before = BUILD.find_source(clone, LAYOUT.version)
    git(clone, "tag", "-a", "-m", "x", f"v{LAYOUT.version}")
    assert BUILD.find_source(clone, f"v{LAYOUT.version}") == before
    git(clone, "commit", "-q", "--allow-empty", "-m", "More")
    with pytest.raises(RefusedError, match="got the tag"):
        BUILD.find_source(clone, LAYOUT.version)


@pytest.mark.parametrize("file", ["README.md", "stray.txt"])
def test_a_work_tree_with_changes_is_refused(file: str, clone: Path) -> None:
    (clone / file).write_text("changed\n", encoding="utf-8")
    git(clone, "config", "status.showUntrackedFiles", "no")
    with pytest.raises(RefusedError, match=f"with changes .*{file}"):
        BUILD.find_source(clone, LAYOUT.version)


def test_another_version_is_refused(clone: Path) -> None:
    with pytest.raises(RefusedError, match=r"expected 9\.9\.9"):
        BUILD.find_source(clone, "v9.9.9")


@pytest.mark.parametrize(
    "text",
    [
        *("", "v", "1", "v1.0", "latest", "v1.0.0/../x", "v1.0.0\n", "v1.0.0 ", "vv0.1.0"),
        *("v00.1.0", "v0.01.0", "v0.1.00", "v0.1.0rc01", "v\u0660.1.0", "v0.1.\uff11"),
    ],
)
def test_what_is_no_version_is_the_users_mistake(text: str) -> None:
    with pytest.raises(UsageError, match="got the version"):
        layout.parse_version(text)
    assert layout.version_of(layout.Layout(text.removeprefix("v")).summed) is None


@pytest.mark.parametrize("version", ["0.1.0", "10.20.30", "0.2.0rc1", "1.0.0a0", "1.0.0b12"])
def test_a_version_is_one_with_a_v_and_without(version: str) -> None:
    assert layout.parse_version(f"v{version}") == layout.parse_version(version) == version


def test_a_link_in_the_commit_is_refused(clone: Path, tmp_path: Path) -> None:
    (clone / "patches" / "link").symlink_to("/etc/passwd")
    git(clone, "add", "-A")
    git(clone, "commit", "-q", "-m", "Link")
    with pytest.raises(RefusedError, match="got a link or a submodule"):
        BUILD.build(BUILD.find_source(clone, LAYOUT.version), tmp_path / "dist")
    assert not (tmp_path / "dist").exists()


@pytest.fixture
def quick(released: Released) -> Callable[[Path], object]:
    """Puts the release out as ``build`` does, without building it: only what happens to the folder is asked about."""

    def put(out: Path) -> object:
        return BUILD._put(released.files, BUILD._place(out, LAYOUT), LAYOUT)

    return put


@pytest.mark.parametrize("name", ["megatron-fixes-patches-0.0.9.tar.gz", layout.SUMS, LAYOUT.wheel])
def test_a_folder_with_anything_else_is_refused_before_the_build(name: str, repository: Path, tmp_path: Path) -> None:
    out = tmp_path / "dist"
    (out / name).mkdir(parents=True)
    (out / name / "mine").write_text("x", encoding="utf-8")
    with pytest.raises(RefusedError, match=f"got {name} in it"):
        BUILD.build(BUILD.find_source(repository, LAYOUT.version), out)
    assert (out / name / "mine").is_file()


def test_the_working_directory_may_be_where_the_release_is(
    quick: Callable[[Path], object], released: Released, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "dist"
    out.mkdir()
    (out / LAYOUT.wheel).write_bytes(b"old")
    for place in (out, tmp_path):
        monkeypatch.chdir(place)
        quick(Path() if place == out else Path("dist"))
        assert held(out) == released.files
        assert [path.name for path in tmp_path.iterdir()] == ["dist"]


@pytest.mark.parametrize("place", ["file", "link", "link to nothing", "below a file", "/proc/x", "/proc/self/x", "/"])
def test_a_place_where_no_folder_can_be_put_is_the_users_mistake(
    place: str, quick: Callable[[Path], object], tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    (tmp_path / "link to nothing").symlink_to("nothing")
    with pytest.raises((UsageError, RefusedError)) as caught:
        quick(tmp_path / place.replace("below a file", "file/dist"))
    assert isinstance(caught.value, UsageError) or place == "/"
    assert (tmp_path / "file").read_bytes() == b"mine" and not list((tmp_path / "folder").iterdir())
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("way", ["swap", "stranger"])
def test_a_release_that_can_not_be_replaced_stays(
    way: str,
    quick: Callable[[Path], object],
    released: Released,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    out = tmp_path / "dist"
    out.mkdir()
    (out / LAYOUT.wheel).write_bytes(b"old")
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if way == "stranger" and self == out:  # somebody puts a file there in the last moment
            (out / "mine").write_bytes(b"x")
        if way == "swap" and target == out and (self / layout.SUMS).exists():
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises((OSError, RefusedError)):
        quick(out)
    assert held(out) == {LAYOUT.wheel: b"old"} | ({"mine": b"x"} if way == "stranger" else {})
    assert [path.name for path in tmp_path.iterdir()] == ["dist"]


def test_without_git_or_a_repository_that_is_said(clone: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    below = clone / "patches"
    with pytest.raises(UsageError, match="got no git checkout"):
        BUILD.find_source(below, LAYOUT.version)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="got no git on PATH"):
        BUILD.find_source(clone, LAYOUT.version)


def test_a_signed_commit_is_read_as_any_other(clone: Path, tmp_path: Path) -> None:
    key = make_key(tmp_path)
    (tmp_path / "signers").write_text(f"t@example.invalid {key.with_suffix('.pub').read_text()}", encoding="utf-8")
    settings = {"gpg.format": "ssh", "user.signingKey": key, "gpg.ssh.allowedSignersFile": tmp_path / "signers"}
    for name, value in {**settings, "log.showSignature": "true"}.items():
        git(clone, "config", name, str(value))
    git(clone, "commit", "-q", "-S", "--allow-empty", "-m", "Signed")
    said = subprocess.run(["git", "-C", str(clone), "log", "-1", "--format=%H"], capture_output=True, text=True)
    assert "Good" in said.stdout + said.stderr
    assert len(BUILD.find_source(clone, LAYOUT.version).commit) == 40


def test_another_backend_is_refused(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BUILD.importlib.metadata, "version", lambda name: "0.0")
    with pytest.raises(RefusedError, match=r"got setuptools 0\.0, expected"):
        BUILD.pinned_packages(repository)


def test_what_does_not_verify_is_not_put_out(repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good = BUILD.sbom.make
    monkeypatch.setattr(BUILD.sbom, "make", lambda *arguments: good(*arguments).replace(b'"file"', b'"data"'))
    with pytest.raises(RefusedError, match=f"does not verify: {LAYOUT.sbom}"):
        BUILD.build(BUILD.find_source(repository, LAYOUT.version), tmp_path / "dist", make_key(tmp_path))
    assert not (tmp_path / "dist").exists()


def test_the_bill_of_materials_keeps_the_schema(released: Released) -> None:
    pytest.importorskip("cyclonedx", reason="needs cyclonedx-python-lib")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = released.files[LAYOUT.sbom].decode()
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(text) is None
    assert validator.validate_str(text.replace('"library"', '"book"')) is not None
    document = json.loads(text)
    names = {component["name"] for component in document["components"]}
    assert {"msgspec", "unidiff", "packaging", LAYOUT.wheel} <= names
    assert {c["version"] for c in document["components"] if c["name"] == "unidiff" and "version" in c}


def test_the_provenance_names_commit_and_packages(released: Released) -> None:
    text = json.loads(released.files[LAYOUT.provenance])
    assert text["_type"] == "https://in-toto.io/Statement/v1"
    assert {s["name"]: s["digest"]["sha256"] for s in text["subject"]} == {
        name: sums.digest(released.files[name]) for name in LAYOUT.artefacts
    }
    uris = [found.get("uri", "") for found in text["predicate"]["buildDefinition"]["resolvedDependencies"]]
    assert any(uri.startswith("pkg:pypi/setuptools@") for uri in uris)


def test_tar_and_pip_read_what_we_write(released: Released, tmp_path: Path) -> None:
    for name in (LAYOUT.patches, LAYOUT.sdist):
        with tarfile.open(fileobj=io.BytesIO(released.files[name])) as opened:
            opened.extractall(tmp_path / name, **SAFELY)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", "site"]
    subprocess.run([*command, str(released.folder / LAYOUT.wheel)], cwd=tmp_path, check=True)
    assert (tmp_path / "site" / "megatron_fixes" / "_data" / "compat_matrix.yaml").is_file()
