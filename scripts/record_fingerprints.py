#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Generates ``megatron_fixes/catalog/fingerprints.json``: every known text of every function that a fix touches.

Applies every closed subset of every group of fixes that share files, in series order, to every release of the line, in
memory, and fingerprints the functions that changed; where one is not defined (a fix, or a release, adds it), that is
recorded too. So is each statement that a fix adds outside functions, and the hash of each file as published, with the
whole series and with all of it that is not gated. Run after editing a patch or adding a release;
``--check`` only compares. A fix touches a function if applying it changes the function's fingerprint in any line.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections import defaultdict
from typing import TYPE_CHECKING

from generated import only_check, settle

from megatron_fixes.catalog.data import fingerprints_path, matrix_path, patches_root
from megatron_fixes.catalog.fingerprint import OUTSIDE, FunctionPrint, functions
from megatron_fixes.catalog.known import ABSENT, SCHEMA, Known, KnownFunction, Place
from megatron_fixes.catalog.matrix import load_matrix
from megatron_fixes.catalog.series import Series, load_series
from megatron_fixes.patching.groups import independent_groups
from megatron_fixes.patching.hunks import apply_patch, touched_paths
from megatron_fixes.proofs.releases import fetch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Texts = dict[str, FunctionPrint]


# Most subsets leave most files as another subset left them.
prints_of = functools.cache(functions)


def texts(files: dict[str, bytes]) -> Texts:
    """Fingerprint every function of some files that is defined once, as ``path::qualname``."""
    found: Texts = {}
    for path, content in files.items():
        for qualname, prints in prints_of(content).items():
            if len(prints) == 1:
                found[f"{path}::{qualname}"] = prints[0]
    return found


def subsets(tree: Path, group: Series) -> Iterator[tuple[tuple[str, ...], Texts]]:
    """Every closed subset's fix ids, with the functions of all files that the group touches as they are under it."""
    paths = {path for patch in group.patches for path in touched_paths(patch.text)}
    pristine = {path: (tree / path).read_bytes() for path in paths}
    for chosen in group.closed_subsets():
        files = dict(pristine)
        for patch in chosen:
            files.update(apply_patch(patch.text, files, source=patch.name))
        yield tuple(patch.fix_id for patch in chosen), texts(files)


def whole_files(tree: Path, group: Series, release: str) -> Iterator[tuple[str, str, Place]]:
    """Path, sha256 and place of the files of a group, with nothing, with all, and with all but gated fixes in them."""
    paths = {path for patch in group.patches for path in touched_paths(patch.text)}
    ungated = group.closure([patch.fix_id for patch in group.patches if not patch.gated])
    for chosen in ((), group.patches, ungated):
        files = {path: (tree / path).read_bytes() for path in paths}
        for patch in chosen:
            files.update(apply_patch(patch.text, files, source=patch.name))
        place = Place(release, tuple(patch.fix_id for patch in chosen))
        yield from ((path, hashlib.sha256(content).hexdigest(), place) for path, content in files.items())


def touched(name: str, found: Texts, without: Texts) -> bool:
    """Whether a function differs, or a statement outside functions is there only with the fix."""
    if name.split("::")[1].startswith(OUTSIDE):
        return name in found and name not in without
    return getattr(found.get(name), "hash", 0) != getattr(without.get(name), "hash", 0)


def record() -> Known:
    """Build the table from the matrix, the patches and the releases."""
    matrix = load_matrix(matrix_path())
    series = {line: load_series(patches_root(), line) for line in matrix.lines()}
    patches = [patch for line in series.values() for patch in line.patches]
    paths = {path for patch in patches for path in touched_paths(patch.text)}
    plain: dict[str, Texts] = {}
    changed: dict[str, list[dict[tuple[str, ...], Texts]]] = {}
    standing: dict[str, dict[str, Place]] = {path: {} for path in sorted(paths)}
    for release, row in matrix.releases.items():
        print(f"{release} …", file=sys.stderr)
        tree = fetch(release, matrix)
        plain[release] = texts({path: (tree / path).read_bytes() for path in paths if (tree / path).is_file()})
        groups = independent_groups(series[row.line])
        changed[release] = [dict(subsets(tree, group)) for group in groups]
        for path in paths:
            if (tree / path).is_file():
                digest = hashlib.sha256((tree / path).read_bytes()).hexdigest()
                standing[path].setdefault(digest, Place(release, ()))
        for path, digest, place in (found for group in groups for found in whole_files(tree, group, release)):
            standing[path].setdefault(digest, place)

    touches: dict[str, set[str]] = defaultdict(set)
    for by_set in (by_set for groups in changed.values() for by_set in groups):
        for ids, found in by_set.items():
            for fix_id in ids:
                without = by_set.get(tuple(i for i in ids if i != fix_id))
                if without is not None:
                    touches[fix_id] |= {name for name in set(found) | set(without) if touched(name, found, without)}

    table: dict[str, dict[str, tuple[FunctionPrint, set[Place]]]] = defaultdict(dict)

    def enter(function: str, found: Texts, place: Place) -> None:
        text = found.get(function) or FunctionPrint(function.split("::")[1], ABSENT, 0, ())
        table[function].setdefault(text.hash, (text, set()))[1].add(place)

    for release, by_group in changed.items():
        for function in set().union(*touches.values()):
            enter(function, plain[release], Place(release, ()))
            for by_set in by_group:
                for ids, found in by_set.items():
                    if present := tuple(i for i in ids if function in touches[i]):
                        enter(function, found, Place(release, present))
    return Known(
        schema=SCHEMA,
        patches={patch.name: patch.sha256 for patch in patches},
        touches={fix_id: tuple(sorted(names)) for fix_id, names in sorted(touches.items())},
        functions={
            function: tuple(
                KnownFunction(hash_, tuple(sorted(places)), tuple(s.hash for s in text.statements))
                for hash_, (text, places) in sorted(table[function].items(), key=lambda item: min(item[1][1]))
            )
            for function in sorted(table)
        },
        files={path: dict(sorted(places.items())) for path, places in standing.items()},
    )


if __name__ == "__main__":
    only_compared = only_check(__doc__)
    sys.exit(settle(record, fingerprints_path(), check=only_compared))
