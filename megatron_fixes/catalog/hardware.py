# SPDX-License-Identifier: Apache-2.0
"""GPU architecture x CUDA x precision, as ``compat_matrix.yaml`` states it, and what is checked of it on loading.

Every architecture has exactly one cell for every CUDA version and precision, and each cell says how it is known:

* ``ran``: the project's kernels ran there; machine and date are named, docs/records has the record.
* ``compiled``: NVRTC of that version made machine code of them (``make matrix``); nothing more was seen.
* ``derived``: follows from a rule of its source.
* ``unsupported``: can't work, with a reason and a source; ``make matrix`` sees the compiler refuse it.

Not stated here: whether Megatron, TransformerEngine or a wheel of torch makes use of what the toolkit and the chip
can do. A cell's ``note`` names the limits that are known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal, get_args

import msgspec
from packaging.version import Version

from megatron_fixes.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Precision = Literal["bf16", "fp16", "fp8"]
Status = Literal["ran", "compiled", "derived", "unsupported"]
Address = Annotated[str, msgspec.Meta(pattern=r"^https://\S+$")]
Requirement = Annotated[str, msgspec.Meta(pattern=r"^nvidia-cuda-[a-z0-9-]+==\d+(\.\d+)+$")]
Numbers = Annotated[str, msgspec.Meta(pattern=r"^\d+(\.\d+)*$")]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
FIELDS: dict[Status, tuple[str, ...]] = {
    "ran": ("machine", "date"),
    "compiled": (),
    "derived": ("rule", "source"),
    "unsupported": ("reason", "source"),
}


class Least(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The least version of something, and who says so."""

    least: Numbers
    source: Address


class Architecture(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A row: one compute capability, such as ``sm_90``, with GPUs that have it.

    Attributes:
        nccl: The NCCL that its maintainers support it from; None where they name none.
    """

    gpus: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    source: Address
    nccl: Least | None = None


class Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The least CUDA version that a range of versions of TransformerEngine asks for."""

    versions: Annotated[str, msgspec.Meta(pattern=r"^[<>]=?[\d.]+(,[<>]=?[\d.]+)*$")]
    cuda: Annotated[str, msgspec.Meta(pattern=r"^\d+\.\d+$")]
    source: Address


class Cuda(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A column: one CUDA version.

    Attributes:
        nvrtc: The exact requirement whose wheel holds its NVRTC.
        runtime: The one whose wheel holds its headers, such as ``cuda_bf16.h``.
        minimum_driver: The lowest Linux driver that runs what any toolkit of this major version has built.
        torch: Minor versions of torch that have official wheels for this CUDA version, in order.
        source: Where driver and wheels are written.
    """

    nvrtc: Requirement
    runtime: Requirement
    minimum_driver: Numbers
    torch: Annotated[tuple[Annotated[str, msgspec.Meta(pattern=r"^\d+\.\d+$")], ...], msgspec.Meta(min_length=1)]
    source: Annotated[tuple[Address, ...], msgspec.Meta(min_length=1)]

    def goes_with(self, requires_torch: str) -> tuple[str, ...]:
        """Minors of torch with wheels for this CUDA version that a specifier accepts: declared, not run."""
        # Here and not above: the overlay loads the matrix too, and never asks this.
        from packaging.specifiers import SpecifierSet

        accepted = SpecifierSet(requires_torch)
        return tuple(minor for minor in self.torch if accepted.contains(f"{minor}.0"))


class GpuCell(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What is known of one architecture, CUDA version and precision, and how; ``FIELDS`` says what a status needs.

    Attributes:
        note: What limits the use of a cell that works, with its own ``source``.
    """

    status: Status
    machine: str = ""
    date: Annotated[str, msgspec.Meta(pattern=r"^(\d{4}-\d\d-\d\d)?$")] = ""
    rule: str = ""
    reason: str = ""
    source: Annotated[str, msgspec.Meta(pattern=r"^(https://\S+)?$")] = ""
    note: str = ""

    @property
    def works(self) -> bool:
        """Whether machine code can be made for it."""
        return self.status != "unsupported"

    def problem(self) -> str:
        """What is wrong with the fields for this status, or nothing."""
        needed = {*FIELDS[self.status], *(("source",) if self.note else ())}
        given = {name for name in ("machine", "date", "rule", "reason", "source") if getattr(self, name)}
        if given == needed:
            return ""
        expected = ", ".join(sorted(needed)) or "nothing"
        return f"got {', '.join(sorted(given)) or 'nothing'} beside status {self.status}, expected {expected}"


Cells = dict[str, dict[str, dict[Precision, GpuCell]]]


def each_cell(gpus: Cells) -> Iterator[tuple[str, str, Precision, GpuCell]]:
    """Yield architecture, CUDA version, precision and cell, in the order of the file."""
    for architecture, columns in gpus.items():
        for cuda, cells in columns.items():
            for precision, cell in cells.items():
                yield architecture, cuda, precision, cell


def cell_for(gpus: Cells, capability: tuple[int, int], cuda: str, precision: Precision) -> GpuCell | None:
    """The cell of a device, by its compute capability and a CUDA version such as ``12.4``; None if there is none."""
    return gpus.get(f"sm_{capability[0]}{capability[1]}", {}).get(cuda, {}).get(precision)


def check(architectures: dict[str, Architecture], cuda: dict[str, Cuda], gpus: Cells, path: str) -> None:
    """Refuse a table with a hole, a row or column too many, or a cell whose fields don't fit its status.

    Raises:
        DataError: As said; the cell is named.
    """
    for what, found, expected in _keys(architectures, cuda, gpus):
        if list(found) != list(expected):
            raise DataError(
                f"got {', '.join(found) or 'nothing'}, expected {', '.join(expected)} in this order",
                context=f"{path}: {what}",
                hint="Give every architecture exactly one cell for every CUDA version and precision.",
            )
    if list(cuda) != sorted(cuda, key=Version):
        raise DataError("got CUDA versions out of order", context=f"{path}: cuda", hint="Sort them.")
    for architecture, version, precision, cell in each_cell(gpus):
        if problem := cell.problem():
            raise DataError(
                problem,
                context=f"{path}: gpus, {architecture}, {version}, {precision}",
                hint="Say how the cell is known, and nothing else.",
            )


def _keys(
    architectures: dict[str, Architecture], cuda: dict[str, Cuda], gpus: Cells
) -> Iterator[tuple[str, Iterable[str], tuple[str, ...]]]:
    yield "gpus", gpus, tuple(architectures)
    for architecture, columns in gpus.items():
        yield f"gpus, {architecture}", columns, tuple(cuda)
        for version, cells in columns.items():
            yield f"gpus, {architecture}, {version}", cells, PRECISIONS
