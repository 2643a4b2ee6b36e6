# SPDX-License-Identifier: Apache-2.0
"""Every refusal is one clear line, said once per node; in strict mode the process stops before it goes on.

Each case is shown both ways: without strict mode the import goes through, unpatched where it must be, and the line is
the one given here; with it the exit status is 1, and nothing after the import is run, whatever catches exceptions.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

TRAIN = "from megatron.core.distributed.buffer import Buffer; print('trains', Buffer([1, 2]).finish())"
SWALLOW = f"try:\n    {TRAIN}\nexcept BaseException:\n    print('swallowed')\nexcept:\n    pass\nprint('trains on')"
CHANGED = "total = total * 1 - number"


class Case(NamedTuple):
    """A way to be refused.

    Attributes:
        kind: The refusal's kind.
        line: The line, or how it begins.
        result: What ``TRAIN`` prints without strict mode.
        code: What is run; ``{site}`` is the site directory and ``{tree}`` another tree.
        change: File to text, for the tree that is put first on the path; None leaves it out.
        environ: Further variables.
        prepare: Called with the environment before the run.
    """

    kind: str
    line: str
    result: str
    code: str = TRAIN
    change: dict[str, str] | None = None
    environ: dict[str, str] = {}
    prepare: Callable[[Any], None] | None = None


def _open_cache(env: Any) -> None:
    env.cache.mkdir(parents=True)
    env.cache.chmod(0o755)


def _link_cache(env: Any) -> None:
    env.cache.parent.mkdir(parents=True)
    (env.home / "elsewhere").mkdir(mode=0o700)
    env.cache.symlink_to(env.home / "elsewhere")


def _foreign_cache(env: Any) -> None:
    if os.geteuid():
        pytest.skip("only root can give a folder away")
    env.cache.mkdir(parents=True, mode=0o700)
    os.chown(env.cache, 65534, 65534)


BYPASS = (
    "import sys; from importlib.machinery import PathFinder\n"
    "class Hook:\n"
    "    def find_spec(self, name, path=None, target=None):\n"
    "        return PathFinder.find_spec(name, path) if name.startswith('megatron.core.distributed') else None\n"
    "sys.meta_path.insert(0, Hook())\n"
)
CASES = {
    "drifted": Case(
        "drifted",
        "MF9001 is not in force, the text of this megatron-core 9.1.0 is not a known one: "
        "Buffer.start is not a known text",
        "trains -3",
        change={"megatron__core__distributed__buffer": CHANGED},
    ),
    "needed without a patch": Case(
        "no-patch",
        "MF9001 is not in force: megatron-core 9.2.0 needs it, and there is no patch for it yet; to go on without it, "
        "set MEGATRON_FIXES=none",
        "trains -6",
        change={"newer": ""},
    ),
    "unknown release": Case(
        "unknown-release",
        "no fix is in force: this is megatron-core 9.7.0, which this version of megatron-fixes does not know; upgrade "
        "megatron-fixes, use one of 9.1.0 to 9.2.0, or put the patches into the files (`megatron-fixes scan` says how) "
        "and unset MEGATRON_FIXES",
        "trains -3",
        change={"megatron__core__package_info": "MAJOR = 9\nMINOR = 7\nPATCH = 0\nPRE_RELEASE = ''\n"},
    ),
    "uses its file name": Case(
        "does-not-fit",
        "MF9001 is not in force, its patch does not fit this megatron-core 9.1.0: megatron/core/distributed/buffer.py "
        "uses __file__, which would name the patched copy",
        "trains -3",
        change={"megatron__core__distributed__buffer": "__file__"},
    ),
    "unknown id": Case(
        "unknown-id",
        "MF1234 is not in force: no fix has that id; correct MEGATRON_FIXES (known: MF9001, MF9002, MF9003, MF9004)",
        "trains 3",
        environ={"on": "MF9001,mf1234"},
    ),
    "imported too early": Case(
        "too-early",
        "MF9001, MF9002 are not in force: megatron.core.distributed.buffer was imported before the overlay was "
        "installed; import megatron_fixes.auto before anything of Megatron",
        "trains -3",
        code=f"import megatron.core.distributed.buffer, megatron_fixes.auto\n{TRAIN}",
        environ={"on": ""},
    ),
    "bypassed": Case(
        "bypassed",
        "MF9001, MF9002 are not in force: megatron.core.distributed.buffer was loaded by another import hook, put in "
        "front of ours (__main__.Hook); remove that hook, or import megatron_fixes.auto after it is put in",
        "trains -3",
        code=f"{BYPASS}import megatron.core.distributed, megatron.core.pair\n{TRAIN}",
    ),
    "in a zip file": Case(
        "odd-loader",
        "nothing was put into megatron.core.distributed.buffer: it is loaded by zipimport.zipimporter, not from a "
        "source file; install megatron-core unpacked, with its .py files",
        "trains -3",
        code="import sys, shutil; sys.path.insert(0, shutil.make_archive('zipped', 'zip', {tree!r}))\n" + TRAIN,
        change={},
        environ={"PYTHONPATH": ""},
    ),
    "without source": Case(
        "odd-loader",
        "nothing was put into megatron.core.distributed.buffer: it is loaded by "
        "_frozen_importlib_external.SourcelessFileLoader, not from a source file",
        "trains -3",
        code="import compileall, os, sys; p = os.path.join({tree!r}, 'megatron/core/distributed/buffer.py')\n"
        "compileall.compile_file(p, legacy=True, quiet=1); os.remove(p)\n" + TRAIN,
        change={},
    ),
    "half in two places": Case(
        "two-places",
        "MF9001, MF9002 are not in force: Megatron is half in two places, megatron.core is in",
        "trains -3",
        code="import megatron.core; megatron.core.__path__.insert(0, {tree!r} + '/megatron/core')\n" + TRAIN,
        change={},
        environ={"PYTHONPATH": ""},
    ),
    "cache open to others": Case(
        "cache-not-ours",
        "the cache folder {cache} is not used: it has mode 755, expected 700; remove it, or point "
        "MEGATRON_FIXES_CACHE at a folder of your own",
        "trains 6",
        prepare=_open_cache,
    ),
    "cache is a link": Case(
        "cache-not-ours", "the cache folder {cache} is not used: it is a symbolic link", "trains 6", prepare=_link_cache
    ),
    "cache of another user": Case(
        "cache-not-ours",
        "the cache folder {cache} is not used: it belongs to user 65534, not to user 0",
        "trains 6",
        prepare=_foreign_cache,
    ),
}


def run(case: Case, env: Any, tree: Any, code: str, **more: Any) -> subprocess.CompletedProcess[str]:
    if case.prepare and not env.cache.exists():
        case.prepare(env)
    environ = {**case.environ, **more}
    if case.change is not None:
        root = prepared_tree(case, env, tree)
        environ.setdefault("PYTHONPATH", str(root))
        code = code.replace("{tree!r}", repr(str(root)))
    return env.run(code, **environ)


def prepared_tree(case: Case, env: Any, tree: Any) -> Any:
    change = dict(case.change or {})
    if change.pop("newer", None) is not None:
        return env.base / "cache" / "releases" / "9.2.0"
    name = "megatron__core__distributed__buffer"
    if name in change:
        plain = (tree("plain") / "megatron/core/distributed/buffer.py").read_text()
        if change[name] == "__file__":
            change[name] = plain + "\n\nHERE = __file__\n"
        else:
            change[name] = plain.replace("total = total - number", change[name])
    return tree("tree", **change)


@pytest.mark.parametrize("name", CASES)
def test_the_line_is_said_and_the_import_goes_through(name: str, env: Any, tree: Any) -> None:
    case = CASES[name]
    done = run(case, env, tree, case.code)
    lines = done.stderr.splitlines()
    expected = f"megatron-fixes: {case.line.replace('{cache}', str(env.cache))}"
    assert [line for line in lines if line.startswith(expected)], done.stderr
    assert all(line.startswith("megatron-fixes: ") for line in lines)
    assert len(lines) == len(set(lines))
    assert done.stdout.strip() == case.result


@pytest.mark.parametrize("name", CASES)
def test_strict_mode_stops_whatever_catches(name: str, env: Any, tree: Any) -> None:
    case = CASES[name]
    code = case.code.replace(TRAIN, SWALLOW.replace("except:\n    pass\n", ""))
    done = run(case, env, tree, code, MEGATRON_FIXES_STRICT="1", check=False)
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("megatron-fixes: stopped before training, because MEGATRON_FIXES_STRICT is set: ")


@pytest.mark.parametrize("word", ["0", "no", "False", " OFF ", "none"])
def test_strict_mode_is_off_by_every_word_that_means_no(word: str, env: Any) -> None:
    done = env.run(TRAIN, on="MF1234", MEGATRON_FIXES_STRICT=word)
    assert done.stdout.strip() == "trains -3" and done.stderr.count("\n") == 1


@pytest.mark.parametrize("on", ["all", "MF1234"])
def test_strict_mode_is_on_by_a_word_that_means_neither_and_says_so(on: str, env: Any) -> None:
    said = "megatron-fixes: MEGATRON_FIXES_STRICT: got 'maybe', expected 1 or 0; taken as 1\n"
    done = env.run(TRAIN, on=on, MEGATRON_FIXES_STRICT="maybe", check=False)
    assert done.stderr.startswith(said)
    assert (done.returncode, done.stdout) == ((0, "trains 6\n") if on == "all" else (1, ""))
    if on == "all":
        assert done.stderr == said


def test_strict_mode_lets_a_sound_process_go(env: Any) -> None:
    done = env.run(TRAIN, MEGATRON_FIXES_STRICT="1")
    assert (done.stdout.strip(), done.stderr) == ("trains 6", "")


def test_strict_mode_stops_nobody_who_doesnt_train(env: Any) -> None:
    done = env.run("import json; print('fine')", on="MF1234", MEGATRON_FIXES_STRICT="1")
    assert (done.stdout.strip(), done.stderr) == ("fine", "")


def test_status_tells_without_stopping(env: Any) -> None:
    code = f"{BYPASS}import megatron.core.distributed"
    status = env.status(code, MEGATRON_FIXES_STRICT="1", check=False, on="MF9003")
    assert status["refusals"] == []
    status = env.status(code)
    assert [refusal["kind"] for refusal in status["refusals"]] == ["bypassed"]
    assert status["modules"][0]["state"] == "bypassed"
    assert status["fixes"][0]["state"] == "refused"
    assert status["in_force"] == []


def test_a_refusal_is_kept_once_however_many_modules_ask(env: Any) -> None:
    status = env.status("from megatron.core.pair import left, right; import megatron.core.distributed", on="MF1234")
    assert [(refusal["kind"], refusal["fix"]) for refusal in status["refusals"]] == [("unknown-id", "MF1234")]


def test_what_status_saw_stops_a_strict_process_at_the_next_import(env: Any) -> None:
    code = f"""{BYPASS}import megatron_fixes
