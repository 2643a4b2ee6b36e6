# SPDX-License-Identifier: Apache-2.0
"""Whatever looks at a patched module sees the text that runs, with a cache and without one."""

from __future__ import annotations

import json
from typing import Any

import pytest

# A file where the cache folder should be: nothing can be made below it, whoever runs the tests.
NO_CACHE = {"MEGATRON_FIXES_CACHE": "/dev/null/cache"}
WAYS = pytest.mark.parametrize("way", [{}, NO_CACHE], ids=["cache", "memory"])
LOOK = """
import inspect, json, linecache, sys, traceback
from megatron.core.distributed import buffer
from megatron.core.distributed.buffer import Buffer
def trace():
    try: Buffer(["x"]).start()
    except TypeError as error: return "".join(traceback.format_exception(type(error), error, error.__traceback__))
print(json.dumps({
    "file": buffer.__file__, "origin": buffer.__megatron_fixes_origin__, "fixes": buffer.__megatron_fixes__,
    "spec": buffer.__spec__.origin, "code": Buffer.start.__code__.co_filename, "name": Buffer.__module__,
    "class": inspect.getsource(Buffer), "method": inspect.getsource(Buffer.start), "module": inspect.getsource(buffer),
    "trace": trace(), "line": linecache.getline(buffer.__file__, 14), "doc": buffer.__doc__,
    "loader": buffer.__loader__.get_source(buffer.__name__), "package": buffer.__package__}))
"""


@WAYS
def test_everything_shows_the_patched_text(way: dict[str, str], env: Any) -> None:
    for _ in range(2):
        seen = json.loads(env.run(LOOK, **way).stdout)
        assert seen["file"] == seen["spec"] == seen["code"]
        assert seen["origin"] == str(env.site / "megatron/core/distributed/buffer.py") != seen["file"]
        assert seen["fixes"] == ["MF9001", "MF9002"]
        for name in ("class", "method", "module", "trace", "line", "loader"):
            assert "total + number" in seen[name], name
        assert (seen["name"], seen["package"]) == ("megatron.core.distributed.buffer", "megatron.core.distributed")


def test_without_a_cache_the_name_tells_the_fixes_and_one_line_is_said(env: Any) -> None:
    done = env.run(LOOK, **NO_CACHE)
    assert json.loads(done.stdout)["file"].endswith("distributed/buffer.py+MF9001+MF9002")
    assert done.stderr == (
        "megatron-fixes: the cache folder /dev/null/cache/overlay can't be used (Not a directory): patched in memory, "
        "which costs time at each start; point MEGATRON_FIXES_CACHE at a folder that can be written to\n"
    )


@WAYS
def test_a_debugger_shows_the_patched_line(way: dict[str, str], env: Any) -> None:
    code = """import io, pdb, sys
from megatron.core.distributed.buffer import Buffer
out, typed = io.StringIO(), io.StringIO("step\\nnext\\nnext\\nlist\\ncontinue\\n")
debugger = pdb.Pdb(stdin=typed, stdout=out, nosigint=True, readrc=False)
debugger.runcall(Buffer([1]).start)
print("total + number" in out.getvalue())"""
    assert env.run(code, **way).stdout.strip() == "True"


@WAYS
def test_reload_stays_patched(way: dict[str, str], env: Any) -> None:
    code = """import importlib
from megatron.core.distributed import buffer
again = importlib.reload(buffer)
print(again is buffer, again.Buffer([1, 2]).finish(), again.__megatron_fixes__)"""
    assert env.run(code, **way).stdout.strip() == "True 6 ('MF9001', 'MF9002')"


def test_reload_takes_up_an_edit_of_the_original(env: Any, tree: Any) -> None:
    root = tree()
    code = f"""import importlib, pathlib
from megatron.core.distributed import buffer
path = pathlib.Path({str(root)!r}, "megatron/core/distributed/buffer.py")
path.write_text(path.read_text() + "\\nADDED = 1\\n")
print(importlib.reload(buffer).ADDED, buffer.Buffer([1, 2]).finish())"""
    assert env.run(code, PYTHONPATH=str(root)).stdout.strip() == "1 6"


def test_status_follows_a_module_that_was_reloaded_unpatched(env: Any, tree: Any) -> None:
    root = tree()
    code = f"""import importlib, pathlib
from megatron.core.distributed import buffer
path = pathlib.Path({str(root)!r}, "megatron/core/distributed/buffer.py")
path.write_text(path.read_text().replace("total - number", "total * number"))
importlib.reload(buffer)"""
    status = env.status(code, PYTHONPATH=str(root))
    assert (status["modules"][0]["state"], status["in_force"]) == ("original", [])


@WAYS
def test_an_import_after_removal_is_patched_again(way: dict[str, str], env: Any) -> None:
    code = """import sys
from megatron.core.distributed import buffer
del sys.modules[buffer.__name__]
import megatron.core.distributed.buffer as again
print(again is buffer, again.Buffer([1, 2]).finish())"""
    assert env.run(code, **way).stdout.strip() == "False 6"


def test_pickles_go_between_patched_and_plain_processes(env: Any) -> None:
    dump = "import pickle, megatron.core.distributed.buffer as b; open('x', 'wb').write(pickle.dumps(b.Buffer([1, 2])))"
    load = "import pickle; print(pickle.load(open('x', 'rb')).finish())"
    env.run(dump)
    assert [env.run(load, on=on).stdout.strip() for on in ("all", None)] == ["6", "-3"]
    env.run(dump, on=None)
    assert env.run(load).stdout.strip() == "6"


