# SPDX-License-Identifier: Apache-2.0
"""Options and words that several commands share: names separated by commas or given again, releases, fixes, the target.

``--only MF0001,mf0003``, ``--only "MF0001, MF0003"`` and ``--only MF0001 --only MF0003`` mean the same, and
a fix's slug does as well (``patching.ids``). An option that is given but names nothing is refused: for ``apply`` it
would otherwise mean everything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from megatron_fixes.cli import output
from megatron_fixes.errors import UsageError
from megatron_fixes.patching.shell import quote, shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from megatron_fixes.catalog import Catalog
    from megatron_fixes.catalog.matrix import Matrix
    from megatron_fixes.patching.target import Target

ALL = "all"
GATED = "gated: only by name"


def split_names(values: Iterable[str]) -> tuple[str, ...]:
    """Names out of comma separated values, each once, in the order given."""
    return tuple(dict.fromkeys(part.strip() for value in values for part in value.split(",") if part.strip()))


def _names(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    names = split_names(values)
    if values and not names:
        raise UsageError(
            f"got no name for {param.get_error_hint(ctx)}, expected at least one",
            hint="Name some, separated by commas, or leave the option out.",
        )
    return names


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, errors too.")
only_option = click.option(
    "--only",
    multiple=True,
    callback=_names,
    metavar="ID,...",
    help="These fixes only, by id or slug, and what they require.",
)
release_option = click.option(
    "--release", "releases", multiple=True, callback=_names, metavar="X.Y.Z,...", help="Releases, or 'all'."
)
variant_option = click.option(
    "--variant",
    "variants",
    multiple=True,
    callback=_names,
    metavar="NAME,...",
    help="vanilla, patched, overlay (default: all).",
)
fix_ids_argument = click.argument("fix_ids", nargs=-1, callback=_names, metavar="[MF0001 ...]")


def known_releases(matrix: Matrix, given: Iterable[str]) -> tuple[str, ...]:
    """The releases that are meant: ``all`` is all of the matrix; ``v0.16.1`` and ``core_v0.16.1`` are taken too.

    Raises:
        UsageError: A release that the matrix does not know; the hint lists what is known.
    """
    found: list[str] = []
    for name in given:
        release = name.lower().removeprefix("core_").removeprefix("v")
        if release == ALL:
            found += matrix.releases
        elif release in matrix.releases:
            found.append(release)
        else:
            raise UsageError(
                f"got release {name!r}, expected one that is known here",
                hint=f"Name some of {', '.join(matrix.releases)}, or {ALL}.",
            )
    return tuple(dict.fromkeys(found))


def named(catalog: Catalog, fix_id: str) -> str:
    """A fix's slug, and that only its name puts it in where that is so."""
    return catalog.matrix.fixes[fix_id].slug + (f" ({GATED})" if catalog.is_gated(fix_id) else "")


def note_tree_here(target: Target | None) -> None:
    """Say so if the working directory holds another tree than the one that was found without being named."""
    from megatron_fixes.patching.target import tree_here

    if (here := tree_here(target)) is not None:
        output.note(f"note: {shown(here)} lies here too; to look at it: megatron-fixes scan .")


def apply_again(target: Target, where: str) -> str:
    """The command that applies to a target which was applied to before, so also to an installed one."""
    return f"megatron-fixes apply {where}" + (" --installed" if target.installed else "")


def as_typed(target: Target, typed: str | None) -> str:
    """The target as a word for the shell: as the user named it, else its root."""
    return quote(typed if typed is not None else target.root)
