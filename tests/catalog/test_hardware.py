# SPDX-License-Identifier: Apache-2.0
"""GPU architecture x CUDA x precision: no hole, each cell says how it is known, and wrong tables are corrected."""

from __future__ import annotations

from email.parser import HeaderParser
from typing import TYPE_CHECKING

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron_fixes.catalog import hardware
from megatron_fixes.catalog.data import matrix_path
from megatron_fixes.catalog.hardware import GpuCell
from megatron_fixes.catalog.matrix import load_matrix
from megatron_fixes.errors import DataError
from megatron_fixes.proofs.releases import cached

if TYPE_CHECKING:
    from pathlib import Path

TEXT = matrix_path().read_text("utf-8")
MATRIX = load_matrix(matrix_path())
FIRST_CELLS = '    "11.8":\n      bf16: {status: compiled}\n      fp16: {status: compiled}\n'


def test_every_architecture_has_a_cell_for_every_cuda_version_and_precision() -> None:
    assert list(MATRIX.architectures) == ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
    assert list(MATRIX.cuda) == ["11.8", "12.1", "12.4", "12.6", "12.8", "13.0"]
    assert len(list(hardware.each_cell(MATRIX.gpus))) == 6 * 6 * 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("      fp16: {status: compiled}\n", "", "gpus, sm_80, 11.8: got bf16, fp8, expected bf16, fp16, fp8"),
        ("      fp16: {status: compiled}\n", "      tf32: {status: compiled}\n", "tf32"),
        ("  sm_120: {gpus", "  sm_121: {gpus", "sm_121"),
        ('  "12.1":\n    nvrtc', '  "12.2":\n    nvrtc', "12.2"),
        ("status: compiled", "status: tested", "status"),
        ("status: compiled", "status: ran, machine: two H200", "machine beside status ran, expected date, machine"),
        ("status: compiled", "status: ran, machine: two H200, date: today", "date"),
        ("status: compiled", "status: derived, rule: as sm_86", "rule beside status derived, expected rule, source"),
        ("status: compiled", "status: compiled, reason: so", "reason beside status compiled, expected nothing"),
        ("status: compiled", "status: compiled, note: slow", "got nothing beside status compiled, expected source"),
        ("        reason: Ampere has", "        rule: Ampere has", "rule, source beside status unsupported"),
        ("        source: https://nvidia", "        source: nvidia", "source"),
        ("nvrtc: nvidia-cuda-nvrtc-cu11==11.8.89", "nvrtc: nvidia-cuda-nvrtc-cu11", "nvrtc"),
        ('minimum_driver: "450.80.02"', 'minimum_driver: ">=450"', "minimum_driver"),
        ("gpus: [A100]", "gpus: []", "gpus"),
        ('least: "2.25.1"', 'least: ">=2.25"', "nccl"),
        ('versions: "<1.10"', "versions: old", "versions"),
        ('versions: "<1.10", cuda: "11.8"', 'versions: "<1.10", cuda: "11"', "cuda"),
        ('requires_torch: ""', 'requires_torch: "torch>=2"', "requires_torch"),
    ],
)
def test_a_broken_table_is_refused_with_the_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = TEXT.replace(
        'reason: "Ampere has no FP8 hardware, whatever the toolkit"', "reason: Ampere has no FP8 hardware"
    )
    assert old in text
    path = tmp_path / "matrix.yaml"
    path.write_text(text.replace(old, new, 1), "utf-8")
    with pytest.raises(DataError) as caught:
        load_matrix(path)
    assert message in str(caught.value)


def test_columns_out_of_order_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "matrix.yaml"
    path.write_text(TEXT.replace('"11.8":', '"12.9":'), "utf-8")
    with pytest.raises(DataError, match="out of order"):
        load_matrix(path)


