# SPDX-License-Identifier: Apache-2.0
"""The attach points say of every release line what its text says, and no row is there for nothing."""

from __future__ import annotations

import ast
import functools

import pytest

from megatron_fixes.config import GUARD_NAMES
from megatron_fixes.guards import lifecycle, streams, teardown
from megatron_fixes.guards.points import POINTS, AttachPoint

from .runs import RELEASES, tree_of

WRAPPERS = {**streams.WRAPPERS, **lifecycle.WRAPPERS, **teardown.WRAPPERS}


def line_of(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")[:2]))


@functools.cache
def parsed(release: str, module: str) -> ast.Module:
    return ast.parse((tree_of(release) / f"{module.replace('.', '/')}.py").read_text())


def parameters(release: str, point: AttachPoint) -> tuple[str, ...] | None:
    """Of a function in a release's text, or None."""
    body: list[ast.stmt] = parsed(release, point.module).body
    *path, name = point.qualname.split(".")
    for part in path:
        body = next(node.body for node in body if isinstance(node, ast.ClassDef) and node.name == part)
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return tuple(argument.arg for argument in (*node.args.args, *node.args.kwonlyargs))
    return None


@pytest.mark.parametrize("release", RELEASES)
def test_every_row_fits_the_lines_that_it_names_and_no_other(release: str) -> None:
    for point in POINTS:
        names = parameters(release, point)
        named = line_of(point.first) <= line_of(release) <= line_of(point.last)
        assert (names is not None and point.fits(names)) == named, (point, names)


def test_every_guard_has_points_and_every_point_a_wrapper() -> None:
    assert {point.guard for point in POINTS} == set(GUARD_NAMES)
    assert {(point.guard, point.qualname) for point in POINTS} == set(WRAPPERS)