megatron_fixes.status()
from megatron.core.pair import left, right
import megatron.core.distributed
print(megatron_fixes.status().modules[0].state, flush=True)
{{last}}
print('goes on')"""
    done = env.run(code.replace("{last}", "import wave"), MEGATRON_FIXES_STRICT="1", check=False)
    assert (done.returncode, done.stdout) == (1, "bypassed\n")
    done = env.run(code.replace("{last}", ""), MEGATRON_FIXES_STRICT="1", check=False)
    assert (done.returncode, done.stdout) == (1, "bypassed\ngoes on\n")


def test_a_local_part_of_the_release_does_not_count(env: Any, tree: Any) -> None:
    info = "MAJOR = 9\nMINOR = 1\nPATCH = 0\nPRE_RELEASE = '+abc'\n"
    done = env.run(TRAIN, PYTHONPATH=str(tree(megatron__core__package_info=info)), MEGATRON_FIXES_STRICT="1")
    assert (done.stdout.strip(), done.stderr) == ("trains 6", "")


def test_a_tree_without_a_release_is_refused_and_not_cached(env: Any, tree: Any) -> None:
    root = tree(megatron__core__package_info="")
    done = env.run(TRAIN, PYTHONPATH=str(root))
    assert done.stdout.strip() == "trains -3"
    assert "this is a megatron-core that names no release, which" in done.stderr
    assert not env.cache.exists()


def test_a_bypass_of_everything_is_told_when_the_process_ends(env: Any) -> None:
    code = BYPASS.replace("name.startswith('megatron.core.distributed')", "True") + TRAIN
    done = env.run(code, MEGATRON_FIXES_STRICT="1", check=False)
    assert done.returncode == 1
    assert "loaded by another import hook" in done.stderr


def test_every_kind_of_refusal_is_seen() -> None:
    from megatron_fixes.overlay import decision

    kinds = {case.kind for case in CASES.values()}
    named = {word for word in (decision.__doc__ or "").replace("``", " ").split() if word in kinds or "-" in word}
    assert kinds <= named
    assert len(kinds) == 10


@pytest.mark.parametrize("name", ["LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"])
def test_lines_are_said_by_local_rank_0(name: str, env: Any) -> None:
    said = {rank: env.run(TRAIN, on="MF1234", **{name: rank}).stderr for rank in ("0", "1", "7")}
    assert said["0"].startswith("megatron-fixes: MF1234 is not in force")
    assert said["1"] == said["7"] == ""


def test_a_rank_that_stops_says_so_in_one_line(env: Any) -> None:
    done = env.run(TRAIN, on="MF1234", LOCAL_RANK="3", MEGATRON_FIXES_STRICT="1", check=False)
    assert done.stderr == (
        "megatron-fixes: stopped local rank 3 before training, because MEGATRON_FIXES_STRICT is set: "
        "MF1234 is not in force: no fix has that id\n"
    )


def test_children_do_not_repeat_what_was_said(env: Any) -> None:
    code = f"import subprocess, sys\n{TRAIN}\nsubprocess.run([sys.executable, '-c', {TRAIN!r}], check=True)"
    assert env.run(code, on="MF1234").stderr.count("MF1234") == 1


def test_a_stop_in_a_thread_stops_the_process(env: Any) -> None:
    code = (
        f"import threading\nt = threading.Thread(target=exec, args=({TRAIN!r}, {{}})); t.start(); t.join(); print('on')"
    )
    done = env.run(code, on="MF1234", MEGATRON_FIXES_STRICT="1", check=False)
    assert (done.returncode, done.stdout) == (1, "")


def test_a_damaged_installation_is_told_and_not_raised(env: Any) -> None:
    table = env.site / "megatron_fixes" / "catalog" / "matrix.json"
    content = table.read_bytes()
    table.write_bytes(content[:-20])
    try:
        done = env.run(f"{TRAIN}\nimport megatron_fixes; print(megatron_fixes.status().why)")
        assert done.stdout.splitlines()[0] == "trains -3"
        table.unlink()
        done = env.run(f"{TRAIN}\nimport megatron_fixes; print(megatron_fixes.status().why)")
        strict = env.run(TRAIN, check=False, MEGATRON_FIXES_STRICT="1")
    finally:
        table.write_bytes(content)
    assert done.stdout.splitlines()[0] == "trains -3"
    assert done.stdout.splitlines()[1].startswith("this installation is damaged: FileNotFoundError")
    assert done.stderr.startswith("megatron-fixes: no fix is in force: FileNotFoundError: ")
    assert done.stderr.endswith("; reinstall megatron-fixes\n") and done.stderr.count("\n") == 1
    assert (strict.returncode, strict.stdout) == (1, "")


def test_a_bug_of_ours_is_told_and_not_raised(env: Any) -> None:
    code = f"""import megatron_fixes.overlay.process as process
def broken(*_): raise RuntimeError("told")
process.Process.decide = broken
{TRAIN}"""
    done = env.run(code)
    assert done.stdout.strip() == "trains -3"
    assert "nothing was put into megatron.core.distributed.buffer: RuntimeError: told; report this" in done.stderr
    assert env.run(code, MEGATRON_FIXES_STRICT="1", check=False).returncode == 1
