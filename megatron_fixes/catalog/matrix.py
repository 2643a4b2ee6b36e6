# SPDX-License-Identifier: Apache-2.0
"""``compat_matrix.yaml`` as data: which releases there are, and what each fix is to each of them.

The one place where a range of releases is written. The README's table is generated from it; patch headers, the
test matrix and the verdicts are checked against it. A fix has a cell for every release, so "unknown" can't be
written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from packaging.version import Version

from megatron_fixes.catalog import hardware
from megatron_fixes.errors import DataError
from megatron_fixes.regular import read_regular

if TYPE_CHECKING:
    from pathlib import Path

CellVerdict = Literal["needed", "fixed-upstream", "not-affected"]
Tested = Literal["gloo", "recorder", "nccl-h200", "untested"]


class Release(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One release on PyPI.

    Attributes:
        line: Its minor series, such as ``core_v0.16``.
        python: The Python version whose wheel is fetched, such as ``3.11``.
        needs: What must be installed beside torch and numpy to import it.
        requires_torch: The versions of torch that its metadata on PyPI asks for, such as ``>=2.6.0``; empty: any.
        yanked: Withdrawn from PyPI by its maintainers.
    """

    line: Annotated[str, msgspec.Meta(pattern=r"^core_v\d+\.\d+$")]
    python: Annotated[str, msgspec.Meta(pattern=r"^3\.\d+$")]
    torch: str
    requires_torch: Annotated[str, msgspec.Meta(pattern=r"^([<>=!~]{1,2}[\d.]+(,[<>=!~]{1,2}[\d.]+)*)?$")]
    needs: tuple[str, ...] = ()
    yanked: bool = False


class Cell(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a fix is to one release, and by which means that was seen; if by none, ``reason`` says why."""

    verdict: CellVerdict
    tested: Annotated[tuple[Tested, ...], msgspec.Meta(min_length=1)]
    reason: str = ""


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A thread or commit upstream.

    Attributes:
        kind: ``same``: about this defect as the newest release that needs the fix has it, or a part of it;
            ``related``: about something else near by, or not shown to be about this, and no place for a report of it.
        about: Of a related one, what it is about.
    """

    url: Annotated[str, msgspec.Meta(pattern=r"^https://")]
    kind: Literal["same", "related"]
    about: str = ""


class Fix(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One fix over all releases.

    Attributes:
        slug: Its name in file names and tables.
        symptom: One sentence: what a person sees who has the defect.
        hit: Who is hit: the configuration.
        since: The first release with the defect, in words where it is not one release. One that is older than all
            releases here was run by others, if at all: "by report".
        links: What is worth reading upstream.
        cells: One for every release.
        before_you_apply: One sentence to know before it is put in: what worked without it and will not go on as it
            did, such as the resumption of a run. Empty for most: that wrong numbers change is what fixes are for.
        on_cpu: What real process groups on CPU show of it, where that is not the harm itself or not all of it.
    """

    slug: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
    symptom: str
    hit: str
    since: str
    links: tuple[Link, ...]
    cells: dict[str, Cell]
    before_you_apply: str = ""
    on_cpu: str = ""

    def affected(self) -> tuple[str, ...]:
        """Releases that need it, in order of version."""
        return tuple(sorted((r for r, cell in self.cells.items() if cell.verdict == "needed"), key=Version))

    def first_fixed(self) -> str | None:
        """The first release that has it upstream, or None while it is open."""
        fixed = [release for release, cell in self.cells.items() if cell.verdict == "fixed-upstream"]
        return min(fixed, key=Version) if fixed else None


class Matrix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file."""

    schema: Literal[1]
    releases: dict[str, Release]
    fixes: dict[str, Fix]
    architectures: dict[Annotated[str, msgspec.Meta(pattern=r"^sm_\d+$")], hardware.Architecture] = {}
    cuda: dict[Annotated[str, msgspec.Meta(pattern=r"^\d+\.\d+$")], hardware.Cuda] = {}
    gpus: hardware.Cells = {}
    transformer_engine: tuple[hardware.Engine, ...] = ()

    def lines(self) -> dict[str, tuple[str, ...]]:
        """Line to its releases, both in order of version."""
        found: dict[str, list[str]] = {}
        for release in sorted(self.releases, key=Version):
            found.setdefault(self.releases[release].line, []).append(release)
        return {line: tuple(releases) for line, releases in found.items()}

    def releases_for(self, cuda: str) -> tuple[str, ...]:
        """The releases whose metadata accepts at least one official wheel of torch for a CUDA version of the matrix."""
        column = self.cuda[cuda]
        return tuple(name for name, release in self.releases.items() if column.goes_with(release.requires_torch))


def load_matrix(path: Path) -> Matrix:
    """Read and validate the matrix.

    Args:
        path: ``compat_matrix.yaml``, or its generated form, which ends with ``.json``.

    Raises:
        DataError: Neither YAML nor JSON, a value of the wrong kind (its path is named), a key that stands twice (its
            line is named), a fix without a cell for a release, an untested cell without a reason, a related link
            that does not say what it is about, or GPUs that ``hardware.check`` refuses.
    """
    try:
        if path.suffix == ".json":
            matrix = msgspec.json.decode(read_regular(path), type=Matrix)
        else:
            from msgspec import yaml

            content = read_regular(path)
            matrix = yaml.decode(content, type=Matrix)
            _refuse_doubled_keys(content, path)
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(str(error), context=str(path), hint="Correct the file at the path named.") from error
    for fix_id, fix in matrix.fixes.items():
        if set(fix.cells) != set(matrix.releases):
            odd = sorted(set(fix.cells) ^ set(matrix.releases), key=Version)
            raise DataError(
                f"{fix_id} has cells that don't match the releases: {', '.join(odd)}",
                context=str(path),
                hint="Give every fix exactly one cell for every release.",
            )
        for link in fix.links:
            if (link.kind == "related") != bool(link.about):
                raise DataError(
                    f"got kind: {link.kind} and about: {link.about!r}, expected what a related link is about",
                    context=f"{path}: {fix_id}, {link.url}",
                    hint="Say of a related link what it is about, and nothing of one about the same defect.",
                )
        for release, cell in fix.cells.items():
            if ("untested" in cell.tested) != bool(cell.reason) or ("untested" in cell.tested and len(cell.tested) > 1):
                raise DataError(
                    f"got tested: {', '.join(cell.tested)} and reason: {cell.reason!r}, expected a reason if untested",
                    context=f"{path}: {fix_id}, {release}",
                    hint="Say why an untested cell can't be tested, and nothing where it was.",
                )
    hardware.check(matrix.architectures, matrix.cuda, matrix.gpus, str(path))
    return matrix


def _refuse_doubled_keys(content: bytes, path: Path) -> None:
    """Refuse YAML, already decoded, with a key twice in one mapping: PyYAML takes the last one and says nothing.

    A key beside a merge (``<<``) that brings it, too, stands there once: it is meant to win.
    """
    import yaml

    root = yaml.compose(content, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    waiting, seen = [root], set()
    while waiting:
        node = waiting.pop()
        if id(node) in seen or not isinstance(node, yaml.CollectionNode):
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
            continue
        lines: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if key.value in lines:
                raise DataError(
                    f"got the key {key.value} twice in one mapping, first on line {lines[key.value]}, expected it once",
                    context=f"{path}:{line}",
                    hint="Take one of the two out.",
                )
            lines[key.value] = line
            waiting.append(value)
