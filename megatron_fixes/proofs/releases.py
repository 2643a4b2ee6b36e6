# SPDX-License-Identifier: Apache-2.0
"""Fetches released megatron-core packages once into a cache and unpacks them; nothing is installed.

``python -m megatron_fixes.proofs.releases 0.16.1 …`` fills the cache (``ci/fetch_megatron``); with no release
named, all that the matrix knows. The wheel for Linux on x86-64 is taken whatever this machine is: only its
Python files are looked at. pip does the downloading, so its index, proxy and certificates are the user's own,
and it checks the hash that the index gives.

A release stands in the cache whole or not at all: it is unpacked beside its place and moved there in one
rename, so that several processes may fetch at once and one may be killed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from typing import TYPE_CHECKING

from megatron_fixes.catalog.data import matrix_path
from megatron_fixes.catalog.matrix import load_matrix
from megatron_fixes.config import cache_dir
from megatron_fixes.errors import RefusedError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from megatron_fixes.catalog.matrix import Matrix

PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux2014_x86_64")
FETCH_TIMEOUT_S = 300.0


def require_release(matrix: Matrix, release: str) -> None:
    """Refuse a release that the matrix does not know.

    Raises:
        UsageError: Unknown; the hint lists what is known.
    """
    if release not in matrix.releases:
        raise UsageError(
            f"got release {release!r}, expected one that the matrix knows",
            hint=f"Name one of {', '.join(matrix.releases)}.",
        )


def cached(release: str) -> Path | None:
    """The unpacked tree of a release if the cache has it, else None."""
    tree = cache_dir().value / "releases" / release
    return tree if (tree / "megatron" / "core" / "package_info.py").is_file() else None


def fetch(release: str, matrix: Matrix) -> Path:
    """Return the unpacked tree of a release, fetching it if the cache has it not.

    Raises:
        UsageError: The matrix does not know the release, or the cache folder can't be used.
        RefusedError: pip could not download it (no network, no such wheel); the cache is as it was.
    """
    require_release(matrix, release)
    tree = cached(release)
    if tree:
        return tree
    place = cache_dir().value / "releases" / release
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        return _unpack(release, matrix, place)
    except OSError as error:
        raise UsageError(
            f"can't use the cache folder: {error.strerror}",
            context=str(place.parent),
            hint="Point MEGATRON_FIXES_CACHE at a folder that can be written to.",
        ) from error


def _unpack(release: str, matrix: Matrix, place: Path) -> Path:
    """Download beside a release's place and move there in one rename."""
    with tempfile.TemporaryDirectory(prefix=f".{release}-", dir=place.parent) as folder:
        wheel = _download(release, matrix.releases[release].python, folder)
        unpacked = os.path.join(folder, "tree")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
        try:
            os.rename(unpacked, place)
        except OSError:
            # Another process was first, or an incomplete folder is in the way.
            if cached(release) is None:
                shutil.rmtree(place)
                os.rename(unpacked, place)
    return place


def _download(release: str, python: str, folder: str) -> str:
    platforms = [argument for platform in PLATFORMS for argument in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    command += [*platforms, "--dest", folder, f"megatron-core=={release}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False)
        problem = problem_of(done.stderr) if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"no answer within {FETCH_TIMEOUT_S:g} s"
    wheels = [name for name in os.listdir(folder) if name.endswith(".whl")]
    if problem or not wheels:
        raise RefusedError(
            f"could not download megatron-core {release}: {problem or 'no wheel came'}",
            hint="Check that pip can reach a package index, or fill the cache on a machine that can "
            "(ci/fetch_megatron) and point MEGATRON_FIXES_CACHE at it.",
        )
    return os.path.join(folder, wheels[0])


def problem_of(said: str) -> str:
    """Why a download failed, from what pip said: of an index that can't be reached its last line says nothing."""
    broken = re.findall(r"connection broken by ['\"]?(\w+)\((.*)\)['\"]?: /", said)
    if broken:
        kind, text = broken[-1]
        reason = text.rpartition(">: ")[2].strip("'\"")
        return f"pip could not reach the package index ({kind}: {reason})"
    return (said.strip().splitlines() or ["no message"])[-1].removeprefix("ERROR: ")


def main(releases: list[str]) -> int:
    """Fetch the named releases, or all; print where each one is."""
    matrix = load_matrix(matrix_path())
    for release in releases:
        require_release(matrix, release)
    for release in releases or matrix.releases:
        print(f"{release}  {fetch(release, matrix)}", flush=True)
    return 0


if __name__ == "__main__":
    from megatron_fixes.errors import MegatronFixesError

    try:
        sys.exit(main(sys.argv[1:]))
    except MegatronFixesError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
