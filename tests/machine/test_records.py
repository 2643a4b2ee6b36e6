# SPDX-License-Identifier: Apache-2.0
"""Every recorded machine gets the right answer: its verdict, what stops, and the sentences that matter.

A record is what ``megatron-fixes doctor --json`` writes under ``machine.facts``; ``recorded`` says whether it was read
on such a machine or made up, and from what. What a record is named after is the trap in it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from megatron_fixes import catalog
from megatron_fixes.catalog.hardware import GpuCell
from megatron_fixes.machine.facts import Device, Machine, Reading
from megatron_fixes.machine.finding import Finding, worst
from megatron_fixes.machine.rules import device_capability, judge

DATA = Path(__file__).parent / "data"
MATRIX = catalog.load().matrix
PRECISIONS = ("bf16", "fp16", "fp8")
UNTESTED = dict.fromkeys(PRECISIONS, GpuCell("compiled"))
RAN = dict.fromkeys(PRECISIONS, GpuCell("ran", machine="a GPU", date="2026-11-30"))


class Answer(NamedTuple):
    """What is expected of one record.

    Attributes:
        verdict: Of the whole machine, where no cell of the matrix has run.
        says: Verdict and part of the line of a finding, for each that matters.
        stops: Subject of what stops ``apply``, if anything does.
    """

    verdict: str
    says: tuple[tuple[str, str], ...]
    stops: tuple[str, ...] = ()


MINIMUM_13 = MATRIX.cuda["13.0"].minimum_driver
MINIMUM_12 = MATRIX.cuda["12.8"].minimum_driver
ANSWERS = {
    "h200": Answer(
        "untested",
        (
            ("fits", f"driver: got 580.159.04, expected at least {MINIMUM_13} for CUDA 13"),
            ("fits", "NVIDIA H200: sm_90 runs torch's code for sm_90"),
            ("untested", "NVIDIA H200: bf16, fp16 with CUDA 13.0"),
        ),
    ),
    "l4-runs-code-for-8.6": Answer("untested", (("fits", "NVIDIA L4: sm_89 runs torch's code for sm_86"),)),
    "build-of-nvidia": Answer(
        "untested",
        (("note", "torch: 2.6.0a0+ecf3bae40a.nv25.01 for CUDA 12.8 is no official wheel"), ("untested", "1.14.0")),
    ),
    "wheel-with-local-version": Answer("untested", (("fits", "sm_80 runs torch's code for sm_80"),)),
    "older-torch-than-megatron-asks-for": Answer(
        "unfit", (("unfit", "megatron-core: got torch 2.5.1+cu124, and 0.16.1 asks for torch>=2.6.0"),)
    ),
    "login-node": Answer("note", (("note", "no GPU here, so nothing to hold against the matrix"),)),
    "container-without-gpu": Answer("note", (("note", "no GPU here, so nothing to hold against the matrix"),)),
    "driver-older-than-toolkit": Answer(
        "untested",
        (
            ("untested", f"machine code runs (minor-version compatibility, from {MINIMUM_12} on), PTX of CUDA 12.8"),
            ("fits", "sm_90 runs torch's code for sm_90"),
        ),
    ),
    "driver-too-old": Answer(
        "unfit",
        (("unfit", f"driver: got 535.183.01, expected at least {MINIMUM_13}, as torch 2.11.0+cu130 is built for"),),
        ("driver",),
    ),
    "driver-too-old-with-cuda-compat": Answer(
        "untested", (("untested", "it may work through cuda-compat (/usr/local/cuda/compat/lib)"),)
    ),
    "driver-updated-under-a-running-node": Answer("unknown", (("unknown", "Driver/library version mismatch"),)),
    "two-kinds": Answer(
        "unfit",
        (
            ("fits", "NVIDIA A100 80GB PCIe: sm_80 runs torch's code for sm_80"),
            ("unfit", "Quadro P620: got sm_61, expected something that torch has code for"),
            ("note", "2 kinds in one node, each judged by itself: 2 x NVIDIA A100 80GB PCIe, 1 x Quadro P620"),
        ),
    ),
    "no-code-for-volta": Answer(
        "unfit", (("unfit", "got sm_70, expected something that torch has code for"),), ("Tesla V100-SXM2-32GB",)
    ),
    "no-code-for-blackwell": Answer("unfit", (("unfit", "got sm_120, expected"),), ("NVIDIA GeForce RTX 5090",)),
    "ptx-alone": Answer("untested", (("untested", "the driver compiles compute_90 at the first start"),)),
    "ptx-newer-than-driver": Answer(
        "unfit",
        (("unfit", "torch has compute_80 alone, PTX of CUDA 12.8; the driver compiles 12.4"),),
        ("NVIDIA H100 80GB HBM3",),
    ),
    "mig": Answer("untested", (("note", "MIG: 1 of 2 GPUs are cut into MIG instances: these have no CUDA IPC"),)),
    "nvcc-of-another-major": Answer("untested", (("note", "torch refuses to build extensions with it"),)),
    "nvcc-of-another-minor": Answer("untested", (("note", "torch warns when it has to build extensions with it"),)),
    "container-without-nvml": Answer(
        "untested",
        (
            ("note", "if this is a container, NVIDIA_DRIVER_CAPABILITIES lacks utility"),
            ("fits", "NVIDIA L4: sm_89 runs torch's code for sm_86"),
            ("fits", "driver: got 580.95.05"),
        ),
    ),
    "container-without-nvml-unnamed-gpu": Answer("unknown", (("unknown", "its compute capability is not known"),)),
    "torch-without-cuda": Answer("unfit", (("unfit", "got torch 2.13.0+cpu, a build without CUDA"),)),
    "row-that-is-not-there": Answer(
        "untested", (("fits", "sm_103 runs torch's code for sm_100"), ("untested", "the matrix has no row for sm_103"))
    ),
    "column-that-is-not-there": Answer("untested", (("untested", "the matrix has no column for CUDA 12.9"),)),
    "transformer-engine-newer-than-cuda": Answer(
        "unfit",
        (
            ("unfit", "TransformerEngine: got 2.3.0 with torch for CUDA 11.8, expected CUDA 12.1 or later"),
            ("fits", "NVIDIA H200: sm_90 runs torch's code for sm_90"),
        ),
    ),
    "nccl-older-than-blackwell": Answer(
        "unfit",
        (("unfit", "NCCL: got 2.21.5, expected 2.25.1 or later for sm_100"), ("fits", "sm_100 runs torch's code")),
    ),
    "code-not-known": Answer("unknown", (("unknown", "what torch has code for is not known"),)),
}


def record(name: str) -> Machine:
    return msgspec.json.decode((DATA / f"{name}.json").read_bytes(), type=Machine)


def changed(name: str, **values: str) -> Machine:
    """A record with other values in some of its readings."""
    machine = record(name)
    return msgspec.structs.replace(
        machine,
        **{field: msgspec.structs.replace(getattr(machine, field), value=text) for field, text in values.items()},
    )


def matrix(cells: dict[str, GpuCell]) -> catalog.Matrix:
    """The matrix with the same cell wherever one may work, whatever has run by now."""
    columns = {
        architecture: {
            cuda: {p: cells[p] if cell.works else cell for p, cell in row.items()} for cuda, row in columns.items()
        }
        for architecture, columns in MATRIX.gpus.items()
    }
    return msgspec.structs.replace(MATRIX, gpus=columns)


def findings(name: str, cells: dict[str, GpuCell] = UNTESTED) -> tuple[Finding, ...]:
    return judge(record(name), matrix(cells))


@pytest.mark.parametrize("name", ANSWERS)
def test_a_recorded_machine_gets_the_right_answer(name: str) -> None:
    found, expected = findings(name), ANSWERS[name]
    assert worst(found) == expected.verdict
    assert tuple(dict.fromkeys(finding.subject for finding in found if finding.stops)) == expected.stops
    for verdict, text in expected.says:
        assert [f for f in found if f.verdict == verdict and text in f.line], f"{verdict}: {text}"


def test_every_record_has_an_answer_and_says_how_it_came_about() -> None:
    assert {path.stem for path in DATA.glob("*.json")} == set(ANSWERS)
    for name in ANSWERS:
        assert re.match(r"made up: |read by ", record(name).recorded), name


@pytest.mark.parametrize("name", ANSWERS)
def test_what_does_not_fit_says_what_was_got_and_what_to_do(name: str) -> None:
    for finding in findings(name):
        if finding.stops:
            assert finding.verdict == "unfit"
        if finding.stops or finding.subject in ("torch", "megatron-core", "driver", "TransformerEngine", "NCCL"):
            assert finding.verdict != "unfit" or (finding.todo and "got " in finding.sentence), finding.line
        assert finding.source == "" or finding.source.startswith("https://")


def test_a_machine_that_the_matrix_saw_run_fits() -> None:
    found = findings("h200", RAN)
    assert worst(found) == "fits"
    assert any("ran on a GPU, 2026-11-30" in finding.sentence for finding in found)
    really = judge(record("h200"), MATRIX)
    assert worst(really) == "fits"
    assert any("bf16, fp16 with CUDA 13.0: ran on two H200" in finding.sentence for finding in really)


def test_fp8_that_can_not_be_had_is_a_note_and_nothing_to_do() -> None:
    (fp8,) = [finding for finding in findings("wheel-with-local-version", RAN) if "fp8" in finding.sentence]
    assert (fp8.verdict, fp8.todo, worst(findings("wheel-with-local-version", RAN))) == ("note", "", "fits")


def test_fp8_names_transformer_engine_or_its_absence() -> None:
    without = next(f.sentence for f in findings("h200", RAN) if "fp8" in f.sentence)
    within = next(f.sentence for f in findings("build-of-nvidia", RAN) if "fp8" in f.sentence)
    assert "needs TransformerEngine: not installed" in without
    assert "TransformerEngine 1.14.0" in within


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("2.6.0a0+ecf3bae40a.nv25.01", True),
        ("2.6.0+cu124", True),
        ("2.5.1+cu124", False),
        ("2.5.0a0+b465a5843b.nv24.09", False),
        ("2.10.0.dev20251001+cu130", True),
    ],
)
def test_a_local_version_or_a_build_on_the_way_to_a_release_counts_as_it(version: str, fits: bool) -> None:
    machine = msgspec.structs.replace(changed("h200", torch=version), megatron_core=Reading("0.16.1", "given"))
    refused = [found for found in judge(machine, MATRIX) if found.subject == "megatron-core"]
    assert bool(refused) != fits


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("NVIDIA A100-SXM4-80GB", "sm_80"),
        ("GRID A100-7-40C", "sm_80"),
        ("NVIDIA A10", "sm_86"),
        ("NVIDIA L4", "sm_89"),
        ("NVIDIA H100 80GB HBM3", "sm_90"),
        ("NVIDIA B200", "sm_100"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "sm_120"),
        ("NVIDIA L40S", ""),
        ("NVIDIA A10G", ""),
        ("NVIDIA GB200", ""),
        ("NVIDIA GH200 480GB", ""),
    ],
)
def test_a_name_tells_the_architecture_only_where_the_matrix_has_that_very_name(name: str, architecture: str) -> None:
    found = device_capability(Device(name), MATRIX)
    assert ("sm_{}{}".format(*found) if found else "") == architecture


def test_what_the_driver_offers_by_a_newer_libcuda_is_not_refused() -> None:
    found = judge(changed("driver-too-old", driver_cuda="13.0"), MATRIX)
    assert not [finding for finding in found if finding.stops]
    assert any("a newer libcuda that offers CUDA 13.0" in finding.sentence for finding in found)


def test_a_rocm_build_is_told_as_such() -> None:
    machine = msgspec.structs.replace(record("torch-without-cuda"), torch_cuda=Reading(missing="a build for ROCm 6.2"))
    assert any("a build for ROCm 6.2" in finding.sentence for finding in judge(machine, MATRIX))


@pytest.mark.parametrize(("nvcc", "told"), [("13.0", 0), ("13.1", 1), ("12.8", 1), ("", 0)])
def test_an_nvcc_of_torchs_own_version_is_not_worth_a_word(nvcc: str, told: int) -> None:
    machine = msgspec.structs.replace(record("h200"), nvcc=Reading(nvcc, "/usr/local/cuda/bin/nvcc"))
    assert len([finding for finding in judge(machine, MATRIX) if finding.subject == "nvcc"]) == told


@pytest.mark.parametrize(
    ("version", "cuda", "verdict"),
    [
        ("0.9.0", "11.8", "fits"),
        ("1.9.0.post1", "11.8", "fits"),
        ("1.9.0", "11.7", "unfit"),
        ("1.10.0", "11.8", "unfit"),
        ("1.13.0", "12.0", "fits"),
        ("1.14.0+1f8fd2e", "11.8", "unfit"),
        ("2.0.0.dev0", "12.0", "unfit"),
        ("2.1.0", "12.1", "fits"),
        ("2.20.2", "13.0", "fits"),
        ("of mine", "11.8", "unknown"),
        ("2.1.0", "13.x", ""),
    ],
)
def test_transformer_engine_is_held_against_torchs_cuda_and_stops_nothing(
    version: str, cuda: str, verdict: str
) -> None:
    machine = msgspec.structs.replace(changed("h200", torch_cuda=cuda), transformer_engine=Reading(version, "metadata"))
    assert said(machine, "TransformerEngine") == ([(verdict, False)] if verdict else [])


@pytest.mark.parametrize(
    ("name", "version", "unfit"),
    [
        ("nccl-older-than-blackwell", "2.25.1", False),
        ("nccl-older-than-blackwell", "2.24.3", True),
        ("nccl-older-than-blackwell", "of mine", False),
        ("h200", "2.21.5", False),
    ],
)
def test_nccl_is_held_against_the_gpus_that_its_maintainers_name_a_least_version_for(
    name: str, version: str, unfit: bool
) -> None:
    assert said(changed(name, nccl=version), "NCCL") == ([("unfit", False)] if unfit else [])


def said(machine: Machine, subject: str) -> list[tuple[str, bool]]:
    return [(found.verdict, found.stops) for found in judge(machine, matrix(UNTESTED)) if found.subject == subject]


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ({"driver": "[N/A]"}, "unknown"),
        ({"driver": "580.x"}, "unknown"),
        ({"driver": "580.95.05-open"}, "fits"),
        ({"driver": "550.54.15-open"}, "unfit"),
        ({"driver": "580"}, "fits"),
        ({"driver_cuda": "[N/A]"}, "unknown"),
        ({"torch_cuda": "13.x"}, "unknown"),
    ],
)
def test_a_version_that_can_not_be_read_decides_nothing(values: dict[str, str], verdict: str) -> None:
    machine = changed("h200", **values)
    if verdict == "unfit":
        none = Reading(missing="none found")
        machine = msgspec.structs.replace(machine, driver_cuda=none, forward_compatibility=none)
    assert said(machine, "driver") == [(verdict, verdict == "unfit")]


def test_a_version_of_torch_that_can_not_be_read_is_unknown() -> None:
    assert said(changed("h200", torch="unknown"), "torch") == [("unknown", False)]


@pytest.mark.parametrize(("names", "known"), [("sm_xx foo", False), ("sm_75 sm_xx", False), ("sm_75 sm_80", True)])
def test_a_list_of_code_that_can_not_be_read_stops_nothing(names: str, known: bool) -> None:
    assert said(changed("h200", torch_code=names), "NVIDIA H200")[0] == (
        ("unfit", True) if known else ("unknown", False)
    )


@pytest.mark.parametrize(
    "why", ["torch/version.py can't be read: x", "torch/version.py does not tell its CUDA version"]
)
def test_a_torch_whose_cuda_is_not_known_is_not_one_without(why: str) -> None:
    machine = msgspec.structs.replace(record("h200"), torch_cuda=Reading(missing=why))
    assert said(machine, "torch") == [("unknown", False)]


@pytest.mark.parametrize("name", ["login-node", "h200", "container-without-nvml"])
def test_a_refusal_is_unknown_with_something_to_do(name: str) -> None:
    found = judge(msgspec.structs.replace(record(name), refusal="nvidia-smi: GPU is lost"), matrix(UNTESTED))
    (refusal,) = [finding for finding in found if "GPU is lost" in finding.sentence]
    assert (refusal.verdict, refusal.line) == ("unknown", "GPU: the driver refuses: nvidia-smi: GPU is lost")
    assert refusal.todo
    assert not any("no GPU here" in f.sentence or "if this is a container" in f.sentence for f in found)


def test_what_a_terminal_would_obey_is_shown_as_escapes() -> None:
    assert Finding("NVIDIA\x1b[31m\nH200", "note", "\x07\x9b é").line == "NVIDIA\\x1b[31m\\nH200: \\x07\\x9b é"
