# SPDX-License-Identifier: Apache-2.0
"""A parent that a server forked is as one of its own: nothing of another tree is in it, and it ends as it should.

A small tree stands for a release: its ``megatron.core`` can't be imported, and the reason that it gives is what it
found in its process. Real servers, no ranks; what ranks do in such a parent is what ``tests/fixes`` is about. A driver
in C, whose NVML counts two GPUs, shows a torch that is built for CUDA what it would see on a GPU node.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_fixes.proofs import __main__ as proofs
from megatron_fixes.proofs.parent import load

FOUND = """
import gc, json, os, sys, tempfile, torch
raise ImportError(json.dumps({
    "word": "first",
    "variables": {name: os.environ.get(name) for name in ("MEGATRON_FIXES", "TMPDIR", "SOME_TEST")},
    "cwd": os.getcwd(), "temporary": tempfile.gettempdir(), "path": sys.path, "file": __file__, "server": os.getppid(),
    "finders": [type(finder).__module__ for finder in sys.meta_path], "shim": torch.cuda.current_device.__module__,
}))
"""
# What torch's CUDA runtime asks first. torch loads libcuda when it is imported; what no fork survives is cuInit.
DRIVER = """
#include <stdio.h>
#include <string.h>
int nvmlInit(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int cuInit(unsigned flags) { puts("cuInit"); return fflush(stdout), 100; }
static int version(int *number) { *number = 13000; return 0; }
static int refuse(void) { return 100; }
int cuGetProcAddress(const char *name, void **found, int version_, unsigned long long flags, int *status) {
  *found = !strcmp(name, "cuInit") ? (void *)cuInit : !strcmp(name, "cuDriverGetVersion") ? (void *)version
    : !strcmp(name, "cuGetProcAddress") ? (void *)cuGetProcAddress : (void *)refuse;
  if (status) *status = 0;
  return 0;
}
int cuGetProcAddress_v2(const char *name, void **found, int version_, unsigned long long flags, int *status) {
  return cuGetProcAddress(name, found, version_, flags, status);
}
"""


def tree(folder: Path, text: str = FOUND) -> Path:
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text(text)
    return folder


def reason(path: Path, overlay: tuple[str, ...] = ()) -> str:
    (result,) = proofs.run_parent(path, "gloo", ["MF0012"], overlay)
    assert result["outcome"] == "not-runnable"
    said: str = result["evidence"]["reason"]
    return said


def found(path: Path, overlay: tuple[str, ...] = ()) -> dict[str, Any]:
    what: dict[str, Any] = json.loads(reason(path, overlay).removeprefix("ImportError: "))
    return what


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    """A folder with the libraries of a driver."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "driver.c").write_text(DRIVER)
    for library in ("libnvidia-ml.so.1", "libcuda.so.1"):
        command = [compiler, "-shared", "-fPIC", "-o", str(tmp_path / library), str(tmp_path / "driver.c")]
        subprocess.run(command, check=True, timeout=60)
    return tmp_path


def test_a_server_has_nothing_of_megatron_and_is_not_changed(driver: Path) -> None:
    program = """
import gc, sys, threading
from megatron_fixes.proofs import fork_server
fork_server.preload()
import torch
from torch.overrides import _get_current_function_mode_stack
print([name for name in sys.modules if name.partition(".")[0] == "megatron"],
      [name for name in sys.modules if name.startswith(("megatron_fixes.auto", "megatron_fixes.proofs.mf"))],
      torch.cuda.current_device.__module__, _get_current_function_mode_stack(), threading.active_count(),
      gc.isenabled(), torch.cuda.is_initialized(), "torch._dynamo" in sys.modules, sep="; ")
print("for CUDA" if torch.version.cuda else "for CPUs")
if torch.version.cuda:
    print(torch.cuda.device_count(), "GPUs", flush=True)
    torch._C._cuda_getDeviceCount()
"""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(driver), "CUDA_VISIBLE_DEVICES": "0,1"}
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    clean = "[]; []; torch.cuda; []; 1; True; False; True\n"
    assert done.stdout in (f"{clean}for CPUs\n", f"{clean}for CUDA\n2 GPUs\ncuInit\n"), done.stderr


