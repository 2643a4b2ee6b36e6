# SPDX-License-Identifier: Apache-2.0
"""Finds the Megatron-LM that a command is about: a checkout, an unpacked source tree, or the installed package.

Rules:

- A given path may be the root, its ``megatron/`` or its ``megatron/core``; symbolic links are resolved.
- Without a path it is what ``import megatron.core`` would choose in this interpreter, found without importing
  anything: a regular ``megatron`` package wins over namespace portions, else the first portion with ``core``
  (PEP 420); the finders of editable installs are asked as well.
- A git directory counts only if the root itself is the top of the work tree: an unpacked tree inside another
  repository is not that repository's.

Not handled: a ``megatron`` that this process already imported from elsewhere, and the ``sys.path`` of another
interpreter or script.
"""

from __future__ import annotations

import difflib
import importlib.machinery
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_fixes.errors import UsageError
from megatron_fixes.patching.gitfiles import git_directory, is_sparse
from megatron_fixes.patching.release import dist_info, find_release
from megatron_fixes.patching.shell import quote

_SITE_NAMES = {"site-packages", "dist-packages"}
_Find = Callable[[str, Sequence[str] | None], importlib.machinery.ModuleSpec | None]


@dataclass(frozen=True)
class Target:
    """A tree that holds ``megatron/core``.

    Attributes:
        root: Directory that holds ``megatron/core``, resolved.
        megatron_core: The ``megatron/core`` directory.
        release: The release in normal form, as ``0.16.1``; None if unknown.
        release_source: What named the release: a file's relative path, a dist-info, or a git tag; empty if unknown.
        git_dir: Git directory (of the worktree or submodule) if ``root`` is the top of a work tree.
        installed: Whether an installer put it there: it lies in a site-packages directory or has a dist-info
            with an INSTALLER file.
    """

    root: Path
    megatron_core: Path
    release: str | None
    release_source: str
    git_dir: Path | None
    installed: bool


def find_target(path: str | Path | None, sys_path: Sequence[str] | None = None) -> Target:
    """Find the target.

    Args:
        path: Root, ``megatron/`` or ``megatron/core`` of a tree; None for what would be imported.
        sys_path: Import path to search when ``path`` is None; None for this interpreter's, with all its finders.

    Returns:
        The target; its files were only read.

    Raises:
        UsageError: The path is empty or not such a tree, or nothing is importable.
    """
    if path is not None and not str(path).strip():
        raise UsageError(
            "got an empty path, expected a directory that holds megatron/core",
            hint="Check the shell variable that it came from; the working directory is '.'.",
        )
    root = _importable_root(sys_path) if path is None else _given_root(Path(path))
    git_dir = git_directory(root)
    release, source = find_release(root, git_dir)
    info = dist_info(root)
    return Target(
        root=root,
        megatron_core=root / "megatron" / "core",
        release=release,
        release_source=source,
        git_dir=git_dir,
        installed=bool(_SITE_NAMES.intersection(root.parts)) or (info is not None and (info / "INSTALLER").is_file()),
    )


def journal_dir(target: Target) -> Path:
    """Return where the target's journal lies, or would lie: below its git directory, else beside ``megatron/``.

    A tree can become a checkout after an apply (``git init``), so the place where something is kept goes first: there
    are never two journals.
    """
    beside = target.root / ".megatron-fixes"
    if target.git_dir is None:
        return beside
    below_git = target.git_dir / "megatron-fixes"
    return beside if _keeps_something(beside) and not _keeps_something(below_git) else below_git


def _keeps_something(journal: Path) -> bool:
    """Whether more than a leftover has the journal directory's name: a journal, bytes, or something unexpected."""
    if not journal.is_dir():
        return os.path.lexists(journal)
    return os.path.lexists(journal / "journal.json") or os.path.lexists(journal / "blobs")


def holds_core(root: Path) -> bool:
    """Whether a directory holds the sources of megatron/core."""
    core = root / "megatron" / "core"
    return (core / "__init__.py").is_file() or (core / "package_info.py").is_file()


