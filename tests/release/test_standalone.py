# SPDX-License-Identifier: Apache-2.0
"""``apply.py`` from the tarball does to a tree what the package does, to the byte, with the standard library alone.

It runs as ``python -I -S``: no site-packages, no variables, nothing of the checkout. Not handled: other Pythons than
the one that runs the tests; nox runs them on each.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_fixes.cli.main import main
from megatron_fixes.patching import journal
from megatron_fixes.proofs.releases import fetch
from tests.cli.conftest import BUFFER, CATALOG, RELEASE, Done, copy_files
from tests.loading import ROOT, load_program

STANDALONE = load_program("scripts/standalone.py")
LAST_OF_LINES = [releases[-1] for releases in CATALOG.matrix.lines().values()]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """apply.py with all that the tarball puts beside it."""
    folder = tmp_path_factory.mktemp("unpacked")
    files = STANDALONE.files_of_patches(ROOT, version="0.0.0", commit="0" * 40, epoch=0)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder / "apply.py"


def run(program: Path, *arguments: object, python: tuple[str, ...] = ("-I", "-S"), **variables: str) -> Done:
    command = [sys.executable, *python, str(program), *map(str, arguments)]
    environment = {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    return Done(done.returncode, done.stdout, done.stderr)


def pristine(release: str, to: Path) -> Path:
    """A copy of a release, cut down to what commands look at."""
    return copy_files(fetch(release, CATALOG.matrix), to)


def contents(tree: Path) -> dict[str, bytes]:
    """Every file, the journal's among them."""
    return {path.relative_to(tree).as_posix(): path.read_bytes() for path in tree.rglob("*") if path.is_file()}


@pytest.fixture
def trees(tmp_path: Path) -> tuple[Path, Path]:
    """Two copies of 0.16.1."""
    return pristine(RELEASE, tmp_path / "package"), pristine(RELEASE, tmp_path / "standalone")


def by_package(capsys: pytest.CaptureFixture[str], *arguments: object) -> Done:
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    return Done(code, *capsys.readouterr())


