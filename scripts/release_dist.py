#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds a release if it may be one: ``make dist``. What it builds says UNSIGNED; ``make sign-dist`` signs it.

Gathers the facts of this checkout, asks ``release_rules``, says every refusal with what to do, and only then calls
``build_release``. With ``--only-agree`` it stops after the part that needs no evidence. Without VERSION it is the tag
on what is checked out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import build_release
import msgspec
import program
from release_evidence import FOLDER, clean_tree
from release_rules import CHECKS, Check, Facts, Refusal, disagreements, refusals
from repository import PACKAGE, commit_of, git, package_version, version_of

from megatron_fixes.catalog.matrix import load_matrix
from megatron_fixes.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
GENERATORS = ("render_tables.py", "compile_matrix.py", "render_reports.py")


def gather(root: Path, version: str) -> Facts:
    """Everything that the rules ask about a checkout.

    Raises:
        RefusedError: The work tree is not clean, so facts of its files are none of its commit.
    """
    head, tree = clean_tree(root)
    return Facts(
        version=version,
        package=package_version((root / PACKAGE).read_text(encoding="utf-8")),
        head=head,
        tree=tree,
        tag=commit_of(root, f"refs/tags/v{version}"),
        log=(root / "CHANGELOG.md").read_text(encoding="utf-8"),
        stale=tuple(stale(root)),
        uncovered=tuple(uncovered(root)),
        checks=read_evidence(FOLDER),
    )


def off_main(root: Path) -> list[Refusal]:
    """Why what is checked out can't be taken for reviewed: it is not part of the main branch of ``origin``."""
    hint = "Have it reviewed and merged, fetch (git fetch origin main), and tag the commit that is on main."
    main = commit_of(root, "refs/remotes/origin/main")
    if main is None:
        return [Refusal("main: there is no origin/main here to look for the commit in", hint)]
    head = git(root, "rev-parse", "HEAD")
    if git(root, "merge-base", head, main, may_fail=True) != head:
        return [Refusal(f"main: {head} is not part of origin/main, which stands at {main}", hint)]
    return []


def stale(root: Path) -> Iterator[str]:
    """The scripts whose generated files are not current."""
    for name in GENERATORS:
        command = [sys.executable, str(root / "scripts" / name), "--check"]
        environment = {**os.environ, "PYTHONPATH": str(root)}
        if subprocess.run(command, env=environment, capture_output=True, check=False).returncode:
            yield f"what {name} writes"


def uncovered(root: Path) -> list[str]:
    """Cells of the GPU table that no record covers."""
    records = [json.loads(path.read_text("utf-8")) for path in sorted((root / "docs" / "records").glob("*.json"))]
    compiled = root / "docs" / "records" / "matrix.json"
    if not compiled.is_file():
        return ["docs/records/matrix.json is not there"]
    matrix = load_matrix(root / "compat_matrix.yaml")
    found: list[str] = _claims(root).uncovered(matrix, json.loads(compiled.read_text("utf-8")), records)
    return found


def read_evidence(place: Path) -> dict[str, Check]:
    """The evidence that is there, by name.

    Raises:
        RefusedError: A file is no evidence.
    """
    found = {}
    for name in CHECKS:
        path = place / f"{name}.json"
        if not path.is_file():
            continue
        try:
            found[name] = msgspec.json.decode(path.read_bytes(), type=Check)
        except msgspec.MsgspecError as error:
            hint = f"Make it again: make evidence CHECKS={name}"
            raise RefusedError(f"got what is no evidence ({error})", context=str(path), hint=hint) from None
        if found[name].name != name:
            raise RefusedError(f"got the evidence of {found[name].name}, expected that of {name}", context=str(path))
    return found


def _claims(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("claims", root / "ci" / "kernels" / "claims.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@program.tells_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Read the arguments, ask the rules, and build."""
    parser = program.parser(__doc__)
    parser.add_argument("version", metavar="VERSION", nargs="?", help="such as v0.1.0 (default: the tag that is here)")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the files (default: dist)")
    parser.add_argument(
        "--only-agree", action="store_true", help="compare tag, main, version, changelog, tables and matrix"
    )
    given = parser.parse_args(arguments)
    version = version_of(ROOT, given.version)
    facts = gather(ROOT, version)
    found = [*disagreements(facts), *off_main(ROOT)] if given.only_agree else refusals(facts)
    for refusal in found:
        print(f"refused: {refusal}", file=sys.stderr)
    if found:
        print(f"nothing was built: {len(found)} reasons against {version}", file=sys.stderr)
        return 1
    if given.only_agree:
        print(f"v{version}: tag, main, version, CHANGELOG.md, tables and matrix agree")
        return 0
    return build_release.main([version, "--out", str(given.out)])


if __name__ == "__main__":
    sys.exit(main())
