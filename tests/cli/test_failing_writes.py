# SPDX-License-Identifier: Apache-2.0
"""A disk that is full and permission that ends half-way: every file is as it was, and the command can be repeated.

Real ones, in a small tmpfs and as another user; and every call that writes made to fail in its turn. Fixes edit two
files. What is read-only from the start is in ``test_apply_revert`` and ``patching/test_transaction``.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_fixes.cli.main import main

from .. import synthetic
from ..synthetic import FIRST, IDS, SECOND, edited, patched

Cli = Callable[..., Any]
OLD, NEW = patched(), patched(*IDS)
NOBODY = 65534


pytestmark = pytest.mark.usefixtures("synthetic_fixes")


# Every call that writes fails in its turn

TAKES_SPACE = ("open", "write", "mkdir", "fsync", "setxattr")
WRITES = (*TAKES_SPACE, "replace", "fchmod", "utime", "unlink", "rmdir")


def takes_space(name: str, arguments: tuple[Any, ...]) -> bool:
    """Whether a call can meet a full disk: opening what is there can't, nor syncing a folder."""
    if name == "open":
        return bool(arguments[1] & os.O_CREAT)
    return name != "fsync" or stat.S_ISREG(os.fstat(arguments[0]).st_mode)


class Failing:
    """Lets calls of ``os`` fail: the nth of them, or all from the nth on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], nth: int, *, lasting: bool) -> None:
        self.count = self.failed = 0
        self.nth, self.lasting = nth, lasting
        for name in names:
            monkeypatch.setattr(os, name, self.wrapped(name, getattr(os, name)))

    def wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if takes_space(name, arguments):
                self.count += 1
                if self.count == self.nth or (self.lasting and self.count > self.nth):
                    self.failed += 1
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, **named)

        return call


RUNS: dict[str, tuple[list[list[str]], str, dict[str, bytes]]] = {
    "apply": ([], "apply", OLD),
    "stacked apply": ([["apply", "--only", "MF9002"]], "apply", patched("MF9002")),
    "revert": ([["apply"]], "revert", NEW),
}


@pytest.mark.parametrize(("names", "lasting"), [(WRITES, False), (TAKES_SPACE, True)])
@pytest.mark.parametrize("run", RUNS)
def test_every_failing_write_leaves_every_file_as_it_was(
    run: str, names: tuple[str, ...], lasting: bool, cli: Cli, tmp_path: Path, contents: Any
) -> None:
    before_it, command, as_it_was = RUNS[run]
    untouched = contents(synthetic.write_tree(tmp_path / "untouched"))
    refused = 0
    for nth in range(1, 1000):
        tree = synthetic.write_tree(tmp_path / str(nth))
        for arguments in before_it:
            assert cli(*arguments, tree).code == 0
        with pytest.MonkeyPatch.context() as patch:
            failing = Failing(patch, names, nth, lasting=lasting)
            done = cli(command, tree)
        if not failing.failed:
            assert done.code == 0
            break
        if done.code == 0:  # what could not be cleaned up is nobody's loss
            assert edited(tree) == (OLD if command == "revert" else NEW)
        else:
            refused += 1
            assert done.code == 1 and os.strerror(errno.ENOSPC) in done.err and "  hint: " in done.err
            assert edited(tree) == as_it_was
            assert cli(command, tree).code == 0
        assert not list(tree.rglob("*.megatron-fixes-new"))
        assert cli("revert", tree).code == 0
        assert contents(tree) == untouched
    assert refused > 10


# Mounts: a full disk, files that are mounted by themselves


def with_own_mounts(distribution: Path, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a program that may mount, where nobody else sees it; it has to end with 0."""
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], timeout=60, capture_output=True).returncode:
        pytest.skip("this system lets nobody mount a file system of his own")
    environment = {**os.environ, "PYTHONPATH": str(distribution), "PYTHONDONTWRITEBYTECODE": "1"}
    words = [*alone, sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(words, env=environment, cwd=distribution, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


FILL = """
import os, subprocess, sys
from pathlib import Path
from megatron_fixes.cli.main import main

place, tree, command = Path(sys.argv[1]), Path(sys.argv[1]) / "tree", sys.argv[2]
page = os.sysconf("SC_PAGESIZE")
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={200 * page}", "none", str(place)], check=True)
subprocess.run(["cp", "-r", sys.argv[3], str(tree)], check=True)
names = sys.argv[4:]
read = lambda: [(tree / name).read_bytes() for name in names]
if command == "revert":
    assert main(["apply", str(tree)]) == 0
before = read()
for free in range(200):
    left = os.statvfs(place)
    (place / "filling").write_bytes(b"x" * (left.f_bfree - free) * page)
    assert os.statvfs(place).f_bfree == free
    code = main([command, str(tree)])
    if code == 0:
        assert read() != before
        print("done with", free, flush=True)
        break
    assert code == 1 and read() == before, free
    assert not list(tree.rglob("*-new")), free
    (place / "filling").unlink()
    if command == "apply":
        assert not (tree / ".megatron-fixes").exists(), free
assert main(["revert", str(tree)]) == 0
assert not (tree / ".megatron-fixes").exists()
"""


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_a_disk_with_any_number_of_pages_left_is_refused_or_enough(
    command: str, distribution: Path, tmp_path: Path
) -> None:
    (tmp_path / "disk").mkdir()
    tree = synthetic.write_tree(tmp_path / "tree")
    done = with_own_mounts(distribution, FILL, tmp_path / "disk", command, tree, FIRST, SECOND)
    needed = int(done.stdout.split("done with ")[1].split()[0])
    assert done.stderr.count("No space left on device") == needed > 2


MOUNT = """
import subprocess, sys
from megatron_fixes.cli.main import main

tree, path, options = sys.argv[1:]
subprocess.run(["mount", "--bind", path, path], check=True)
if options:
    subprocess.run(["mount", "-o", "remount,bind," + options, path], check=True)
assert main(["apply", tree]) == 1
"""


@pytest.mark.parametrize(
    ("path", "options", "said"),
    [
        (SECOND, "", "got 'Device or resource busy' while writing; every file is as it was"),
        (SECOND, "ro", "got a read-only file"),
        ("megatron/core", "ro", "got a read-only file"),
        (".", "ro", "got a read-only file"),
    ],
)
def test_what_is_mounted_by_itself_is_refused_and_nothing_changes(
    distribution: Path, tmp_path: Path, contents: Any, path: str, options: str, said: str
) -> None:
    """A file of a container that is mounted from outside may be written, but not be replaced."""
    tree = synthetic.write_tree(tmp_path / "tree")
    before = contents(tree)
    done = with_own_mounts(distribution, MOUNT, tree, tree / path, options)
    assert said in done.stderr and ("how it is mounted" in done.stderr) == bool(options)
    assert contents(tree) == before
    assert not list(tree.rglob("*-new"))


# Permission that ends half-way


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that everybody may enter."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def as_nobody(log: Path, *arguments: str) -> tuple[int, str]:
    """Run a command in a fork that is another user; its exit code and what it said."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            with open(log, "w") as sys.stdout:
                sys.stderr = sys.stdout
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
                code = main(arguments)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), log.read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("command", ["apply", "revert"])
def test_a_file_that_may_be_written_but_not_replaced_undoes_the_one_before(
    command: str, shared: Path, cli: Cli, contents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sticky folder lets others write to a file, and make files beside it, but not replace it."""
    synthetic.use(synthetic.build(shared / "distribution"), monkeypatch)
    tree = synthetic.write_tree(shared / "tree")
    second = tree / "megatron/core/sticky"
    second.mkdir()
    (tree / SECOND).rename(second / "second.py")
    (tree / SECOND).symlink_to(second / "second.py")
    if command == "revert":
        assert cli("apply", tree).code == 0
    for path in (tree, *tree.rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    os.chown(second, 0, 0)
    os.chmod(second, 0o1777)
    os.chown(second / "second.py", 0, 0)
    os.chmod(second / "second.py", 0o666)
    before, times = contents(tree), [(tree / path).stat().st_mtime_ns for path in (FIRST, SECOND)]
    code, said = as_nobody(shared / "log", command, str(tree))
    assert code == 1, said
    assert "got 'Operation not permitted' while writing; every file is as it was" in said and SECOND in said
    assert contents(tree) == before
    assert (tree / FIRST).stat().st_mtime_ns != times[0]  # it had been replaced, and was put back
    assert (tree / SECOND).stat().st_mtime_ns == times[1]
    os.chmod(second, 0o777)
    code, said = as_nobody(shared / "log", command, str(tree))
    assert code == 0, said
    assert edited(tree) == (NEW if command == "apply" else OLD)


@pytest.mark.parametrize("command", ["apply", "revert"])
def test_every_rename_that_is_refused_leaves_every_file_as_it_was(
    command: str, cli: Cli, tmp_path: Path, contents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = synthetic.write_tree(tmp_path / "tree")
    if command == "revert":
        assert cli("apply", tree).code == 0
    before = edited(tree)
    for nth in range(1, 100):
        with monkeypatch.context() as patch:
            failing = Failing(patch, ("replace",), nth, lasting=False)
            done = cli(command, tree)
        if not failing.failed:
            break
        assert done.code == 1
        assert edited(tree) == before
    assert nth > 4
    assert done.code == 0 and edited(tree) != before


def test_undoing_that_fails_too_is_said_and_is_mended_by_the_next_command(
    cli: Cli, tmp_path: Path, contents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = synthetic.write_tree(tmp_path / "tree")
    before = contents(tree)
    real = os.replace

    def only_the_first(source: Any, to: Any) -> None:
        if Path(to).suffix == ".py" and edited(tree) != OLD:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        real(source, to)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", only_the_first)
        done = cli("apply", tree)
    assert done.code == 1 and "some files hold their new bytes" in done.err and "then repeat" in done.err
    assert edited(tree) not in (OLD, NEW)
    assert "was cut short" in cli("scan", tree).out
    assert "an interrupted apply was undone" in cli("revert", tree).out
    assert contents(tree) == before