@pytest.mark.parametrize("release", CATALOG.matrix.releases)
def test_it_writes_what_the_package_writes(
    release: str, program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = pristine(release, tmp_path / "one"), pristine(release, tmp_path / "other")
    before = contents(one)
    package, standalone = by_package(capsys, "apply", one, "--json"), run(program, "apply", other, "--json")
    assert (package.code, standalone.code) == (0, 0), standalone.err
    assert contents(other) == contents(one) != before
    assert {**json.loads(standalone.out), "target": ""} == {**json.loads(package.out), "target": ""}
    # Either takes out what the other has put in.
    assert main(["revert", str(other)]) == 0
    assert contents(other) == before
    if release in LAST_OF_LINES:
        assert run(program, "revert", one).code == 0
        assert contents(one) == before


COMMANDS: dict[str, tuple[str, ...]] = {
    "scan": ("scan", "TREE"),
    "scan as JSON": ("scan", "TREE", "--json"),
    "check": ("scan", "TREE", "--check"),
    "dry run": ("apply", "TREE", "--dry-run"),
    "only": ("apply", "TREE", "--only", "mf0005,MF0006", "--only", "MF0009"),
    "only what requires another": ("apply", "TREE", "--only=MF0011"),
    "revert of nothing": ("revert", "TREE"),
    "unknown fix": ("apply", "TREE", "--only", "MF9999"),
    "no fix": ("apply", "TREE", "--only", ","),
    "no such tree": ("scan", "TREE/none"),
    "no tree in it": ("apply", "TREE/megatron/core/distributed"),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_it_says_and_does_what_the_package_does(
    command: str, program: Path, trees: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = trees
    package = by_package(capsys, *(word.replace("TREE", str(one)) for word in COMMANDS[command]))
    standalone = run(program, *(word.replace("TREE", str(other)) for word in COMMANDS[command]))
    assert standalone.code == package.code
    assert contents(other) == contents(one)
    for said, expected in ((standalone.out, package.out), (standalone.err, package.err)):
        named = re.sub("megatron-fixes (scan|apply|revert)", r"python3 apply.py \1", expected)
        named = re.sub("(`?megatron-fixes (list|explain|prove))", r"an installed \1", named)
        assert said.replace(str(other), "TREE") == named.replace(str(one), "TREE")


@pytest.mark.parametrize("damage", ["edited", "doubled", "unreadable", "installed"])
def test_it_refuses_what_the_package_refuses(
    damage: str, program: Path, trees: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    for tree in trees:
        text = (tree / BUFFER).read_text(encoding="utf-8")
        if damage == "installed":
            (tree / f"megatron_core-{RELEASE}.dist-info").mkdir()
            (tree / f"megatron_core-{RELEASE}.dist-info" / "INSTALLER").write_text("pip\n")
        else:
            more = {"edited": text.replace("def start_grad_sync(self", "def start_grad_sync(self, more=None"),
                    "doubled": text * 2, "unreadable": text + "\n(\n"}[damage]  # fmt: skip
            (tree / BUFFER).write_text(more, encoding="utf-8")
    before = contents(trees[1])
    package, standalone = by_package(capsys, "apply", trees[0]), run(program, "apply", trees[1])
    assert (package.code, standalone.code) == (1, 1), standalone
    assert contents(trees[1]) == before
    first = [done.err.splitlines()[0] for done in (package, standalone)]
    assert first[0].replace("megatron-fixes", "python3 apply.py") == first[1].replace(
        "megatron-fixes", "python3 apply.py"
    )


KILL = """
import os, runpy, signal, sys
left, number, real = int(sys.argv[1]), int(sys.argv[2]), os.replace
def replace(*paths):
    global left
    left -= str(paths[1]).endswith(".py")
    if left == 0:
        os.kill(os.getpid(), number)
    real(*paths)
os.replace = replace
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("way", ["apply", "revert"])
def test_a_kill_in_the_middle_is_mended_by_the_next_command(
    way: str, program: Path, trees: tuple[Path, Path], tmp_path: Path
) -> None:
    whole, tree = trees
    before = contents(tree)
    assert run(program, "apply", whole).code == 0
    after = contents(whole)
    changed = [path for path in before if before[path] != after[path]]
    assert len(changed) > 5
    if way == "revert":
        assert run(program, "apply", tree).code == 0
    mixed = 0
    for at in (len(changed) // 2, len(changed)):
        copy = tmp_path / f"killed-{at}"
        shutil.copytree(tree, copy, symlinks=True)
        command = [sys.executable, "-I", "-S", "-c", KILL, str(at), "9", str(program), way, str(copy)]
        assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
        now = contents(copy)
        assert all(now[path] in (before[path], after[path]) for path in changed)
        mixed += len({now[path] == before[path] for path in changed}) == 2
        assert "was cut short" in run(program, "scan", copy).out
        done = run(program, "apply", copy)
        assert (done.code, "mended: an interrupted" in done.out) == (0, True)
        assert {path: contents(copy)[path] for path in before} == {path: after[path] for path in before}
        assert run(program, "revert", copy).code == 0
        assert contents(copy) == before
    assert mixed == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_ends_it_in_the_middle_is_undone(number: signal.Signals, program: Path, trees: tuple[Path, Path]) -> None:
    before = contents(trees[1])
    command = ["-I", "-S", "-c", KILL, "3", str(int(number)), str(program), "apply", str(trees[1])]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert (done.returncode, contents(trees[1]) == before) == (128 + number, True), done.stderr
    assert done.stderr == f"ended by {number.name}; what a tree holds now, `python3 apply.py scan` says\n"


# Sends SIGINT at an import of a given number, counted from the first one after those at the file's head.
IMPORTING = """
import os, runpy, signal, sys
left, begun = int(sys.argv[1]), False
def count(event, arguments):
    global left, begun
    if event == "import":
        begun = begun or arguments[0].startswith("megatron_fixes")
        left -= begun
        if left == 0:
            os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(count)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("number", [1, 2, 3, 10, 30, 50, 70])
def test_ctrl_c_during_imports_shows_no_traceback(number: int, program: Path, trees: tuple[Path, Path]) -> None:
    command = [sys.executable, "-I", "-S", "-c", IMPORTING, str(number), str(program), "scan", str(trees[1])]
    done = subprocess.run(command, capture_output=True, text=True)
    # Python makes it a death by the signal where the exception went through generated code.
    assert done.returncode in (130, -signal.SIGINT) and done.stderr in ("", "ended by SIGINT\n"), done


def test_nothing_but_the_standard_library_and_itself_is_imported(program: Path, trees: tuple[Path, Path]) -> None:
    code = (
        "import runpy, sys\nsys.argv = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\nexcept SystemExit: pass\n"
        "print(*sorted({n.partition('.')[0] for n in sys.modules} - set(sys.stdlib_module_names)), file=sys.stderr)"
    )
    command = [sys.executable, "-I", "-S", "-c", code, str(program), "apply", str(trees[1])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ours = {"__main__", "apply_py", "click", "megatron_fixes", "msgspec", "packaging", "unidiff"}
    assert set(done.stderr.split()) <= ours
    assert not [path for path in program.parent.rglob("*") if path.name == "__pycache__"]


def test_installed_packages_of_the_same_names_are_left_alone(
    program: Path, trees: tuple[Path, Path], tmp_path: Path
) -> None:
    for name in ("megatron_fixes", "msgspec", "packaging", "unidiff", "click"):
        (tmp_path / "site" / name).mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").write_text("raise RuntimeError(__name__)\n")
    done = run(program, "scan", trees[1], python=(), PYTHONPATH=str(tmp_path / "site"))
    assert done.code == 0, done.err


SERIES = "patches/core_v0.16/series"
DAMAGES = {
    **{
        f"{name} changed": (name, b"\n}")
        for name in ("compat_matrix.json", "fingerprints.json", SERIES, "MANIFEST.json")
    },
    **{f"{name} lost": (name, None) for name in ("compat_matrix.json", "fingerprints.json", SERIES, "MANIFEST.json")},
    "a patch added": ("patches/core_v0.16/new.patch", b"x"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_not_the_manifests_is_refused(
    damage: str, program: Path, trees: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(program.parent, tmp_path / "unpacked"))
    name, more = DAMAGES[damage]
    if more is None:
        (folder / name).unlink()
    else:
        with (folder / name).open("ab") as file:
            file.write(more)
    before = contents(trees[1])
    done = run(folder / "apply.py", "apply", trees[1])
    assert (done.code, f"where: {folder / name}" in done.err) == (1, True), done.err
    assert contents(trees[1]) == before


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [SERIES, "patches/core_v0.16/new", "fingerprints.json", "MANIFEST.json"])
def test_a_fifo_in_place_of_a_file_is_not_waited_for(
    name: str, program: Path, trees: tuple[Path, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(program.parent, tmp_path / "unpacked"))
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    done = run(folder / "apply.py", "apply", trees[1])
    assert (done.code, f"where: {folder / name}" in done.err, "a fifo" in done.err) == (1, True, True), done.err


def test_no_hint_names_a_command_that_it_lacks_as_its_own(program: Path, trees: tuple[Path, Path]) -> None:
    said = run(program, "apply", trees[1], "--only", "MF9999").err
    assert "See an installed `megatron-fixes list`." in " ".join(said.split())
    scan = " ".join(run(program, "scan", trees[1]).out.split())
    assert "python3 apply.py apply" in scan
    assert not re.search("(?<!an installed )(?<!an installed `)megatron-fixes [a-z]+ ", said + scan)


def test_modules_stand_in_it_word_for_word(program: Path) -> None:
    assert len(program.read_bytes()) < 500_000
    tree = ast.parse(program.read_text(encoding="utf-8"))
    texts = [node.value.value for node in ast.walk(tree) if isinstance(node, ast.Assign)
             and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)]  # fmt: skip
    for path in ("patching/transaction.py", "patching/plan.py", "patching/journal.py", "catalog/verdict.py"):
        assert (ROOT / "megatron_fixes" / path).read_text(encoding="utf-8") in texts


def test_it_carries_what_is_imported_and_no_more(tmp_path: Path) -> None:
    names = set(STANDALONE.modules(ROOT))
    assert {"megatron_fixes.patching.transaction", "megatron_fixes.cli.plain_git", "packaging.version"} <= names
    assert not [name for name in names if "overlay" in name or "lint" in name]
    text = "import os\nif TYPE_CHECKING:\n    import a\ndef f():\n    from b import c\n"
    assert STANDALONE.imports(text, "x") == ({"os"}, {"b", "b.c"})
    for name in ("megatron_fixes", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "megatron_fixes" / "patching" / "shell.py").open("a") as file:
        file.write("\nimport wrapt\n")
    with pytest.raises(ValueError, match=r"got an import of wrapt in megatron_fixes\.patching\.shell"):
        STANDALONE.modules(tmp_path)


def test_a_module_that_can_not_stand_in_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("x = '''y'''\n", "x = 1 # \\"):
        monkeypatch.setattr(STANDALONE, "modules", lambda tree, text=text: {"some": text})
        with pytest.raises((ValueError, SyntaxError)):
            STANDALONE.standalone(ROOT, "0.0.0")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"], ["scan", "--help"], ["skan"], ["scan", "--no"]])
def test_help_and_mistakes_need_no_tree(arguments: list[str], program: Path) -> None:
    done = run(program, *arguments)
    assert done.code == (0 if {"--help", "--version"} & set(arguments) else 2)
    assert "apply.py" in done.out + done.err or "--version" in arguments


STAND_IN = """
import json, pathlib, sys
exec(pathlib.Path(sys.argv[1]).read_text("utf-8"), {"__name__": "modules", "__file__": sys.argv[1]})
from megatron_fixes.patching.journal import decode, encode
answers = []
for text in json.load(sys.stdin):
    try:
        answers.append(encode(decode(text.encode("utf-8", "surrogateescape"), pathlib.Path("x"))).decode())
    except Exception as error:
        answers.append([type(error).__name__, getattr(error, "message", "").partition("(")[0]])
json.dump(answers, sys.stdout)
"""


def variations(value: Any) -> list[Any]:
    """A value with one thing in it left out, added, or of another kind, everywhere."""
    found: list[Any] = [None, True, 0, -1, 1.0, "", "x", [], {}, [value]]
    if isinstance(value, dict):
        for key, inner in value.items():
            found.append({k: v for k, v in value.items() if k != key})
            found.append({**value, f"{key}x": inner})
            found += [{**value, key: other} for other in variations(inner)]
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            found += [value[:at] + value[at + 1 :], [*value, inner]]
            found += [[*value[:at], other, *value[at + 1 :]] for other in variations(inner)]
    elif isinstance(value, str):
        found += [value[:-1], value + "\n", value.upper(), "/" + value, "\u00e9\u2028\x7f\x1f" + value]
    return found


def test_the_stand_in_for_msgspec_takes_and_refuses_the_same_journals(program: Path) -> None:
    fix = journal.AppliedFix("MF0001", "a" * 64, ("b/c.py",))
    settled = journal.Settled("0.16.1", (fix,), (journal.FileRecord("b/c.py", "0" * 64, "1" * 64),), ("MF0002",))
    step = journal.Step("b/c.py", "0" * 64, "1" * 64, journal.temporary_name("b/c.py"))
    whole = journal.Journal(settled=settled, pending=journal.Pending("apply", (step,), settled))
    texts = [json.dumps(value) for value in variations(json.loads(journal.encode(whole)))]
    texts += [
        "",
        "{",
        "[]",
        "{} x",
        '{"schema": NaN}',
        '{"schema": 1, "schema": 2}',
        "\ud8ff",
        '{"schema": 1e0}',
        "[" * 9999,
    ]
    texts += [journal.encode(journal.Journal()).decode(), " {} ", "\ufeff{}"]
    expected: list[Any] = []
    for text in texts:
        try:
            decoded = journal.decode(text.encode("utf-8", "surrogateescape"), Path("x"))
            expected.append(journal.encode(decoded).decode())
        except Exception as error:  # noqa: BLE001 - whatever it is, the other has to do the same
            expected.append([type(error).__name__, getattr(error, "message", "").partition("(")[0]])
    command = [sys.executable, "-I", "-S", "-c", STAND_IN, str(program)]
    done = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, check=True)
    answers = json.loads(done.stdout)
    assert sum(isinstance(answer, str) for answer in expected) > 10
    assert sum(isinstance(answer, list) for answer in expected) > 300
    assert [pair for pair in zip(texts, expected, answers, strict=True) if pair[1] != pair[2]] == []


def test_a_module_of_another_project_that_is_imported_late_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STANDALONE._THIRD_PARTY, "packaging", ("__init__", "_structures", "version"))
    with pytest.raises(ValueError, match=r"got an import of packaging\.specifiers in "):
        STANDALONE.modules(ROOT)
