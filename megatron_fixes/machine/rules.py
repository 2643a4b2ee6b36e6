# SPDX-License-Identifier: Apache-2.0
"""Holds a machine against the matrix: facts in, findings out, nothing read.

Training can't work, and ``apply`` is stopped, in two cases only: the driver is older than the oldest that runs what
torch was built with, or torch has no code that any GPU of the node runs. All else is said. Rules of their own have:

* Compute capability 8.9 is in no list of torch's wheels; it runs the code for 8.6 (``code``).
* A driver older than the toolkit is fine within a major version, but compiles no PTX of that toolkit.
* ``cuda-compat`` lets an older driver run a newer major version, on data-center GPUs.
* Where the compute capability could not be asked, the GPU's name tells it if the matrix has that name.
* A node with a second kind of GPU, such as one for a display, is judged kind by kind.
* A version, or an entry of torch's list, that can't be read decides nothing: what it would decide is unknown.
* ``2.6.0a0+ecf3bae40a.nv25.01`` is somebody's own build of what became 2.6.0, not older than it.
* TransformerEngine is held against torch's CUDA, NCCL against the GPU: where they don't fit a job may do without them.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from megatron_fixes.machine.code import all_readable, capability, code_for, named_capability
from megatron_fixes.machine.facts import Device
from megatron_fixes.machine.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_fixes.catalog.hardware import GpuCell
    from megatron_fixes.catalog.matrix import Matrix
    from megatron_fixes.machine.facts import Machine
    from megatron_fixes.machine.finding import Verdict

MINOR = "https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"
FORWARD = "https://docs.nvidia.com/deploy/cuda-compatibility/forward-compatibility.html"
CODE = "https://docs.nvidia.com/cuda/ada-compatibility-guide"
MIG = "https://docs.rapids.ai/deployment/stable/guides/mig"
CONTAINER = "https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/docker-specialized.html"
NVML = "https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceEnumvs.html"
EXTENSIONS = "https://github.com/pytorch/pytorch/blob/main/torch/utils/cpp_extension.py"
# As ``reading`` says it of a version.py that it could read.
_NO_CUDA = ("a build without CUDA", "a build for ROCm")
# A driver's version; builds of the open kernel modules append a word.
_DRIVER = re.compile(r"(\d+(?:\.\d+)*)(?:-[a-z]+)?")


def judge(machine: Machine, matrix: Matrix) -> tuple[Finding, ...]:
    """All there is to say, in the order in which a person would ask."""
    findings = [*_torch(machine, matrix)]
    if not machine.driver and not machine.devices:
        sentence = "no GPU here, so nothing to hold against the matrix; ask again on the node where the job runs"
        none = () if machine.refusal else (Finding("GPU", "note", sentence),)
        return (*_refusal(machine), *none, *findings, *_nvcc(machine))
    if machine.torch_cuda:
        findings = [*_driver(machine, matrix), *_gpus(machine, matrix), *findings]
    elif machine.torch and not machine.torch_cuda.missing.startswith(_NO_CUDA):
        sentence = f"which CUDA torch {machine.torch.value} was built with is not known: {machine.torch_cuda.missing}"
        findings = [Finding("torch", "unknown", sentence), *findings]
    elif machine.torch:
        sentence = f"got torch {machine.torch.value}, {machine.torch_cuda.missing}, expected one for CUDA on a GPU node"
        todo = "install a build of torch for CUDA, or run this with the interpreter of the job"
        findings = [Finding("torch", "unfit", sentence, todo=todo), *findings]
    else:
        sentence = (
            f"there is none to hold against the GPUs ({machine.torch.missing}); run this with the job's interpreter"
        )
        findings = [Finding("torch", "unknown", sentence)]
    findings += [*_engine(machine, matrix), *_nccl(machine, matrix)]
    return (*_refusal(machine), *findings, *_mig(machine), *_kinds(machine), *_container(machine), *_nvcc(machine))


def _parsed(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


def _major(cuda: str) -> str:
    return cuda.partition(".")[0]


def _driver_version(text: str) -> Version | None:
    found = _DRIVER.fullmatch(text)
    return Version(found[1]) if found else None


def _refusal(machine: Machine) -> Iterator[Finding]:
    """Something of the driver is there and does not answer: a lost GPU, a driver that hangs or was replaced."""
    if machine.refusal:
        todo = "read the kernel's log for Xid and NVRM; reset the GPU, reload the driver, or reboot the node"
        if "version mismatch" in machine.refusal:
            todo = "reload the driver or reboot the node: its files were replaced while it ran"
        yield Finding("GPU", "unknown", f"the driver refuses: {machine.refusal}", NVML, todo)


def _driver(machine: Machine, matrix: Matrix) -> Iterator[Finding]:
    """The driver against what torch was built with."""
    cuda, driver, offered = machine.torch_cuda.value, machine.driver.value, machine.driver_cuda.value
    got, offers, needs = _driver_version(driver), _parsed(offered), _parsed(cuda)
    columns = [column for name, column in matrix.cuda.items() if _major(name) == _major(cuda)]
    if not columns or not driver:
        why = f"the matrix has no driver for CUDA {cuda}" if not columns else f"not known: {machine.driver.missing}"
        yield Finding("driver", "unknown", why)
    elif got is None or needs is None or (offered and offers is None):
        what = f"driver {driver} that offers CUDA {offered or 'of no told version'}, and torch's CUDA {cuda}"
        yield Finding("driver", "unknown", f"got {what}: not all of these versions can be read")
    elif got >= Version(minimum := columns[-1].minimum_driver):
        if offers and offers < needs:
            sentence = (
                f"{driver} offers CUDA {offered}, older than torch's {cuda}: machine code runs (minor-version "
                f"compatibility, from {minimum} on), PTX of CUDA {cuda} is not compiled"
            )
            yield Finding("driver", "untested", sentence, MINOR)
        else:
            yield Finding("driver", "fits", f"got {driver}, expected at least {minimum} for CUDA {_major(cuda)}", MINOR)
    elif (offers and offers.major >= needs.major) or machine.forward_compatibility:
        where = machine.forward_compatibility.value or f"a newer libcuda that offers CUDA {offered}"
        sentence = (
            f"got {driver}, expected at least {minimum} for CUDA {_major(cuda)}; it may work through cuda-compat "
            f"({where}), on data-center GPUs only"
        )
        yield Finding("driver", "untested", sentence, FORWARD)
    else:
        sentence = f"got {driver}, expected at least {minimum}, as torch {machine.torch.value} is built for CUDA {cuda}"
        older = f"CUDA {_major(offered)}" if offered else "an older CUDA"
        todo = f"update the driver, install cuda-compat, or take a build of torch for {older}"
        yield Finding("driver", "unfit", sentence, MINOR, todo, stops=True)


def device_capability(device: Device, matrix: Matrix) -> tuple[int, int] | None:
    """As the driver told it, else by a GPU of the matrix that the device's name names as a word of its own."""
    if device.capability:
        return capability(device.capability)
    return named_capability(device.name, {name: row.gpus for name, row in matrix.architectures.items()})


