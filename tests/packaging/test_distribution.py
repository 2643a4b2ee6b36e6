# SPDX-License-Identifier: Apache-2.0
"""What users install: the wheel has all the data, it doesn't matter from where it was built, and it unpacks whole.

Everything is built in copies, through the build backend's own hooks and without build isolation, so no network is
needed and the checkout stays as it was. Not handled: that the dependencies resolve (``make test`` installs them).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("setuptools.command.bdist_wheel", reason="needs setuptools >= 77")

ROOT = Path(__file__).resolve().parents[2]
NOT_SOURCE = shutil.ignore_patterns(
    ".git", ".venv", ".nox", ".*_cache", ".hypothesis", "__pycache__", "build", "dist", "*.egg-info", "_data"
)
EPOCH = "1767225600"


@dataclass(frozen=True)
class Built:
    """The distributions under test, and the tree that they were built from."""

    tree: Path
    sdist: Path
    wheel: Path
    wheel_of_sdist: Path


def copy_of_tree(to: Path) -> Path:
    """Copy what is source, and nothing that tools have left in the checkout."""
    shutil.copytree(ROOT, to, ignore=NOT_SOURCE)
    return to


def call_backend(hook: str, tree: Path, out: Path, umask: int = -1) -> Path:
    """Run one PEP 517 hook in ``tree`` and return the file that it made in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    code = f"import sys; from setuptools import build_meta as b; b.{hook}(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)],
        cwd=tree,
        env={**os.environ, "SOURCE_DATE_EPOCH": EPOCH},
        capture_output=True,
        text=True,
        check=False,
        umask=umask,
    )
    if done.returncode:
        raise RuntimeError(f"{hook} in {tree} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    (made,) = out.iterdir()
    return made


def unpacked(sdist: Path, to: Path) -> Path:
    """Unpack as pip and build do: owner and group write bits and such are not taken over."""
    with tarfile.open(sdist) as archive:
        # Python 3.11.2 (Debian 12) and older patch releases have no filters.
        archive.extractall(to, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (tree,) = to.iterdir()
    return tree


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    base = tmp_path_factory.mktemp("dist")
    tree = copy_of_tree(base / "tree")
    sdist = call_backend("build_sdist", copy_of_tree(base / "tree-for-sdist"), base / "sdist")
    return Built(
        tree=tree,
        sdist=sdist,
        wheel=call_backend("build_wheel", tree, base / "wheel"),
        wheel_of_sdist=call_backend("build_wheel", unpacked(sdist, base / "unpacked"), base / "wheel-of-sdist"),
    )


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def shipped(tree: Path) -> list[Path]:
    """Return what the wheel must carry as data, relative to the tree."""
    found = [p.relative_to(tree) for p in (tree / "patches").rglob("*") if p.is_file() and p.name[0] != "."]
    return [Path("compat_matrix.yaml"), *sorted(found)]


def test_wheel_from_sdist_equals_wheel_from_tree(built: Built) -> None:
    assert built.wheel.name == built.wheel_of_sdist.name
    assert built.wheel.read_bytes() == built.wheel_of_sdist.read_bytes()


@pytest.mark.parametrize(("mode", "umask"), [(0o664, 0o002), (0o600, 0o077), (0o755, 0o022)])
def test_wheel_does_not_depend_on_permissions(mode: int, umask: int, built: Built, tmp_path: Path) -> None:
    tree = copy_of_tree(tmp_path / "tree")
    for path in tree.rglob("*"):
        if path.is_file():
            path.chmod(mode)
    assert call_backend("build_wheel", tree, tmp_path / "out", umask).read_bytes() == built.wheel.read_bytes()


def test_wheel_carries_each_patch_and_the_matrix_unchanged(built: Built) -> None:
    expected = shipped(built.tree)
    assert any(path.suffix == ".patch" for path in expected)
    with zipfile.ZipFile(built.wheel) as archive:
        for path in expected:
            assert archive.read(f"megatron_fixes/_data/{path.as_posix()}") == (built.tree / path).read_bytes()


def test_wheel_carries_the_pth_beside_the_package(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        assert archive.read("megatron-fixes.pth") == (built.tree / "megatron-fixes.pth").read_bytes()


def test_wheel_carries_every_module_and_data_file_of_the_package(built: Built) -> None:
    package = built.tree / "megatron_fixes"
    wanted = {
        p.relative_to(built.tree).as_posix() for p in package.rglob("*") if p.suffix in {".py", ".json", ".typed"}
    }
    assert "megatron_fixes/errors.py" in wanted
    assert wanted <= names(built.wheel)


def test_wheel_holds_the_package_and_its_metadata_only(built: Built) -> None:
    tops = {name.split("/")[0] for name in names(built.wheel)}
    dist_info = f"megatron_fixes-{built.wheel.name.split('-')[1]}.dist-info"
    assert tops == {"megatron_fixes", dist_info, "megatron-fixes.pth"}


def test_wheel_carries_licence_and_notice(built: Built) -> None:
    endings = {name.rsplit("/", 1)[1] for name in names(built.wheel) if ".dist-info/licenses/" in name}
    assert endings == {"LICENSE", "NOTICE"}


def test_sdist_has_what_building_needs_and_no_tests(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "NOTICE", "megatron-fixes.pth"} <= held
    assert {path.as_posix() for path in shipped(built.tree)} <= held
    assert not [name for name in held if name.startswith(("tests", "docs", "ci/", ".", "megatron_fixes/_data"))]


def test_leftovers_of_an_earlier_build_do_not_travel(built: Built, tmp_path: Path) -> None:
    tree = copy_of_tree(tmp_path / "tree")
    for leftover in ("_data/patches/core_v0.0/MF0000-gone.patch", "gone.py", "catalog/gone.json"):
        path = tree / "build" / "lib" / "megatron_fixes" / leftover
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("# left by an earlier build\n")
    assert call_backend("build_wheel", tree, tmp_path / "out").read_bytes() == built.wheel.read_bytes()


@pytest.mark.parametrize("missing", ["compat_matrix.yaml", "patches"])
def test_a_tree_without_its_data_builds_no_wheel(missing: str, tmp_path: Path) -> None:
    tree = copy_of_tree(tmp_path / "tree")
    path = tree / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(RuntimeError, match="expected both"):
        call_backend("build_wheel", tree, tmp_path / "out")


def test_installed_wheel_has_its_data_beside_the_package(built: Built, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(built.wheel)], check=True)
    code = """
import json, pathlib, megatron_fixes
package = pathlib.Path(megatron_fixes.__file__).parent
files = [p.relative_to(package / "_data").as_posix() for p in (package / "_data").rglob("*") if p.is_file()]
print(json.dumps([str(package), megatron_fixes.__version__, sorted(files)]))
"""
    done = subprocess.run([python, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    package, version, files = json.loads(done.stdout)
    assert Path(package).is_relative_to(venv)
    assert version == built.wheel.name.split("-")[1]
    assert files == sorted(path.as_posix() for path in shipped(built.tree))
    program = (venv / "bin" / "megatron-fixes").read_text(encoding="utf-8")
    # What it imports at its head needs nothing else, so that little goes before the line from which Ctrl-C is ours.
    (line,) = [line for line in program.splitlines() if line.startswith("from ")]
    subprocess.run([python, "-I", "-c", line], cwd=tmp_path, check=True)
