# SPDX-License-Identifier: Apache-2.0
"""What the commands say of this machine: ``doctor`` all of it, ``apply`` what stops it and what does not fit.

``apply`` asks before anything is written. What stops it is what can't work on any reading (``machine.rules``);
``--force`` goes on, and says what it overrides. A node without a GPU stops nothing, as the job runs elsewhere.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from megatron_fixes.cli import output
from megatron_fixes.errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from megatron_fixes.catalog.matrix import Matrix
    from megatron_fixes.machine.facts import Machine, Reading
    from megatron_fixes.machine.finding import Finding
    from megatron_fixes.machine.packages import Package

_GIB = 1 << 30


def look(core: Package, matrix: Matrix, *, import_torch: bool) -> tuple[Machine, tuple[Finding, ...]]:
    """Read this machine and judge it, with the megatron-core that would be imported."""
    from megatron_fixes.machine import reading, rules
    from megatron_fixes.machine.facts import Reading

    found = Reading(core.version or "", core.note) if core.version else Reading(missing=core.note)
    machine = reading.read(found)
    if import_torch and machine.torch:
        machine = reading.ask_torch(machine)
    return machine, rules.judge(machine, matrix)


def before_apply(release: str | None, matrix: Matrix, again: str, *, force: bool, dry_run: bool) -> list[str]:
    """Hold this machine against the matrix before fixes are put in.

    Args:
        release: What the tree calls itself.
        matrix: The matrix.
        again: The command that overrides a refusal.
        force: Go on with what can't work.
        dry_run: Nothing will be written, so nothing is refused either.

    Returns:
        What does not fit and is gone on with, a sentence each.

    Raises:
        RefusedError: Training can't work on this machine.
    """
    from megatron_fixes.machine import reading, rules
    from megatron_fixes.machine.facts import Reading

    core = Reading(release, "the tree") if release else Reading(missing="the tree names no release")
    unfit = [f for f in rules.judge(reading.read(core, complete=False), matrix) if f.verdict == "unfit"]
    stops = [finding for finding in unfit if finding.stops]
    if stops and not force and not dry_run:
        todo = "; ".join(dict.fromkeys(finding.todo for finding in stops))
        raise RefusedError(
            "; ".join(finding.line for finding in stops),
            context="this machine (`megatron-fixes doctor` shows all of it)",
            hint=f"{todo[:1].upper()}{todo[1:]}; or, if the job runs elsewhere, repeat with: {again}",
        )
    said = "--force overrides" if force else "this machine stops apply, unless --force overrides it"
    return [f"{said}: {finding.line}" for finding in stops] + [
        f"this machine: {finding.line}" for finding in unfit if not finding.stops
    ]


def todo(findings: Sequence[Finding]) -> list[str]:
    """What needs doing about the machine, one sentence each."""
    return [f"{finding.line}: {finding.todo}" for finding in findings if finding.todo]


def to_json(machine: Machine, findings: Sequence[Finding]) -> dict[str, Any]:
    """As values that ``json`` writes; ``facts`` alone is a record of the machine."""
    import msgspec

    from megatron_fixes.machine.finding import worst

    return {
        "facts": msgspec.to_builtins(machine),
        "findings": [msgspec.to_builtins(finding) for finding in findings],
        "verdict": worst(findings),
    }


def show(machine: Machine, findings: Sequence[Finding], label_width: int) -> None:
    """Print facts and findings."""
    from megatron_fixes.machine.finding import printable

    for label, text in _facts(machine):
        output.fact(label, printable(text), label_width)
    for finding in findings:
        source = f"  ({finding.source})" if finding.source and finding.verdict == "unfit" else ""
        output.fact(finding.verdict, finding.line + source, label_width)


def _facts(machine: Machine) -> Iterator[tuple[str, str]]:
    offers = f", CUDA {machine.driver_cuda.value}" if machine.driver_cuda else ""
    yield "driver", _told(machine.driver, offers)
    for (name, capability, memory, mig), count in Counter(
        (device.name, device.capability, device.memory_bytes, device.mig) for device in machine.devices
    ).items():
        words = [f"{count} x {name}"]
        words += [f"compute capability {capability}"] if capability else []
        words += [f"{memory / _GIB:.1f} GiB"] if memory else []
        words += ["MIG"] if mig else []
        yield "GPU", f"{', '.join(words)}  ({machine.gpus.source})"
    if not machine.devices:
        same = machine.gpus.missing == machine.driver.missing
        yield "GPU", "none" if same else _told(machine.gpus)
    if machine.torch_cuda:
        yield "CUDA of torch", _told(machine.torch_cuda)
        yield "GPU code of torch", _told(machine.torch_code)
        yield "NCCL", _told(machine.nccl)
    yield "nvcc", _told(machine.nvcc)
    if machine.forward_compatibility:
        yield "cuda-compat", machine.forward_compatibility.value


def _told(reading: Reading, more: str = "") -> str:
    return f"{reading.value}{more}  ({reading.source})" if reading else f"none  ({reading.missing})"