@pytest.mark.parametrize(
    ("architecture", "cuda", "bf16", "fp8"),
    [
        ("sm_80", "11.8", True, False),
        ("sm_80", "12.1", True, False),
        ("sm_80", "12.4", True, False),
        ("sm_90", "11.8", True, True),
        ("sm_90", "12.1", True, True),
        ("sm_90", "12.4", True, True),
        ("sm_89", "11.8", True, False),
        ("sm_89", "12.1", True, True),
        ("sm_89", "12.4", True, True),
    ],
)
def test_the_nine_cells_of_a100_h100_and_l4_are_the_corrected_ones(
    architecture: str, cuda: str, bf16: bool, fp8: bool
) -> None:
    cells = MATRIX.gpus[architecture][cuda]
    assert (cells["bf16"].works, cells["fp16"].works, cells["fp8"].works) == (bf16, bf16, fp8)


def test_hopper_on_11_8_says_what_limits_fp8() -> None:
    assert "TransformerEngine 2 needs CUDA 12.1" in MATRIX.gpus["sm_90"]["11.8"]["fp8"].note


def test_every_version_of_transformer_engine_asks_for_one_least_cuda_version() -> None:
    for version in ("0.1.0", "1.9.0", "1.10", "1.14.1", "2.0", "3.0"):
        assert sum(SpecifierSet(asked.versions).contains(version) for asked in MATRIX.transformer_engine) == 1, version


def test_every_cuda_version_compiles_every_precision_somewhere_so_that_a_spoilt_source_is_no_refusal() -> None:
    for cuda in MATRIX.cuda:
        for precision in hardware.PRECISIONS:
            assert any(MATRIX.gpus[architecture][cuda][precision].works for architecture in MATRIX.architectures)


def test_blackwell_begins_with_12_8() -> None:
    for architecture in ("sm_100", "sm_120"):
        works = {cuda: all(cell.works for cell in cells.values()) for cuda, cells in MATRIX.gpus[architecture].items()}
        assert works == {"11.8": False, "12.1": False, "12.4": False, "12.6": False, "12.8": True, "13.0": True}


def test_a_device_finds_its_cell_by_compute_capability() -> None:
    assert hardware.cell_for(MATRIX.gpus, (9, 0), "13.0", "bf16") is MATRIX.gpus["sm_90"]["13.0"]["bf16"]
    assert hardware.cell_for(MATRIX.gpus, (12, 0), "12.8", "fp8") is MATRIX.gpus["sm_120"]["12.8"]["fp8"]
    assert hardware.cell_for(MATRIX.gpus, (7, 0), "12.8", "bf16") is None
    assert hardware.cell_for(MATRIX.gpus, (9, 0), "12.9", "bf16") is None


def test_wheels_of_torch_that_ended_leave_no_current_release_on_12_1() -> None:
    names = {cuda: MATRIX.releases_for(cuda) for cuda in MATRIX.cuda}
    assert names["12.1"] == (
        "0.12.0",
        "0.12.1",
        "0.12.2",
        "0.12.3",
        "0.13.0",
        "0.13.1",
        "0.14.0",
        "0.15.0",
        "0.15.1",
        "0.15.2",
    )
    assert names["11.8"] == names["13.0"] == tuple(MATRIX.releases)
    assert MATRIX.cuda["12.4"].goes_with(">=2.6.0") == ("2.6",)
    assert MATRIX.cuda["11.8"].goes_with(">=2.6.0") == ("2.6", "2.7")


@pytest.mark.parametrize("release", MATRIX.releases)
def test_requires_torch_is_what_the_release_declares(release: str) -> None:
    tree = cached(release)
    if tree is None:
        pytest.skip(f"{release} is not in the cache")
    (metadata,) = tree.glob("megatron_core-*.dist-info/METADATA")
    required = map(Requirement, HeaderParser().parsestr(metadata.read_text("utf-8")).get_all("Requires-Dist", []))
    torch = {str(one.specifier) for one in required if one.name == "torch" and one.marker is None}
    assert torch <= {MATRIX.releases[release].requires_torch}
    assert torch or not MATRIX.releases[release].requires_torch
    assert SpecifierSet(MATRIX.releases[release].requires_torch).contains(MATRIX.releases[release].torch)


def test_a_status_that_works_is_one_that_is_not_unsupported() -> None:
    assert GpuCell(status="derived", rule="as sm_86", source="https://example.org").works
    assert not GpuCell(status="unsupported", reason="no", source="https://example.org").works