def _gpus(machine: Machine, matrix: Matrix) -> Iterator[Finding]:
    """Each kind of GPU against torch's code, then against the matrix's cells."""
    if not machine.devices:
        yield Finding("GPU", "unknown", f"there is a driver, and no GPU that it names: {machine.gpus.missing}")
    kinds = Counter((device.name, device_capability(device, matrix)) for device in machine.devices)
    code = [_code(machine, name, kind) for name, kind in kinds]
    all_unfit = bool(code) and all(finding.verdict == "unfit" for finding in code)
    for (name, kind), finding in zip(kinds, code, strict=True):
        if finding.verdict == "unfit":
            todo = f"take a build of torch with code for {_architecture(kind)}"
            todo += "" if all_unfit else ", or keep the job off it with CUDA_VISIBLE_DEVICES"
            yield Finding(name, "unfit", finding.sentence, finding.source, todo, stops=all_unfit)
        else:
            yield finding
        if kind is not None:
            runs = finding.verdict in ("fits", "untested")
            yield from _cells(machine, matrix, name, _architecture(kind), runs=runs)


def _architecture(kind: tuple[int, int] | None) -> str:
    return "sm_{}{}".format(*kind) if kind else "it"


def _code(machine: Machine, name: str, kind: tuple[int, int] | None) -> Finding:
    if kind is None:
        return Finding(name, "unknown", f"its compute capability is not known: {machine.gpus.missing or 'not told'}")
    codes, is_ = machine.torch_code, _architecture(kind)
    if not codes:
        return Finding(name, "unknown", f"{is_}; what torch has code for is not known: {codes.missing}")
    code = code_for(codes.value, kind)
    if code is None and not all_readable(codes.value):
        return Finding(name, "unknown", f"{is_}; torch's list of code has entries that can't be read: {codes.value}")
    if code is None:
        return Finding(name, "unfit", f"got {is_}, expected something that torch has code for: {codes.value}", CODE)
    if not code.ptx:
        return Finding(name, "fits", f"{is_} runs torch's code for {code.name}", CODE)
    cuda, offered = machine.torch_cuda.value, machine.driver_cuda.value
    offers, needs = _parsed(offered), _parsed(cuda)
    if offers and needs and offers < needs:
        sentence = (
            f"got {is_}, for which torch has {code.name} alone, PTX of CUDA {cuda}; the driver compiles {offered}"
        )
        return Finding(name, "unfit", sentence, MINOR)
    sentence = f"{is_} has no machine code in torch; the driver compiles {code.name} at the first start, for minutes"
    return Finding(name, "untested", sentence, CODE)


