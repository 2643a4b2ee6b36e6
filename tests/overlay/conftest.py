# SPDX-License-Identifier: Apache-2.0
"""A distribution like ours with its own fixes, for a Megatron of a few lines that needs no torch.

Everything about it is made by the real parts: the package is copied, four fixes and two releases take the place of
ours, the project's scripts generate the tables, the build backend makes the wheel, pip installs it into a virtual
environment. So the mechanism is tested as a user has it, ``.pth`` included, on every Python that runs these tests.

Releases: 9.1.0 needs all four fixes and there are patches; in 9.2.0 MF9001 is needed without a patch and the others
are fixed upstream. MF9002 requires MF9001, MF9003 touches two modules, MF9004 is gated.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUFFER = "megatron/core/distributed/buffer.py"
LEFT, RIGHT = "megatron/core/pair/left.py", "megatron/core/pair/right.py"
BUFFER_NAME = "megatron.core.distributed.buffer"
PACKAGE_INFO = 'MAJOR = 9\nMINOR = {0}\nPATCH = 0\nPRE_RELEASE = ""\nVERSION = (MAJOR, MINOR, PATCH, PRE_RELEASE)\n'

TREE = {
    "megatron/core/__init__.py": "",
    "megatron/core/package_info.py": PACKAGE_INFO.format(1),
    "megatron/core/plain.py": "HERE = __file__\n",
    "megatron/core/distributed/__init__.py": "try:\n    from .buffer import Buffer\nexcept:\n    Buffer = None\n",
    "megatron/core/pair/__init__.py": "",
    BUFFER: '''"""Adds and scales."""


class Buffer:
    """Holds numbers."""

    def __init__(self, numbers):
        self.numbers = list(numbers)

    def start(self):
        """Add up."""
        total = 0
        for number in self.numbers:
            total = total - number
        return total

    def between(self):
        """Not touched by any fix."""
        first = self.numbers[0]
        last = self.numbers[-1]
        return first, last

    def finish(self):
        """Scale."""
        factor = 1
        if not factor:
            raise ValueError("no factor")
        return self.start() * factor


def tune():
    """How fast."""
    speed = 1
    limit = 10
    return min(speed, limit)
''',
    LEFT: 'def left():\n    """One half."""\n    side = "wrong"\n    return side\n',
    RIGHT: 'def right():\n    """The other half."""\n    side = "wrong"\n    return side\n',
}
EDITS = {
    "MF9001": {BUFFER: ("total - number", "total + number")},
    "MF9002": {BUFFER: ("factor = 1", "factor = 2")},
    "MF9003": {LEFT: ('"wrong"', '"left"'), RIGHT: ('"wrong"', '"right"')},
    "MF9004": {BUFFER: ("speed = 1", "speed = 3")},
}
HEAD = """Description: Mend the defect that {fix} stands for
 Symptom: a wrong number.
 .
 Cause: a wrong operator.
 .
 After this patch: a right number.
Fix-Id: {fix}
Applies-To: 9.1.0
Fixed-In: {fixed}
Upstream-Status: Pending
Numerics: {numerics}
Requires:{requires}
Proof: megatron_fixes.proofs.{lower}
Origin: vendor
Bug: none
Forwarded: no
Last-Update: 2026-11-29
---
"""
STATUS = "import json, megatron_fixes; print(json.dumps(megatron_fixes.status().to_json()))"


def write_tree(root: Path, changes: dict[str, str] | None = None) -> Path:
    """Write release 9.1.0 below ``root``, with some files changed."""
    for path, text in {**TREE, **(changes or {})}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def fixed(path: str, *fixes: str) -> str:
    """A file's text with some fixes in it."""
    text = TREE[path]
    for fix in fixes:
        if path in EDITS[fix]:
            text = text.replace(*EDITS[fix][path])
    return text


def newer_tree() -> dict[str, str]:
    """What release 9.2.0 changed: everything but MF9001 is fixed."""
    changes = {path: fixed(path, "MF9002", "MF9003", "MF9004") for path in (BUFFER, LEFT, RIGHT)}
    return {**changes, "megatron/core/package_info.py": PACKAGE_INFO.format(2)}


def patch_text(fix: str) -> str:
    body = []
    for path in EDITS[fix]:
        before = fixed(path, "MF9001") if fix == "MF9002" else TREE[path]
        after = before.replace(*EDITS[fix][path])
        lines = difflib.unified_diff(
            before.splitlines(True), after.splitlines(True), f"a/{path}", f"b/{path}", lineterm="\n"
        )
        body += [f"diff --git a/{path} b/{path}\n", *lines]
    head = HEAD.format(
        fix=fix,
        lower=fix.lower(),
        fixed="open" if fix == "MF9001" else "9.2.0 (commit 0123456789)",
        numerics="gated" if fix == "MF9004" else "changing",
        requires=" MF9001" if fix == "MF9002" else "",
    )
    return head + "".join(body)


