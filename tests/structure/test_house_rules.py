# SPDX-License-Identifier: Apache-2.0
"""House rules that no linter knows: heads of files, sizes, names, patches, workflows.

Each rule is a function from a tree to what it objects to. It must find nothing in this tree, and must find the one
thing that a small spoilt tree has: a rule that can't object would be none. Not handled: what ruff, mypy and
import-linter check (pyproject.toml).
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SPDX = "# SPDX-License-Identifier: Apache-2.0"
MAX_FILE_LINES = 420
MAX_FUNCTION_LINES = 65
VAGUE = {"utils", "util", "helpers", "helper", "common", "manager", "base", "misc"}
NOT_OURS = {"build", "dist", "__pycache__", "_data", "node_modules"}
HOME = re.compile(r"(?<![\w.~:}-])/(?:root|work|home/\w[\w.-]*|Users/\w[\w.-]*|private/var)(?=[/\s\"'`)]|$)")

# What a job of a release needs beyond reading; every other job reads.
MAY_WRITE = {
    ("build.yml", "attest"): ("id-token: write", "attestations: write"),
    ("release.yml", "build"): ("id-token: write", "attestations: write"),
    ("release.yml", "sign-keyless"): ("id-token: write",),
    ("release.yml", "draft-github"): ("contents: write",),
    ("publish.yml", "fetch"): ("contents: write",),
    ("publish.yml", "publish-pypi"): ("id-token: write",),
    ("publish.yml", "publish-github"): ("contents: write",),
}

Rule = Callable[[Path], Iterator[str]]


def files(tree: Path) -> Iterator[Path]:
    """Yield the files of a tree that are written by hand: not what tools have left there."""
    for folder, below, names in os.walk(tree):
        hidden = {b for b in below if b.startswith(".") and b not in (".ci", ".github")}
        below[:] = sorted(b for b in below if b not in NOT_OURS | hidden and not b.endswith(("_cache", ".egg-info")))
        yield from (Path(folder, name) for name in sorted(names))


def modules(tree: Path) -> Iterator[tuple[Path, str]]:
    """Yield Python files with their text; what lies under tests/data was recorded elsewhere and is left as it is."""
    for path in files(tree):
        if path.suffix == ".py" and not path.is_relative_to(tree / "tests" / "data"):
            yield path, path.read_text(encoding="utf-8")


def licence_and_docstring_come_first(tree: Path) -> Iterator[str]:
    for path, text in modules(tree):
        head = text.removeprefix(text.partition("\n")[0] + "\n") if text.startswith("#!") else text
        if (
            not head.startswith((f'{SPDX}\n"""', f'{SPDX}\nr"""'))
            or not (ast.get_docstring(ast.parse(head)) or "").strip()
        ):
            yield f"{path}: got another head, expected {SPDX!r} and then a docstring that says what the file is about"


def files_are_short(tree: Path) -> Iterator[str]:
    for path, text in modules(tree):
        if (count := len(text.splitlines())) > MAX_FILE_LINES:
            yield f"{path}: got {count} lines, expected at most {MAX_FILE_LINES}"


def functions_are_short(tree: Path) -> Iterator[str]:
    for path, text in modules(tree):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno is not None:
                count = node.end_lineno - node.lineno + 1
                if count > MAX_FUNCTION_LINES:
                    yield f"{path}:{node.lineno}: {node.name} has {count} lines, expected at most {MAX_FUNCTION_LINES}"


def names_say_something(tree: Path) -> Iterator[str]:
    for path, _ in modules(tree):
        for part in (*path.relative_to(tree).parts[:-1], path.stem):
            if VAGUE & set(part.lower().strip("_").split("_")):
                yield f"{path}: got the name {part!r}, expected a noun of the problem"


def packages_are_at_most_two_deep(tree: Path) -> Iterator[str]:
    for path, _ in modules(tree):
        parts = path.relative_to(tree).parts
        if parts[0] == "megatron_fixes" and len(parts) > 4:
            yield f"{path}: got a package {len(parts) - 2} deep, expected at most two"


def patches_add_no_assert(tree: Path) -> Iterator[str]:
    for path in files(tree / "patches"):
        if path.suffix == ".patch":
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if re.match(r"\+(?!\+\+ )(?:\s*|[^#]*[;:]\s*)assert\b", line):
                    yield f"{path}:{number}: got an added assert (python -O drops it), expected an exception"


def no_path_of_one_machine(tree: Path) -> Iterator[str]:
    for path in files(tree):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if match := HOME.search(line):
                yield f"{path}:{number}: got the absolute path {match.group()!r}, which only one machine has"


def workflows(tree: Path) -> Iterator[tuple[Path, dict[Any, Any]]]:
    for path in files(tree / ".github" / "workflows"):
        yield path, yaml.safe_load(path.read_text(encoding="utf-8"))


def workflows_only_call_nox_or_make(tree: Path) -> Iterator[str]:
    call = re.compile(r"(?:(?:pipx run )?nox|make)(?: [\w.,:=/\"${} *-]+)?$")
    for path, workflow in workflows(tree):
        for name, job in workflow["jobs"].items():
            for step in job.get("steps", ()):
                for line in str(step.get("run", "")).strip().splitlines():
                    if not call.match(line.strip()):
                        yield f"{path}: job {name} runs {line!r}, expected nothing but nox or make"


def workflows_may_only_read(tree: Path) -> Iterator[str]:
    for path, workflow in workflows(tree):
        if workflow.get("permissions") not in ({"contents": "read"}, {}):
            yield f"{path}: got permissions {workflow.get('permissions')!r}, expected contents: read or none"
        for name, job in workflow["jobs"].items():
            allowed = {"contents: read", *MAY_WRITE.get((path.name, name), ())}
            asked = job.get("permissions", {})
            if not isinstance(asked, dict) or (odd := {f"{what}: {how}" for what, how in asked.items()} - allowed):
                got = asked if not isinstance(asked, dict) else ", ".join(sorted(odd))
                yield f"{path}: job {name} asks for {got}, expected no more than {', '.join(sorted(allowed))}"


def actions_name_a_commit(tree: Path) -> Iterator[str]:
    pinned = re.compile(
        r"\s*(?:- )?uses: (?:[\w./-]+@[0-9a-f]{40} # v\d[\w.]*|\./\.github/workflows/[\w.]+\.yml(?: #.*)?)"
    )
    for path in files(tree / ".github" / "workflows"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.search(r"\buses:", line) and not pinned.fullmatch(line):
                yield f"{path}:{number}: got {line.strip()!r}, expected an action at a commit # its version"


def gate_is_one_call_of_ci_run(tree: Path) -> Iterator[str]:
    gate = tree / ".ci" / "run"
    if gate.read_text(encoding="utf-8") != "#!/usr/bin/env bash\nexec ci/run\n":
        yield f"{gate}: got something else than the one line `exec ci/run`"
    for path in (gate, tree / "ci" / "run"):
        if not os.access(path, os.X_OK):
            yield f"{path}: is not executable"


class Spoilt(NamedTuple):
    """A rule, and a file that it must object to, beside one that it must not."""

    rule: Rule
    path: str
    bad: str
    good: str


HEAD = f'{SPDX}\n"""Says what it guards."""\n'
WORKFLOW = "permissions: {{contents: read}}\njobs: {{one: {{steps: [{0}]}}}}\n"
ACTION = "jobs:\n  a:\n    steps:\n      - uses: actions/checkout@{0}\n"
LONG = "def long():\n" + "    x = 1\n" * MAX_FUNCTION_LINES
A_HOME = "/" + "root"

SPOILT = {
    "no licence line": Spoilt(licence_and_docstring_come_first, "megatron_fixes/a.py", '"""A."""\n', HEAD),
    "no docstring": Spoilt(licence_and_docstring_come_first, "megatron_fixes/a.py", f"{SPDX}\n", HEAD),
    "empty file": Spoilt(licence_and_docstring_come_first, "tests/x/__init__.py", "", "#!/bin/python\n" + HEAD),
    "late docstring": Spoilt(licence_and_docstring_come_first, "a.py", f'{SPDX}\n# Note.\n"""A."""\n', HEAD),
    "long file": Spoilt(files_are_short, "a.py", "x = 1\n" * 421, "x = 1\n" * 420),
    "long function": Spoilt(functions_are_short, "a.py", LONG, LONG[: -len("    x = 1\n")]),
    "patch with assert": Spoilt(
        patches_add_no_assert, "patches/core_v0/a.patch", "+    assert x\n", "-    assert x\n     assert y\n+# assert\n"
    ),
    "patch with assert on one line": Spoilt(
        patches_add_no_assert, "patches/a.patch", "+if x: assert y\n", "+self.assert_(x)\n"
    ),
    "path of a machine": Spoilt(
        no_path_of_one_machine, "docs/a.md", f"see {A_HOME}/x\n", f"https://host.test{A_HOME}/x {A_HOME}x\n"
    ),
    "path of a user": Spoilt(no_path_of_one_machine, "Makefile", "X := /" + "home/me/x\n", "X := ~/home/me\n"),
    "workflow with a script": Spoilt(
        workflows_only_call_nox_or_make,
        ".github/workflows/a.yml",
        WORKFLOW.format('{run: "make lint && curl x"}'),
        WORKFLOW.format('{run: "make lint"}, {run: "pipx run nox -s lint"}'),
    ),
    "workflow with a second line": Spoilt(
        workflows_only_call_nox_or_make,
        ".github/workflows/a.yml",
        WORKFLOW.format('{run: "make lint\\npytest"}'),
        WORKFLOW.format('{run: "make lint\\nnox -s types"}'),
    ),
    "workflow that may write": Spoilt(
        workflows_may_only_read, ".github/workflows/a.yml", "jobs: {}\n", "permissions: {contents: read}\njobs: {}\n"
    ),
    "job that may write": Spoilt(
        workflows_may_only_read,
        ".github/workflows/a.yml",
        "permissions: {contents: read}\njobs: {a: {permissions: write-all}}\n",
        "permissions: {contents: read}\njobs: {a: {permissions: {contents: read}}}\n",
    ),
    "job of a release that may write more": Spoilt(
        workflows_may_only_read,
        ".github/workflows/release.yml",
        "permissions: {}\njobs: {sign-keyless: {permissions: {id-token: write, contents: write}}}\n",
        "permissions: {}\njobs: {sign-keyless: {permissions: {id-token: write, contents: read}}}\n",
    ),
    "right of a release in another workflow": Spoilt(
        workflows_may_only_read,
        ".github/workflows/ci.yml",
        "permissions: {}\njobs: {sign: {permissions: {id-token: write}}}\n",
        "permissions: {}\njobs: {sign: {}}\n",
    ),
    "action at a version": Spoilt(
        actions_name_a_commit, ".github/workflows/a.yml", ACTION.format("v4"), ACTION.format(f"{'0a' * 20} # v4.2.0")
    ),
    "action at a commit of no version": Spoilt(
        actions_name_a_commit,
        ".github/workflows/a.yml",
        ACTION.format("0a" * 20),
        "jobs:\n  a:\n    uses: ./.github/workflows/b.yml\n",
    ),
    "deep package": Spoilt(packages_are_at_most_two_deep, "megatron_fixes/a/b/c/d.py", HEAD, HEAD),
    "vague name": Spoilt(names_say_something, "megatron_fixes/utils.py", HEAD, HEAD),
    "vague name behind an underscore": Spoilt(names_say_something, "megatron_fixes/a/_patch_helpers.py", HEAD, HEAD),
    "vague name of a folder": Spoilt(names_say_something, "megatron_fixes/common/a.py", HEAD, HEAD),
}
BY_NAME = (packages_are_at_most_two_deep, names_say_something)
RULES: list[Rule] = [*dict.fromkeys(spoilt.rule for spoilt in SPOILT.values()), gate_is_one_call_of_ci_run]


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule: Rule) -> None:
    assert list(rule(ROOT)) == []


@pytest.mark.parametrize("name", SPOILT)
def test_the_rule_objects_to_a_spoilt_tree_only(name: str, tmp_path: Path) -> None:
    rule, path, bad, good = SPOILT[name]
    write(tmp_path / "spoilt" / path, bad)
    write(tmp_path / "sound" / ("megatron_fixes/breaker.py" if rule in BY_NAME else path), good)
    assert len(list(rule(tmp_path / "spoilt"))) == 1
    assert list(rule(tmp_path / "sound")) == []


@pytest.mark.parametrize("text", ["exec ci/run\n", "#!/usr/bin/env bash\nset -e\nexec ci/run\n"])
def test_a_gate_that_does_more_is_objected_to(text: str, tmp_path: Path) -> None:
    for path, content in ((".ci/run", text), ("ci/run", "#!/usr/bin/env bash\n")):
        write(tmp_path / path, content)
        (tmp_path / path).chmod(0o755)
    assert len(list(gate_is_one_call_of_ci_run(tmp_path))) == 1


def test_a_gate_that_is_not_executable_is_objected_to(tmp_path: Path) -> None:
    write(tmp_path / ".ci" / "run", "#!/usr/bin/env bash\nexec ci/run\n")
    write(tmp_path / "ci" / "run", "#!/usr/bin/env bash\n")
    assert len(list(gate_is_one_call_of_ci_run(tmp_path))) == 2