def _cells(machine: Machine, matrix: Matrix, name: str, architecture: str, *, runs: bool) -> Iterator[Finding]:
    """What the matrix says of this GPU with torch's CUDA, precisions of one status together.

    A cell is about machine code for this very architecture: torch may run all the same, by what ``_code`` found.
    """
    cuda = machine.torch_cuda.value
    row = matrix.gpus.get(architecture)
    if row is None or cuda not in row:
        what = f"row for {architecture}" if row is None else f"column for CUDA {cuda}"
        yield Finding(name, "untested", f"the matrix has no {what}")
        return
    together: dict[tuple[Verdict, str, str], list[str]] = {}
    for precision, cell in row[cuda].items():
        verdict, sentence, source = _told(cell)
        whole = "; ".join([sentence, *_with_engine(machine, precision, cell)])
        together.setdefault((verdict, whole, source), []).append(precision)
    for (verdict, sentence, source), precisions in together.items():
        text = f"{', '.join(precisions)} with CUDA {cuda}: {sentence}"
        if verdict == "unfit" and (runs or precisions == ["fp8"]):
            # FP8 that can't be had leaves all else as it is.
            yield Finding(name, "note" if precisions == ["fp8"] else "untested", text, source)
        else:
            yield Finding(name, verdict, text, source)


def _told(cell: GpuCell) -> tuple[Verdict, str, str]:
    if cell.status == "ran":
        return "fits", f"ran on {cell.machine}, {cell.date}", cell.source
    if cell.status == "unsupported":
        return "unfit", f"can't be had, {cell.reason}", cell.source
    how = f"follows from {cell.rule}" if cell.status == "derived" else "compiles"
    return "untested", f"{how}, and was not run", cell.source


def _with_engine(machine: Machine, precision: str, cell: GpuCell) -> Iterator[str]:
    if cell.note:
        yield cell.note
    if precision == "fp8" and cell.works:
        engine = machine.transformer_engine
        yield f"TransformerEngine {engine.value}" if engine else f"needs TransformerEngine: {engine.missing}"