def test_collections_are_on_again_after_an_import_even_one_that_failed(tmp_path: Path) -> None:
    try:
        with pytest.raises(ImportError, match="mf9999"):
            load("MF9999", tmp_path)
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_each_parent_has_its_own_tree_environment_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = tree(tmp_path / "one"), tree(tmp_path / "other", FOUND.replace("first", "other"))
    monkeypatch.setenv("SOME_TEST", "1")
    first = found(one)
    monkeypatch.setenv("SOME_TEST", "2")
    second = found(other)
    monkeypatch.delenv("SOME_TEST")
    third = found(other)
    assert first["server"] == second["server"] != os.getpid()
    assert [first["word"], second["word"]] == ["first", "other"]
    assert [what["variables"]["SOME_TEST"] for what in (first, second, third)] == ["1", "2", None]
    assert first["cwd"] != second["cwd"]
    for what, path in ((first, one), (second, other)):
        assert what["path"][0] == str(path)
        assert Path(what["file"]).is_relative_to(path)
        assert what["cwd"] == what["temporary"] == what["variables"]["TMPDIR"]
        assert not Path(what["cwd"]).exists()
        assert not any(Path(entry).name.startswith("megatron-fixes-") for entry in what["path"])
        assert what["shim"] == "megatron_fixes.proofs.shim"


def test_a_changed_file_is_what_runs_even_with_the_same_size_and_time(tmp_path: Path) -> None:
    path = tree(tmp_path)
    module = path / "megatron" / "core" / "__init__.py"
    before = module.stat()
    assert found(path)["word"] == "first"
    module.write_text(module.read_text().replace("first", "other"))
    os.utime(module, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert module.stat().st_size == before.st_size
    assert found(path)["word"] == "other"


def test_the_overlay_is_a_parents_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tree(tmp_path)
    monkeypatch.setenv("MEGATRON_FIXES", "all")
    for overlay in (("all",), (), ("MF0003",), ()):
        what = found(path, overlay)
        assert what["variables"]["MEGATRON_FIXES"] == (",".join(overlay) or "none")
        assert ("megatron_fixes.overlay.finder" in what["finders"]) == bool(overlay)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import os; os._exit(3)", "ended with exit code 3: no message"),
        ("import os; os.kill(os.getpid(), 9)", "ended with exit code -9: no message"),
        ("1 / 0", "ended with exit code 1: ZeroDivisionError: division by zero"),
        ("raise SystemExit(4)", "ended with exit code 1: SystemExit: 4"),
        ("import os; os.kill(os.getppid(), 9); import time; time.sleep(600)", "ended with exit code -9: no message"),
    ],
)
def test_a_parent_that_dies_is_told_and_the_next_one_runs(tmp_path: Path, text: str, said: str) -> None:
    assert reason(tree(tmp_path / "dies", text)) == f"the proof's process {said}"
    assert found(tree(tmp_path / "next"))["word"] == "first"


def test_a_parent_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = f"import os, time, pathlib\npathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
    monkeypatch.setattr(proofs, "PARENT_TIMEOUT_S", 3.0)
    found(tree(tmp_path / "warm"))
    assert reason(tree(tmp_path / "hangs", hanging + "time.sleep(600)")).endswith("ended with exit code -9: no message")
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_parent_ends_with_whoever_no_longer_listens(tmp_path: Path) -> None:
    text = "import time\nclass Slow(ImportError):\n    def __str__(self): time.sleep(600)\n"
    path = tree(tmp_path, text + FOUND.replace("raise", "if 'MF0011' in sys.argv: raise Slow\nraise"))
    listening = proofs.run_parent(path, "gloo", ["MF9999", "MF0011"])
    assert next(listening)["outcome"] == "not-runnable"
    listening.close()
    assert found(path)["word"] == "first"


def test_two_at_once_have_a_server_each(tmp_path: Path) -> None:
    path = tree(tmp_path)
    outer = proofs.run_parent(path, "gloo", ["MF9999", "MF0012"])
    next(outer)
    inner = found(path)
    (rest,) = outer
    assert json.loads(rest["evidence"]["reason"].removeprefix("ImportError: "))["server"] != inner["server"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_server_and_parent_end_with_the_process_that_started_them(tmp_path: Path, how: signal.Signals) -> None:
    told = tmp_path / "pids"
    hanging = f"import os, time\ntold = {str(told)!r}\nwith open(told + '.part', 'w') as file:\n"
    hanging += "    print(os.getpid(), os.getppid(), file=file)\nos.rename(told + '.part', told)\ntime.sleep(600)\n"
    program = "import sys; from pathlib import Path; from megatron_fixes.proofs.__main__ import run_parent\n"
    program += "list(run_parent(Path(sys.argv[1]), 'gloo', ['MF0012']))"
    process = subprocess.Popen([sys.executable, "-c", program, str(tree(tmp_path / "hangs", hanging))])
    try:
        deadline = time.monotonic() + 60
        while not told.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        pids = [int(pid) for pid in told.read_text().split()]
        assert all(alive(pid) for pid in pids)
        process.send_signal(how)
        process.wait(timeout=30)
        assert all(gone(pid) for pid in pids)
    finally:
        process.kill()
        process.wait()