def test_a_fix_of_two_modules_goes_into_both(env: Any) -> None:
    code = (
        "from megatron.core.pair.left import left; from megatron.core.pair.right import right; print(left(), right())"
    )
    assert env.run(code).stdout.strip() == "left right"
    half = env.status("import megatron.core.pair.left")
    state = {fix["fix"]: fix for fix in half["fixes"]}["MF9003"]
    assert (state["state"], state["reason"]) == ("waiting", "not imported yet: megatron.core.pair.right")


def test_all_leaves_gated_fixes_out_and_a_name_brings_them(env: Any) -> None:
    code = "from megatron.core.distributed.buffer import tune; print(tune())"
    assert env.run(code).stdout.strip() == "1"
    assert env.run(code, on="all,MF9004").stdout.strip() == "3"
    states = {fix["fix"]: fix["state"] for fix in env.status()["fixes"]}
    assert states == {"MF9001": "in-force", "MF9002": "in-force", "MF9003": "waiting", "MF9004": "gated"}


def test_a_named_fix_brings_what_it_requires_and_no_more(env: Any) -> None:
    status = env.status(on="MF9002")
    states = {fix["fix"]: fix["state"] for fix in status["fixes"]}
    assert states == {"MF9001": "in-force", "MF9002": "in-force", "MF9003": "not-asked", "MF9004": "not-asked"}


def test_modules_that_no_fix_touches_are_left_alone(env: Any) -> None:
    code = "from megatron.core import plain; print(plain.HERE, type(plain.__loader__).__name__)"
    assert env.run(code).stdout.split() == [str(env.site / "megatron/core/plain.py"), "SourceFileLoader"]


def test_resources_beside_the_module_are_found(env: Any, tree: Any) -> None:
    root = tree()
    (root / "megatron/core/distributed/data.txt").write_text("here")
    code = """import megatron.core.distributed.buffer as b
print(b.__loader__.get_data(b.__file__[:-len("buffer.py")] + "data.txt"))"""
    assert env.run(code, PYTHONPATH=str(root)).stdout.strip() == "b'here'"


@pytest.mark.parametrize("flags", [[], ["-O"], ["-OO"]])
def test_bytecode_is_kept_apart_by_optimization(flags: list[str], env: Any) -> None:
    code = "import megatron.core.distributed.buffer as b; print(b.Buffer([1, 2]).finish(), b.__doc__ is None)"
    for _ in range(2):
        assert env.run(code, *flags).stdout.strip() == f"6 {'-OO' in flags}"
    assert len(list(env.cache.rglob("*.code"))) == 1
    assert env.run(code).stdout.strip() == "6 False"


def test_no_bytecode_is_written_where_python_was_told_so(env: Any) -> None:
    env.run("import megatron.core.distributed.buffer", "-B")
    assert list(env.cache.rglob("*.code")) == []


def test_bytecode_names_the_file_by_the_path_that_it_was_reached_by(env: Any) -> None:
    code = "import megatron.core.distributed.buffer as b; print(b.__file__, b.Buffer.start.__code__.co_filename)"
    (env.home / "link").symlink_to(env.home)
    for place in (env.home, env.home / "link", env.home):
        file, named = env.run(code, MEGATRON_FIXES_CACHE=str(place / "shared")).stdout.split()
        assert file == named
        assert file.startswith(str(place / "shared"))


def test_spoilt_bytecode_is_not_run(env: Any) -> None:
    code = (
        "import megatron.core.distributed.buffer as b; print(b.Buffer([1, 2]).finish() if 'scales' in b.__doc__ else 0)"
    )
    env.run(code)
    (kept,) = env.cache.rglob("*.code")
    sound = kept.read_bytes()
    other = sound.replace(b"Adds and scales", b"Adds and spoils")
    assert other != sound
    for spoilt in (sound[:-10], sound[:-1] + b"x", b"", sound[:32] + b"x" * 40, other):
        kept.write_bytes(spoilt)
        assert env.run(code).stdout.strip() == "6"
        assert kept.read_bytes() != spoilt


def test_the_source_stays_visible_when_the_cache_is_removed_meanwhile(env: Any) -> None:
    code = f"""import inspect, linecache, shutil
from megatron.core.distributed import buffer
shutil.rmtree({str(env.cache)!r}); linecache.checkcache()
print("total + number" in inspect.getsource(buffer.Buffer.start))
import megatron.core.pair.left as left
print(left.left())"""
    assert env.run(code).stdout.split() == ["True", "left"]


def test_threads_that_import_at_once_get_one_patched_module(env: Any) -> None:
    code = """import threading, importlib
names = ["distributed.buffer", "pair.left", "pair.right"] * 8
seen, gate = [], threading.Barrier(len(names))
def work(name):
    gate.wait(); seen.append(importlib.import_module("megatron.core." + name).__megatron_fixes__)
threads = [threading.Thread(target=work, args=(name,)) for name in names]
[t.start() for t in threads]; [t.join(30) for t in threads]
print(len(seen), sorted(set(seen)))"""
    assert env.run(code).stdout.strip() == "24 [('MF9001', 'MF9002'), ('MF9003',)]"
