# SPDX-License-Identifier: Apache-2.0
"""``apply`` to megatron-core as pip installed it, in a virtual environment: what pip says and does afterwards.

pip keeps the sha256 of each file in RECORD. It doesn't look at it when it checks, upgrades or uninstalls, so an apply
leaves RECORD as it is: the hashes there are those of the release, and ``pip install --force-reinstall`` is a way back.
The wheel is made here, of real 0.16.1 files.
"""

from __future__ import annotations

import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_fixes.cli.scan import renew
from megatron_fixes.patching.target import find_target

from .conftest import BUFFER, IDS, expected, findings

Cli = Callable[..., Any]


class Environment(NamedTuple):
    """A virtual environment with megatron-core, and the wheel that it came from."""

    root: Path
    site: Path
    wheel: Path

    def pip(self, *arguments: object) -> str:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.root, *arguments]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self, *options: str) -> None:
        self.pip("install", "--quiet", "--no-index", "--no-deps", "--no-compile", *options, self.wheel)


def make_wheel(tree: Path, folder: Path) -> Path:
    info = "megatron_core-0.16.1.dist-info"
    files = {path.relative_to(tree).as_posix(): path.read_text() for path in tree.rglob("*.py")}
    files[f"{info}/METADATA"] = "Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.16.1\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    wheel = folder / "megatron_core-0.16.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


@pytest.fixture
def environment(tree: Path, tmp_path: Path) -> Environment:
    venv.create(tmp_path / "venv", symlinks=True)
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    made = Environment(tmp_path / "venv", site, make_wheel(tree, tmp_path))
    made.install()
    return made


def test_the_environment_is_not_written_to_unless_asked_for(cli: Cli, environment: Environment, contents: Any) -> None:
    before = contents(environment.root)
    for path in (environment.site, environment.site / "megatron"):
        done = cli("apply", path)
        assert (done.code, done.out) == (1, "")
        assert "an upgrade would lose the fixes" in done.err
        assert f"megatron-fixes apply {path} --installed" in done.err and "PYTHONPATH" in done.err
    assert contents(environment.root) == before
    assert cli("apply", environment.site, "--installed", "--json").json["applied"] == IDS
    assert environment.pip("check") == "No broken requirements found.\n"
    assert cli("apply", environment.site).code == 1
    done = cli("revert", environment.site)
    assert (done.code, done.err) == (0, "")
    assert contents(environment.root) == before


def test_the_hints_are_commands_that_do_what_they_say(cli: Cli, environment: Environment, contents: Any) -> None:
    before, site = contents(environment.root), environment.site
    hint = cli("apply", site, "--only", IDS[0]).err.splitlines()[-1]
    assert hint.endswith(f"megatron-fixes apply {site} --installed --only {IDS[0]}")
    out = cli("apply", site, "--installed").out
    assert out.splitlines()[-1] == f"to take them out: megatron-fixes revert {site}"
    patched = contents(environment.site)
    out = cli("revert", site).out
    assert contents(environment.root) == before
    assert out.splitlines()[-1] == f"to put them in again: megatron-fixes apply {site} --installed"
    assert cli(*out.splitlines()[-1].removeprefix("to put them in again: megatron-fixes ").split()).code == 0
    again = contents(environment.site)
    assert {path: again[path] for path in again if path.endswith(".py")} == {
        path: patched[path] for path in patched if path.endswith(".py")
    }
    target = find_target(site)
    assert renew(target, "X") == "megatron-fixes revert X && megatron-fixes apply X --installed"


def test_record_is_left_alone_and_pip_takes_all_of_it_away(cli: Cli, environment: Environment) -> None:
    (record,) = environment.site.glob("*.dist-info/RECORD")
    before = record.read_bytes()
    assert BUFFER.encode() in before
    assert cli("apply", environment.site, "--installed").code == 0
    assert record.read_bytes() == before
    assert "megatron-core" in environment.pip("list", "--format", "freeze")
    environment.pip("uninstall", "--yes", "megatron-core")
    assert {path.relative_to(environment.site).parts[0] for path in environment.site.rglob("*") if path.is_file()} == {
        ".megatron-fixes"
    }
    done = cli("revert", environment.site)
    assert done.code == 2 and "got a directory without megatron/core" in done.err


@pytest.mark.parametrize("uninstalled", [False, True])
def test_a_new_installation_is_reverted_to_nothing_and_applied_to_again(
    cli: Cli, environment: Environment, contents: Any, uninstalled: bool
) -> None:
    before = contents(environment.site)
    assert cli("apply", environment.site, "--installed").code == 0
    if uninstalled:
        environment.pip("uninstall", "--yes", "megatron-core")
    environment.install("--force-reinstall")
    assert findings(cli("scan", environment.site, "--json")) == expected()
    assert cli("apply", environment.site, "--installed", "--json").json["applied"] == IDS
    environment.install("--force-reinstall")
    assert cli("revert", environment.site).code == 0
    found = contents(environment.site)
    assert found.keys() == before.keys()
    assert {path: found[path] for path in found if path.endswith(".py")} == {
        path: before[path] for path in before if path.endswith(".py")
    }
