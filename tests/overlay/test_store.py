# SPDX-License-Identifier: Apache-2.0
"""The cache: only a folder that is ours alone, entries whole or not at all, and never needed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_fixes.overlay.store import FOLDER, STALE_S, Entry, Store, UnusableError

ENTRY = Entry(b"{}", {"megatron/core/a.py": b"a = 1\n", "megatron/core/b/c.py": b"c = 1\n"})
KEY = "0" * 32
RESULT = "from megatron.core.distributed import Buffer; print(Buffer([1, 2]).finish())"


def test_an_entry_comes_back_as_it_was_written(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "cache")
    store.write(KEY, ENTRY)
    assert store.read(KEY) == ENTRY
    assert store.read("1" * 32) is None
    assert Path(store.path(KEY, "megatron/core/a.py")).read_bytes() == b"a = 1\n"
    assert (tmp_path / "deep" / "cache" / FOLDER).stat().st_mode & 0o777 == 0o700
    assert os.listdir(tmp_path / "deep" / "cache" / FOLDER) == [KEY]


@pytest.mark.parametrize("name", ["index", "decision.json", "megatron/core/a.py"])
@pytest.mark.parametrize("damage", ["removed", "cut", "changed"])
def test_a_damaged_entry_is_no_entry_and_is_replaced(name: str, damage: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(KEY, ENTRY)
    path = Path(store.path(KEY, name))
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-2] if damage == "cut" else path.read_bytes()[:-1] + b"#")
    assert store.read(KEY) is None
    store.write(KEY, ENTRY)
    assert store.read(KEY) == ENTRY
    assert os.listdir(tmp_path / FOLDER) == [KEY]


def test_a_file_in_the_way_of_an_entry_is_replaced(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.check()
    (tmp_path / FOLDER / KEY).write_text("in the way")
    assert store.read(KEY) is None
    store.write(KEY, ENTRY)
    assert store.read(KEY) == ENTRY
    assert os.listdir(tmp_path / FOLDER) == [KEY]


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o707, 0o701, 0o740])
def test_a_folder_that_others_reach_is_not_used(mode: int, tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER).chmod(mode)
    for use in (Store(tmp_path).check, lambda: Store(tmp_path).read(KEY), lambda: Store(tmp_path).write(KEY, ENTRY)):
        with pytest.raises(UnusableError, match=f"mode {mode:o}, expected 700") as caught:
            use()
        assert caught.value.foreign
    assert os.listdir(tmp_path / FOLDER) == []


def test_a_link_is_not_followed_even_to_a_folder_of_ours(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / FOLDER).symlink_to(tmp_path / "real")
    with pytest.raises(UnusableError, match="symbolic link") as caught:
        Store(tmp_path).write(KEY, ENTRY)
    assert caught.value.foreign
    assert os.listdir(tmp_path / "real") == []


def test_a_linked_text_is_not_read(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.write(KEY, ENTRY)
    path = Path(store.path(KEY, "megatron/core/a.py"))
    (tmp_path / "same").write_bytes(path.read_bytes())
    path.unlink()
    path.symlink_to(tmp_path / "same")
    assert store.read(KEY) is None


@pytest.mark.parametrize("cache", [None, Path("/dev/null/below"), Path("/proc/none")])
def test_no_folder_is_a_reason_and_not_foreign(cache: Path | None) -> None:
    with pytest.raises(UnusableError) as caught:
        Store(cache).write(KEY, ENTRY)
    assert not caught.value.foreign


def test_what_killed_writers_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.check()
    for name, age_s in (("old", STALE_S + 60), ("young", 60)):
        left = tmp_path / FOLDER / f".writing-{name}"
        (left / "megatron").mkdir(parents=True)
        (left / "megatron" / "part.py").write_text("x")
        os.utime(left, (time.time() - age_s,) * 2)
    store.write(KEY, ENTRY)
    assert sorted(os.listdir(tmp_path / FOLDER)) == [".writing-young", KEY]


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    # A limit on the size of a file is as good as a full disk: the write fails in the middle.
    code = f"""import os, resource, sys
