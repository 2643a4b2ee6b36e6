# SPDX-License-Identifier: Apache-2.0
"""Real megatron-core files to work on, what the catalogue says of them, and the command line.

The files are those of ``RELEASE``. No test names the fixes of a release by hand: what is expected comes from the
catalogue, so that it holds whatever fixes there are, also gated ones and such without a patch.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_fixes import catalog
from megatron_fixes.cli.main import main
from megatron_fixes.overlay.tables import load_tables
from megatron_fixes.patching.hunks import touched_paths

from .. import synthetic

ROOT = Path(__file__).resolve().parents[2]
BUFFER = "megatron/core/distributed/param_and_grad_buffer.py"
# All that find_target and the fixes look at; the rest of a release would only be copied.
FILES = ("megatron/core/__init__.py", "megatron/core/package_info.py", *load_tables().paths.values())

RELEASE = "0.16.1"
CATALOG = catalog.load()
SERIES = CATALOG.series[CATALOG.matrix.releases[RELEASE].line]
_FITTING = [patch for patch in SERIES.patches if RELEASE in patch.header.applies_to]
_UNGATED = [patch.fix_id for patch in _FITTING if not patch.gated]
# What ``apply`` without names puts in, in the order in which it does.
PATCHES = [patch for patch in SERIES.closure(_UNGATED) if patch in _FITTING]
IDS = [patch.fix_id for patch in PATCHES]
# Needed fixes that it leaves, and those that are not needed; by number.
GATED = sorted(patch.fix_id for patch in _FITTING if patch.fix_id not in IDS)
_VERDICTS = {fix_id: CATALOG.matrix.fixes[fix_id].cells[RELEASE].verdict for fix_id in sorted(CATALOG.matrix.fixes)}
BARE = [i for i, verdict in _VERDICTS.items() if verdict == "needed" and CATALOG.patch(i, RELEASE) is None]
NOT_NEEDED = [fix_id for fix_id, verdict in _VERDICTS.items() if verdict != "needed"]

Findings = dict[str, tuple[str, str | None]]


def expected(applied: Iterable[str] = ()) -> Findings:
    """Verdict and remedy of every fix for unedited files of ``RELEASE`` with some fixes in them."""
    inside = set(applied)
    remedies = {i: "patch" if CATALOG.patch(i, RELEASE) else "none" for i in _VERDICTS if i not in NOT_NEEDED}
    return {i: ("applied", None) if i in inside else (v, remedies.get(i)) for i, v in _VERDICTS.items()}


def findings(done: Done) -> Findings:
    """Verdict and remedy of every fix in the JSON of ``scan``."""
    return {fix["id"]: (fix["verdict"], fix["remedy"]) for fix in done.json["fixes"]}


def nothing(bare: Iterable[str] = BARE, gated: Iterable[str] = GATED) -> str:
    """What ``apply`` says where all is in that it would put in."""
    left = [f"{fix_id} is needed, but there is no patch for {RELEASE} yet" for fix_id in bare]
    left += [f"{fix_id} is needed, but only applied by name: --only {fix_id}" for fix_id in gated]
    return f"nothing to apply: {'; '.join(left)}" if left else "nothing to do"


def files_of(fix_ids: Iterable[str] = IDS) -> list[str]:
    """The files that some fixes' patches edit, in order of name."""
    wanted = set(fix_ids)
    return sorted({path for patch in _FITTING if patch.fix_id in wanted for path in touched_paths(patch.text)})


def touching(function: str) -> list[str]:
    """The fixes with a patch that touch a function (the last part of its name): none can be judged if it is edited."""
    touches = CATALOG.known.touches
    return sorted(p.fix_id for p in _FITTING if any(name.endswith(f".{function}") for name in touches[p.fix_id]))


def needing_line(text: str) -> list[str]:
    """The fixes whose patches have a line with this text in a hunk's context or among what they take out."""
    bodies = {patch.fix_id: patch.text.split("\ndiff --git ", 1)[1].splitlines() for patch in _FITTING}
    return sorted(i for i, lines in bodies.items() if any(line[:1] in (" ", "-") and text in line for line in lines))


def requiring(fix_ids: Iterable[str]) -> list[str]:
    """The fixes with a patch that require one of these, directly or not."""
    named = set(fix_ids)
    return sorted(
        patch.fix_id
        for patch in _FITTING
        if patch.fix_id not in named and named & {required.fix_id for required in SERIES.closure([patch.fix_id])}
    )


# Fixes that edit the one file ``BUFFER``, as do those that they require.
IN_BUFFER = [i for i in IDS if files_of(patch.fix_id for patch in SERIES.closure([i])) == [BUFFER]]


def copy_files(release_tree: Path, to: Path) -> Path:
    """Copy ``FILES``; what a release does not have is left out, or taken away where it is."""
    for path in FILES:
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        if (release_tree / path).is_file():
            shutil.copyfile(release_tree / path, to / path)
        else:
            (to / path).unlink(missing_ok=True)
    return to


@pytest.fixture
def contents() -> Callable[[Path], dict[str, bytes]]:
    """Tell every file below a folder with its bytes, git's own aside."""

    def tell(root: Path) -> dict[str, bytes]:
        found = {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        return {path: content for path, content in found.items() if not path.startswith(".git/")}

    return tell


class Done(NamedTuple):
    """What a command printed and ended with."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def tree(release_tree: Path, tmp_path: Path) -> Path:
    """A writable copy of 0.16.1, cut down to what the fixes touch."""
    return copy_files(release_tree, tmp_path / "Megatron-LM")


@pytest.fixture
def buffer(tree: Path) -> Path:
    """The file that most fixes edit, in the copy."""
    return tree / BUFFER


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run the command line within this process."""

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Done(code, *capsys.readouterr())

    return run


def spawn(
    *arguments: object, root: Path = ROOT, program: Sequence[str] = ("-m", "megatron_fixes"), **variables: str
) -> Done:
    """Run the command line as a process, from the package below ``root``."""
    command = [sys.executable, *program, *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONSAFEPATH": "1", **variables}
    done = subprocess.run(command, capture_output=True, env=environment, cwd=root, timeout=60)
    return Done(done.returncode, done.stdout.decode("utf-8"), done.stderr.decode("utf-8"))


@pytest.fixture
def process() -> Callable[..., Done]:
    return spawn


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of this checkout's package and data, to be spoilt."""
    place = tmp_path / "checkout"
    for name in ("megatron_fixes", "patches"):
        shutil.copytree(ROOT / name, place / name, ignore=shutil.ignore_patterns("__pycache__", "_data"))
    shutil.copyfile(ROOT / "compat_matrix.yaml", place / "compat_matrix.yaml")
    return place


@pytest.fixture
def git() -> Callable[..., str]:
    if shutil.which("git") is None:
        pytest.skip("git is not installed")

    def run(cwd: Path, *arguments: str) -> str:
        command = ["git", "-c", "user.name=t", "-c", "user.email=t@example.invalid", *arguments]
        return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True, timeout=60).stdout

    return run


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The distribution of ``tests/synthetic.py``."""
    return synthetic.build(tmp_path_factory.mktemp("distribution") / "synthetic")


@pytest.fixture
def synthetic_fixes(distribution: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process use that distribution's fixes."""
    synthetic.use(distribution, monkeypatch)
