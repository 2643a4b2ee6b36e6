# SPDX-License-Identifier: Apache-2.0
"""``ci/compile_kernels`` fails where claim and outcome differ, in both directions; no compiler is run here."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_fixes.catalog.data import matrix_path
from megatron_fixes.catalog.hardware import GpuCell
from megatron_fixes.catalog.matrix import load_matrix
from tests.loading import ROOT, load_program

CLAIMS = load_program("ci/kernels/claims.py")
NVRTC = load_program("ci/kernels/nvrtc.py")
MATRIX = load_matrix(matrix_path())
WORKS = GpuCell(status="compiled")
NOT = GpuCell(status="unsupported", reason="no", source="https://example.org")
NO_TARGET = "nvrtc: error: invalid value for --gpu-architecture (-arch)"
NO_FEATURE = "ptxas application ptx input, line 44; error   : Feature 'cvt' requires .target sm_89 or higher"
NO_HEADER = 'default_program(8): catastrophic error: cannot open source file "cuda_bf16.h"'
NO_BUILTINS = "nvrtc: error: failed to open libnvrtc-builtins.so.13.0."


@pytest.mark.parametrize(
    ("cell", "cubin_bytes", "said", "outcome", "as_claimed"),
    [
        (WORKS, 3000, "", "compiled", True),
        (NOT, 0, NO_TARGET, "refused", True),
        (NOT, 0, NO_FEATURE, "refused", True),
        (NOT, 3000, "", "compiled", False),
        (WORKS, 0, NO_FEATURE, "refused", False),
        (NOT, 0, NO_HEADER, "broken", False),
        (NOT, 0, NO_BUILTINS, "broken", False),
        (WORKS, 0, NO_HEADER, "broken", False),
    ],
)
def test_a_cell_passes_only_if_the_compiler_says_what_it_claims(
    cell: GpuCell, cubin_bytes: int, said: str, outcome: str, as_claimed: bool
) -> None:
    judged = CLAIMS.judged(cell, {"precision": "fp8", "cubin_bytes": cubin_bytes, "said": said})
    assert (judged["outcome"], judged["as_claimed"]) == (outcome, as_claimed)
    assert judged["sources"] == ["ci/kernels/warp_sum.cu"]


def test_the_first_error_of_a_log_is_the_one_that_counts() -> None:
    assert NVRTC.first_error(f"a.cu(3): warning: unused\n{NO_HEADER}\n1 error detected\n") == NO_HEADER
    assert NVRTC.first_error("odd\nlog") == "odd"
    assert NVRTC.first_error("") == "no message"


def test_a_folder_without_the_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="got 0 libnvrtc"):
        NVRTC.Nvrtc(tmp_path)


def test_columns_of_other_runs_are_kept_while_the_sources_are_the_same() -> None:
    old = {"sources": {"a": "1"}, "cuda": {"11.8": {"date": "old"}, "12.4": {"date": "old"}}}
    new = {"sources": {"a": "1"}, "cuda": {"12.4": {"date": "new"}, "9.0": {"date": "new"}}}
    kept = CLAIMS.merged(old, new)
    assert {cuda: column["date"] for cuda, column in kept["cuda"].items()} == {
        "9.0": "new",
        "11.8": "old",
        "12.4": "new",
    }
    assert list(kept["cuda"]) == ["9.0", "11.8", "12.4"]
    assert CLAIMS.merged({**old, "sources": {"a": "2"}}, new) == new
    assert CLAIMS.merged(None, new) == new


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The program, with nothing to fetch."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    loader = SourceFileLoader("compile_kernels", str(ROOT / "ci" / "compile_kernels"))
    spec = importlib.util.spec_from_loader("compile_kernels", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    monkeypatch.setattr(module, "wheels", lambda cuda, column: tmp_path)
    return module


def as_claimed(cuda: str, architecture: str, precision: str) -> tuple[int, str]:
    works = MATRIX.gpus[architecture][cuda][precision].works  # type: ignore[index]
    return (3000, "") if works else (0, NO_FEATURE)


def run(
    program: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    record: Path,
    compiler: Callable[[str, str, str], tuple[int, str]],
    version: str = "12.4",
) -> int:
    """Run one column with a compiler that answers as told."""

    def answer(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        lines = []
        for architecture in command[4].split(","):
            for precision in command[5].split(","):
                size, said = compiler("12.4", architecture, precision)
                outcome = {"architecture": architecture, "precision": precision, "cubin_bytes": size, "said": said}
                lines.append(json.dumps({"nvrtc": version, **outcome}))
        return subprocess.CompletedProcess(command, 0, "\n".join(lines))

    monkeypatch.setattr(program.subprocess, "run", answer)
    code: int = program.main(["12.4", "--record", str(record)])
    return code


def test_all_cells_as_claimed_end_with_0_and_a_record(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "build" / "matrix.json"
    assert run(program, monkeypatch, record, as_claimed) == 0
    assert "18 of 18 cells as claimed" in capsys.readouterr().out
    written = json.loads(record.read_text("utf-8"))
    assert written["sources"] == CLAIMS.digests()
    assert written["cuda"]["12.4"]["cells"]["sm_89"]["fp8"]["cubin_bytes"] == 3000
    assert written["cuda"]["12.4"]["cells"]["sm_80"]["fp8"]["said"] == NO_FEATURE


@pytest.mark.parametrize(
    ("where", "answer", "said"),
    [
        (("sm_80", "fp8"), (3000, ""), "CUDA 12.4 sm_80 fp8: claimed unsupported, the compiler: machine code of 3000"),
        (("sm_89", "fp8"), (0, NO_FEATURE), "CUDA 12.4 sm_89 fp8: claimed compiled, the compiler: ptxas"),
        (
            ("sm_100", "bf16"),
            (0, NO_HEADER),
            "CUDA 12.4 sm_100 bf16: claimed unsupported, the compiler: default_program",
        ),
    ],
)
def test_one_cell_that_differs_ends_with_1_and_its_name(
    program: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    where: tuple[str, str],
    answer: tuple[int, str],
    said: str,
) -> None:
    def compiler(cuda: str, architecture: str, precision: str) -> tuple[int, str]:
        return answer if (architecture, precision) == where else as_claimed(cuda, architecture, precision)

    assert run(program, monkeypatch, tmp_path / "matrix.json", compiler) == 1
    out = capsys.readouterr().out
    assert "17 of 18 cells as claimed" in out
    assert f"FAILED: {said}" in out


def test_another_version_of_the_compiler_is_refused(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match=r"got NVRTC 12\.6, expected 12\.4"):
        run(program, monkeypatch, tmp_path / "matrix.json", as_claimed, version="12.6")


def test_an_unknown_version_is_a_mistake_of_the_user(program: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        program.main(["12.5"])
    assert caught.value.code == 2
    assert "expected some of 11.8" in capsys.readouterr().err


def test_the_sums_that_a_gpu_is_compared_with_are_exact_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "nvrtc", NVRTC)
    device = load_program("ci/kernels/device.py")
    for precision, dtype in device.DTYPES.items():
        rounded = device.inputs(1).to(dtype).float().view(device.WARPS, device.LANES)
        halved = rounded
        while halved.shape[1] > 1:
            halved = halved[:, : halved.shape[1] // 2] + halved[:, halved.shape[1] // 2 :]
        assert torch.equal(device.expected(1, dtype), halved[:, 0]), precision
        assert torch.equal(device.expected(1, dtype), rounded.double().sum(1).float()), precision
        assert not torch.equal(device.expected(1, dtype), device.inputs(1).view_as(rounded).sum(1)), precision