def _given_root(path: Path) -> Path:
    path = path.expanduser()
    try:
        resolved = path.resolve()
        exists, is_dir = resolved.exists(), resolved.is_dir()
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"got a path that can't be read ({error}), expected a directory", context=str(path)) from None
    if not exists:
        raise UsageError(
            "got a path that does not exist, expected a directory that holds megatron/core",
            context=str(path),
            hint=_elsewhere(resolved, _respelt(resolved)) or "check the path for a typing mistake",
        )
    if not is_dir:
        raise UsageError(
            "got a file, expected a directory that holds megatron/core",
            context=str(path),
            hint=_elsewhere(resolved) or "name the root of a Megatron-LM tree",
        )
    for root in (resolved, *resolved.parents[:2]):
        inside = resolved.relative_to(root).parts
        if inside == ("megatron", "core")[: len(inside)] and holds_core(root):
            return _real_root(root)
    other_way = "name the directory that holds megatron/core"
    if is_sparse(git_directory(resolved)):
        other_way += f"; if the checkout is sparse: git -C {quote(resolved)} sparse-checkout add megatron/core"
    raise UsageError(
        "got a directory without megatron/core, expected a Megatron-LM checkout, an unpacked tree or site-packages",
        context=str(path),
        hint=_elsewhere(resolved) or other_way,
    )


def _real_root(root: Path) -> Path:
    """Return the root in which ``megatron/core`` really lies: ``megatron`` may be a link into another tree.

    So a tree has one root, and one journal, whatever name it is given by. The root itself where what is linked to is
    called otherwise.
    """
    root = root.resolve()
    core = (root / "megatron" / "core").resolve()
    real = core.parent.parent
    return real if core.parts[-2:] == ("megatron", "core") and holds_core(real) else root


def _elsewhere(path: Path, respelt: Iterable[Path] = ()) -> str:
    """Return a hint that names a tree above or below ``path``, or one that may have been meant, or an empty text."""
    found = next((root for root in (*respelt, *_nearby(path)) if holds_core(root)), None)
    return f"name {quote(found)}, which holds megatron/core" if found is not None else ""


def _respelt(path: Path) -> Iterator[Path]:
    """Yield paths that a path which does not exist may have been meant to be: its first wrong part, spelt otherwise."""
    above = next(parent for parent in path.parents if parent.is_dir())
    wrong, *rest = path.relative_to(above).parts
    for name in difflib.get_close_matches(wrong, [child.name for child in _directories(above)]):
        yield above.joinpath(name, *rest)


def _nearby(path: Path) -> Iterator[Path]:
    """Yield the ancestors, then what lies one and two levels below."""
    yield from path.parents
    below = _directories(path)
    yield from below
    for child in below:
        if child.name in {"src", "lib", "third_party", "3rdparty"}:
            yield from _directories(child)


def _directories(path: Path) -> list[Path]:
    try:
        return sorted(child for child in path.iterdir() if child.is_dir())
    except OSError:
        return []


def _importable_root(sys_path: Sequence[str] | None) -> Path:
    find = _finder(sys_path)
    spec = find("megatron", None)
    locations = _locations(spec)
    core = _locations(find("megatron.core", locations)) if locations else []
    if core:
        root = Path(core[0]).parent.parent
        if holds_core(root):
            return _real_root(root)
        raise UsageError(
            "got an importable megatron.core without its sources, expected megatron/core/__init__.py",
            context=core[0],
            hint=_name_it("Reinstall megatron-core"),
        )
    if spec is not None and spec.origin is not None:
        raise UsageError(
            "got a package 'megatron' without 'core', which hides any other, expected megatron.core",
            context=spec.origin,
            hint=_name_it("Remove that package from the import path"),
        )
    raise UsageError(
        "got no importable megatron.core, expected an installed megatron-core",
        hint=_name_it("Install megatron-core"),
    )


def _name_it(other_way: str) -> str:
    if tree_here(None) is None:
        return f"{other_way}, or name the Megatron-LM tree."
    return f"Look at the tree in the working directory: megatron-fixes scan . (or: {other_way.lower()})"


def tree_here(target: Target | None) -> Path | None:
    """Return the working directory if it holds a tree that is not the target, else None.

    ``python train.py`` in it may well import that tree, where this process does not look into it.
    """
    try:
        here = Path.cwd().resolve()
    except OSError:  # it was removed
        return None
    return here if holds_core(here) and (target is None or target.root != here) else None


def _finder(sys_path: Sequence[str] | None) -> _Find:
    """Return a function that finds a module's spec as the import system would, without importing its parents."""
    importlib.machinery.PathFinder.invalidate_caches()
    if sys_path is not None:
        entries = [str(entry) for entry in sys_path]
        return lambda name, path: importlib.machinery.PathFinder.find_spec(name, entries if path is None else path)

    def ask_all(name: str, path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
        for finder in sys.meta_path:
            find_spec = getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = find_spec(name, path, None) if find_spec else None
            if spec is not None:
                return spec
        return None

    return ask_all


def _locations(spec: importlib.machinery.ModuleSpec | None) -> list[str]:
    if spec is None or spec.submodule_search_locations is None:
        return []
    return list(spec.submodule_search_locations)