from pathlib import Path
from megatron_fixes.overlay.store import *
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
store = Store(Path({str(tmp_path)!r}))
try: store.write("{KEY}", Entry(b"{{}}", {{"a.py": b"x" * 2000, "b.py": b"x" * 9000}}))
except UnusableError as error: print(error.message, error.foreign)
store.write_code("{KEY}", "a.code", b"x" * 9000)
print(os.listdir(store.folder))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["File too large False", "[]"]


def test_a_process_on_a_full_disk_runs_mended_from_memory(env: Any) -> None:
    # No bytecode: CPython moves a cut-off .pyc into place, and this release is shared with other tests.
    limit = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300)); sys.dont_write_bytecode = True\n"
    )
    done = env.run(limit + RESULT)
    assert done.stdout.strip() == "6"
    assert done.stderr.count("\n") == 1
    assert "can't be used (File too large): patched in memory" in done.stderr
    assert os.listdir(env.cache) == []


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"HOME": "/dev/null"}, "Not a directory"),
        ({"HOME": "/proc/nowhere"}, "No such file or directory"),
        ({"XDG_CACHE_HOME": "/proc"}, ""),
        ({"MEGATRON_FIXES_CACHE": "/sys/none"}, ""),
    ],
)
def test_without_a_home_that_can_be_written_to_it_runs_from_memory(
    environ: dict[str, str], reason: str, env: Any
) -> None:
    done = env.run(RESULT, **environ)
    assert done.stdout.strip() == "6"
    assert done.stderr.count("\n") == 1
    assert f"can't be used ({reason}" in done.stderr
    assert done.stderr.count("patched in memory") == 1
    strict = env.run(RESULT, MEGATRON_FIXES_STRICT="1", **environ)
    assert strict.stdout.strip() == "6"


def test_an_unset_home_is_borne(env: Any) -> None:
    # Without HOME the password database is asked; here it doesn't know this user either.
    code = f"import os, pwd\npwd.getpwuid = lambda _: (_ for _ in ()).throw(KeyError())\n{RESULT}"
    done = env.run(code, HOME=None)
    assert done.stdout.strip() == "6"
    assert "there is no cache (no home folder, and MEGATRON_FIXES_CACHE is not set): patched in memory" in done.stderr


def test_cold_starts_at_once_on_a_shared_folder_with_one_killed_while_writing(env: Any) -> None:
    cache = str(env.home / "shared")
    killed = """import os, signal
from megatron_fixes.overlay.store import Store
Store.read = lambda *_: None
Store._move = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
import megatron.core.distributed"""
    environ = env.environ(MEGATRON_FIXES_CACHE=cache)
    start: dict[str, Any] = {"env": environ, "cwd": env.home, "stdout": -1, "stderr": -1, "text": True}
    children = [subprocess.Popen([env.python, "-c", killed if n == 7 else RESULT], **start) for n in range(32)]
    outcomes = [(child.communicate(timeout=60), child.returncode) for child in children]
    assert outcomes.pop(7)[1] == -signal.SIGKILL
    assert {(out.strip(), err, code) for (out, err), code in outcomes} == {("6", "", 0)}
    left = [name for name in os.listdir(Path(cache) / FOLDER) if not name.startswith(".writing-")]
    assert len(left) == 1
    assert env.run(RESULT, MEGATRON_FIXES_CACHE=cache).stderr == ""


def test_a_warm_start_needs_none_of_the_machinery(env: Any) -> None:
    code = f"""{RESULT}
import sys
print([n for n in sys.modules if n.split(".")[0] in ("msgspec", "yaml", "unidiff", "packaging", "click", "asyncio")
       or n.startswith(("megatron_fixes.catalog", "megatron_fixes.patching"))])"""
    assert env.run(code).stdout.splitlines()[1] != "[]"
    assert env.run(code).stdout.splitlines()[1] == "[]"


def test_other_fixes_and_other_files_are_other_entries(env: Any, tree: Any) -> None:
    env.run(RESULT)
    env.run(RESULT, on="MF9001")
    env.run(RESULT, PYTHONPATH=str(tree("same")))
    assert len(os.listdir(env.cache)) == 2
    env.run(RESULT, PYTHONPATH=str(tree("other", megatron__core__pair__left="def left(): pass\n")))
    assert len(os.listdir(env.cache)) == 3
