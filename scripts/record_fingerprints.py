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
from typing import TYPE_CHECKING, NamedTuple

from generated import only_check, settle

from megatron_fixes.catalog.data import fingerprints_path, matrix_path, patches_root
from megatron_fixes.catalog.fingerprint import OUTSIDE, FunctionPrint, functions
from megatron_fixes.catalog.known import ABSENT, SCHEMA, Known, KnownFunction, Place
from megatron_fixes.catalog.matrix import load_matrix
from megatron_fixes.catalog.series import load_series
from megatron_fixes.patching.groups import independent_groups
from megatron_fixes.patching.hunks import apply_patch, touched_paths
from megatron_fixes.proofs.releases import fetch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from megatron_fixes.catalog.series import PatchFile, Series

Texts = dict[str, FunctionPrint]
# The hashes of a function and of its statements.
Text = tuple[str, tuple[str, ...]]

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


class Release(NamedTuple):
    """One release.

    Attributes:
        plain: The functions of its files as published.
        groups: For each group of fixes that share files: the functions of these files under every closed subset.
        files: Path, sha256 and place of its files: with nothing, with all fixes, and with all but gated ones in them.
    """

    plain: Texts
    groups: list[dict[tuple[str, ...], Texts]]
    files: list[tuple[str, str, Place]]


def paths_of(patches: Iterable[PatchFile]) -> set[str]:
    """The files that some patches touch."""
    return {path for patch in patches for path in touched_paths(patch.text)}


def ids_of(patches: Iterable[PatchFile]) -> tuple[str, ...]:
    """The fixes of some patches, in their order."""
    return tuple(patch.fix_id for patch in patches)


def with_patches(patches: Iterable[PatchFile], files: dict[str, bytes]) -> dict[str, bytes]:
    """Some files with patches in them."""
    found = dict(files)
    for patch in patches:
        found.update(apply_patch(patch.text, found, source=patch.name))
    return found


def look_at(release: str, files: dict[str, bytes], series: Series) -> Release:
    """Put the fixes of a release's line into its files, in all ways that are recorded."""
    groups: list[dict[tuple[str, ...], Texts]] = []
    states: list[tuple[Sequence[PatchFile], dict[str, bytes]]] = [((), files)]
    for group in independent_groups(series):
        own = {path: files[path] for path in paths_of(group.patches)}
        groups.append({ids_of(chosen): texts(with_patches(chosen, own)) for chosen in group.closed_subsets()})
        ungated = group.closure([patch.fix_id for patch in group.patches if not patch.gated])
        states += [(chosen, with_patches(chosen, own)) for chosen in (group.patches, ungated)]
    whole = [
        (path, hashlib.sha256(content).hexdigest(), Place(release, ids_of(chosen)))
        for chosen, state in states
        for path, content in state.items()
    ]
    return Release(texts(files), groups, whole)


def touched(name: str, found: Texts, without: Texts) -> bool:
    """Whether a function differs, or a statement outside functions is there only with the fix."""
    if name.split("::")[1].startswith(OUTSIDE):
        return name in found and name not in without
    return getattr(found.get(name), "hash", 0) != getattr(without.get(name), "hash", 0)


def touches_of(releases: Iterable[Release]) -> dict[str, set[str]]:
    """The functions that each fix changes, with any others in or without."""
    found: dict[str, set[str]] = defaultdict(set)
    for by_set in (by_set for release in releases for by_set in release.groups):
        for ids, now in by_set.items():
            for fix_id in ids:
                without = by_set.get(tuple(i for i in ids if i != fix_id))
                if without is not None:
                    found[fix_id] |= {name for name in {*now, *without} if touched(name, now, without)}
    return found


def places_of(releases: dict[str, Release], touches: dict[str, set[str]]) -> dict[str, dict[Text, set[Place]]]:
    """For each function that a fix touches: its texts, and where each stands."""
    found: dict[str, dict[Text, set[Place]]] = defaultdict(lambda: defaultdict(set))

    def enter(function: str, seen: Texts, place: Place) -> None:
        known = seen.get(function)
        text = (known.hash, tuple(statement.hash for statement in known.statements)) if known else (ABSENT, ())
        found[function][text].add(place)

    for name, release in releases.items():
        for function in set().union(*touches.values()):
            enter(function, release.plain, Place(name, ()))
            for by_set in release.groups:
                for ids, seen in by_set.items():
                    if present := tuple(i for i in ids if function in touches[i]):
                        enter(function, seen, Place(name, present))
    return found


def record() -> Known:
    """Build the table from the matrix, the patches and the releases."""
    matrix = load_matrix(matrix_path())
    series = {line: load_series(patches_root(), line) for line in matrix.lines()}
    patches = [patch for line in series.values() for patch in line.patches]
    paths = sorted(paths_of(patches))
    releases = {}
    for release, row in matrix.releases.items():
        print(f"{release} …", file=sys.stderr)
        tree = fetch(release, matrix)
        files = {path: (tree / path).read_bytes() for path in paths if (tree / path).is_file()}
        releases[release] = look_at(release, files, series[row.line])
    touches = touches_of(releases.values())
    places = places_of(releases, touches)
    whole: dict[str, dict[str, Place]] = {path: {} for path in paths}
    for path, digest, place in (found for release in releases.values() for found in release.files):
        whole[path].setdefault(digest, place)
    return Known(
        schema=SCHEMA,
        patches={patch.name: patch.sha256 for patch in patches},
        touches={fix_id: tuple(sorted(names)) for fix_id, names in sorted(touches.items())},
        functions={
            function: tuple(
                KnownFunction(hash_, tuple(sorted(where)), statements)
                for (hash_, statements), where in sorted(places[function].items(), key=lambda item: min(item[1]))
            )
            for function in sorted(places)
        },
        files={path: dict(sorted(where.items())) for path, where in whole.items()},
    )


if __name__ == "__main__":
    only_compared = only_check(__doc__)
    sys.exit(settle(record, fingerprints_path(), check=only_compared))