def _torch(machine: Machine, matrix: Matrix) -> Iterator[Finding]:
    """Torch against what the release of Megatron asks for, and against the official wheels."""
    version = _parsed(machine.torch.value)
    if version is None:
        if machine.torch:
            yield Finding("torch", "unknown", f"got {machine.torch.value}, which can't be read as a version")
        return
    release = matrix.releases.get(machine.megatron_core.value)
    asked = release.requires_torch if release else ""
    if asked and not SpecifierSet(asked).contains(version.base_version):
        sentence = f"got torch {machine.torch.value}, and {machine.megatron_core.value} asks for torch{asked}"
        yield Finding("megatron-core", "unfit", sentence, todo=f"install torch{asked}")
    column = matrix.cuda.get(machine.torch_cuda.value)
    minor = ".".join(map(str, version.release[:2]))
    if column is not None and (minor not in column.torch or version.is_prerelease):
        sentence = (
            f"{machine.torch.value} for CUDA {machine.torch_cuda.value} is no official wheel but a build of its own"
        )
        yield Finding("torch", "note", sentence, column.source[-1])


def _engine(machine: Machine, matrix: Matrix) -> Iterator[Finding]:
    """TransformerEngine against the CUDA version that torch was built with. A job without it runs all the same."""
    got, cuda = machine.transformer_engine.value, _parsed(machine.torch_cuda.value)
    if not got or cuda is None:
        return
    if (version := _parsed(got)) is None:
        yield Finding("TransformerEngine", "unknown", f"got {got}, which can't be read as a version")
        return
    for asked in matrix.transformer_engine:
        if not SpecifierSet(asked.versions).contains(version.base_version):
            continue
        if cuda >= Version(asked.cuda):
            sentence = f"got {got}, which asks for CUDA {asked.cuda} or later, and torch has {cuda}"
            yield Finding("TransformerEngine", "fits", sentence, asked.source)
        else:
            sentence = f"got {got} with torch for CUDA {cuda}, expected CUDA {asked.cuda} or later"
            todo = f"take a build of torch for CUDA {asked.cuda} or later, or train without TransformerEngine"
            yield Finding("TransformerEngine", "unfit", sentence, asked.source, todo)


def _nccl(machine: Machine, matrix: Matrix) -> Iterator[Finding]:
    """NCCL against the GPUs for which its maintainers name a least version. One GPU alone needs none."""
    got = _parsed(machine.nccl.value)
    kinds = {device_capability(device, matrix) for device in machine.devices} - {None}
    for name in sorted(_architecture(kind) for kind in kinds):
        row = matrix.architectures.get(name)
        if got and row and row.nccl and got < Version(row.nccl.least):
            sentence = f"got {got}, expected {row.nccl.least} or later for {name}"
            todo = f"install NCCL {row.nccl.least} or later"
            yield Finding("NCCL", "unfit", sentence, row.nccl.source, todo)


def _mig(machine: Machine) -> Iterator[Finding]:
    if cut := sum(bool(device.mig) for device in machine.devices):
        sentence = (
            f"{cut} of {len(machine.devices)} GPUs are cut into MIG instances: these have no CUDA IPC and no NVLink, "
            "so collectives between them go through host memory; the matrix is about whole GPUs"
        )
        yield Finding("MIG", "note", sentence, MIG)


def _kinds(machine: Machine) -> Iterator[Finding]:
    names = Counter(device.name for device in machine.devices)
    if len(names) > 1:
        kinds = ", ".join(f"{count} x {name}" for name, count in names.items())
        yield Finding("GPUs", "note", f"{len(names)} kinds in one node, each judged by itself: {kinds}")


def _container(machine: Machine) -> Iterator[Finding]:
    """The driver's files are there, and neither NVML nor ``nvidia-smi``: what that usually is."""
    if machine.driver and machine.driver.missing and not machine.refusal:
        sentence = (
            f"known from {machine.driver.source} alone ({machine.driver.missing}); if this is a container, "
            "NVIDIA_DRIVER_CAPABILITIES lacks utility"
        )
        yield Finding("driver", "note", sentence, CONTAINER)


def _nvcc(machine: Machine) -> Iterator[Finding]:
    nvcc, cuda = machine.nvcc.value, machine.torch_cuda.value
    if nvcc and cuda and nvcc != cuda:
        end = "refuses to" if _major(nvcc) != _major(cuda) else "warns when it has to"
        sentence = (
            f"{nvcc}, and torch was built with CUDA {cuda}: nothing to a job, but torch {end} build extensions with it "
            "(apex, TransformerEngine from source)"
        )
        yield Finding("nvcc", "note", sentence, EXTENSIONS)