def matrix_text() -> str:
    lines = ["schema: 1", "releases:"]
    for minor in (1, 2):
        lines.append(f'  "9.{minor}.0": {{line: core_v9.{minor}, python: "3.11", torch: "2.13.0", requires_torch: ""}}')
    lines.append("fixes:")
    for fix in EDITS:
        later = "needed" if fix == "MF9001" else "fixed-upstream"
        lines += [f"  {fix}:", f"    slug: {fix.lower()}", "    symptom: S.", "    hit: H.", "    since: 9.1.0"]
        lines += ["    links: []", "    cells:"]
        lines += ['      "9.1.0": {verdict: needed, tested: [gloo]}']
        lines += [f'      "9.2.0": {{verdict: {later}, tested: [gloo]}}']
    return "\n".join(lines) + "\n"


def make_distribution(base: Path) -> Path:
    """Copy the project with other fixes, generate its tables by its own scripts, and build its wheel."""
    tree = base / "project"
    skip = shutil.ignore_patterns("__pycache__", "_data", "*.egg-info")
    for name in ("megatron_fixes", "scripts"):
        shutil.copytree(ROOT / name, tree / name, ignore=skip)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "megatron-fixes.pth", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, tree / name)
    (tree / "README.md").write_text("# Like ours\n")
    (tree / "compat_matrix.yaml").write_text(matrix_text())
    folder = tree / "patches" / "core_v9.1"
    folder.mkdir(parents=True)
    (folder / "series").write_text("".join(f"{fix}-{fix.lower()}.patch\n" for fix in EDITS))
    for fix in EDITS:
        (folder / f"{fix}-{fix.lower()}.patch").write_text(patch_text(fix))
    write_tree(base / "cache" / "releases" / "9.1.0")
    write_tree(base / "cache" / "releases" / "9.2.0", newer_tree())
    environ = {**os.environ, "PYTHONPATH": str(tree), "MEGATRON_FIXES_CACHE": str(base / "cache")}
    for script in ("record_fingerprints.py", "compile_matrix.py"):
        subprocess.run([sys.executable, tree / "scripts" / script], env=environ, check=True, capture_output=True)
    return build_wheel(tree, base / "wheel")


def build_wheel(tree: Path, out: Path) -> Path:
    """Build a wheel by the backend's own hook, without network."""
    out.mkdir()
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(out)], cwd=tree, check=True, capture_output=True)
    (wheel,) = out.iterdir()
    return wheel


def make_venv(base: Path, wheel: Path) -> tuple[Path, Path]:
    """Make a virtual environment with a wheel installed by pip, and the dependencies of this one within reach."""
    venv.create(base, with_pip=False, symlinks=True)
    python = base / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True, capture_output=True)
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python, site


@dataclass
class Environment:
    """A virtual environment with the wheel, and megatron-core 9.1.0 installed in its site directory."""

    python: Path
    site: Path
    wheel: Path
    base: Path
    home: Path = field(default=Path())

    def run(
        self, code: str, *flags: str, on: str | None = "all", check: bool = True, **environ: str | None
    ) -> subprocess.CompletedProcess[str]:
        """Run code in a fresh interpreter whose environment holds what is said here and nothing else."""
        return self.start([*flags, "-c", code], on=on, check=check, **environ)

    def start(
        self, arguments: list[str], *, on: str | None = "all", check: bool = True, **environ: str | None
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [self.python, *arguments],
            env=self.environ(on=on, **environ),
            cwd=self.home,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if check and done.returncode:
            raise AssertionError(f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def environ(self, *, on: str | None = "all", **environ: str | None) -> dict[str, str]:
        values = {"PATH": os.environ.get("PATH", ""), "HOME": str(self.home), "MEGATRON_FIXES": on, **environ}
        return {name: value for name, value in values.items() if value is not None}

    def status(self, code: str = "import megatron.core.distributed", *flags: str, **environ: Any) -> dict[str, Any]:
        """The status after some code, as JSON gives it."""
        return json.loads(self.run(f"{code}\n{STATUS}", *flags, **environ).stdout.splitlines()[-1])

    @property
    def cache(self) -> Path:
        return self.home / ".cache" / "megatron-fixes" / "overlay"


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    pytest.importorskip("setuptools.command.bdist_wheel", reason="needs setuptools >= 77")
    base = tmp_path_factory.mktemp("overlay")
    wheel = make_distribution(base)
    python, site = make_venv(base / "venv", wheel)
    write_tree(site)
    return Environment(python, site, wheel, base)


@pytest.fixture
def env(installed: Environment, tmp_path: Path) -> Environment:
    """The environment with a home folder of its own."""
    home = tmp_path / "home"
    home.mkdir()
    return Environment(installed.python, installed.site, installed.wheel, installed.base, home)


@pytest.fixture
def tree(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a tree with some files changed."""

    def make(name: str = "tree", **changes: str) -> Path:
        return write_tree(tmp_path / name, {path.replace("__", "/") + ".py": text for path, text in changes.items()})

    return make
