# SPDX-License-Identifier: Apache-2.0
"""``ci/compile_kernels`` fails where claim and outcome differ, in both directions; no compiler is run here."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_fixes.catalog.data import matrix_path
from megatron_fixes.catalog.hardware import GpuCell
from megatron_fixes.catalog.matrix import load_matrix
from megatron_fixes.errors import RefusedError
from tests.loading import load_program

PROGRAM = load_program("ci/compile_kernels")
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
    monkeypatch.setattr(PROGRAM, "wheels", lambda cuda, column: tmp_path)
    return PROGRAM


Compiler = Callable[[str, str], tuple[int, str]]


def as_claimed(architecture: str, precision: str) -> tuple[int, str]:
    works = MATRIX.gpus[architecture]["12.4"][precision].works  # type: ignore[index]
    return (3000, "") if works else (0, NO_FEATURE)


def one_wrong(architecture: str, precision: str) -> tuple[int, str]:
    return (3000, "") if (architecture, precision) == ("sm_80", "fp8") else as_claimed(architecture, precision)


@pytest.fixture
def run(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the column of CUDA 12.4 with a compiler that answers as told."""

    def run(record: Path, compiler: Compiler = as_claimed, version: str = "12.4") -> int:
        def answer(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            lines = []
            for architecture in command[4].split(","):
                for precision in command[5].split(","):
                    size, said = compiler(architecture, precision)
                    outcome = {"architecture": architecture, "precision": precision, "cubin_bytes": size, "said": said}
                    lines.append(json.dumps({"nvrtc": version, **outcome}))
            return subprocess.CompletedProcess(command, 0, "\n".join(lines))

        monkeypatch.setattr(program.subprocess, "run", answer)
        code: int = program.main(["12.4", "--record", str(record)])
        return code

    return run


def test_all_cells_as_claimed_end_with_0_and_a_record(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "build" / "matrix.json"
    assert run(record) == 0
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
    run: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    where: tuple[str, str],
    answer: tuple[int, str],
    said: str,
) -> None:
    def compiler(architecture: str, precision: str) -> tuple[int, str]:
        return answer if (architecture, precision) == where else as_claimed(architecture, precision)

    assert run(tmp_path / "matrix.json", compiler) == 1
    out = capsys.readouterr().out
    assert "17 of 18 cells as claimed" in out
    assert f"FAILED: {said}" in out


def test_another_version_of_the_compiler_is_refused(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path / "matrix.json", version="12.6") == 2
    assert capsys.readouterr().err.startswith("error: got NVRTC 12.6, expected 12.4\n  where: ")
    assert not (tmp_path / "matrix.json").exists()


def full_disk(_: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_record_that_cannot_be_written_costs_neither_the_results_nor_the_old_record(
    run: Callable[..., int],
    program: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    record = tmp_path / "matrix.json"
    record.write_text("{}", "utf-8")
    monkeypatch.setattr(program.os, "fsync", full_disk)
    assert run(record, one_wrong) == 2
    out, err = capsys.readouterr()
    assert "sm_120" in out
    assert "FAILED: CUDA 12.4 sm_80 fp8" in out
    assert err.startswith(f"error: the record was not written: No space left on device\n  where: {record}\n  hint: ")
    assert {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()} == {"matrix.json": "{}"}


@pytest.mark.parametrize("place", ["file/matrix.json", "folder", "pipe"])
def test_only_a_file_or_nothing_gives_way_to_a_record(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    before = {path.name: path.stat().st_mode for path in tmp_path.iterdir()}
    assert run(tmp_path / place, one_wrong) == 2
    out, err = capsys.readouterr()
    assert "FAILED: CUDA 12.4 sm_80 fp8" in out
    assert err.startswith("error: the record was not written: ")
    assert {path.name: path.stat().st_mode for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("old", ['{"sources"', "", "[1]", b"\xff", {"cuda": {"new": {}}}, {"cuda": []}, {}])
def test_an_old_record_that_cannot_be_read_is_said_and_replaced(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str], old: Any
) -> None:
    record = tmp_path / "matrix.json"
    text = json.dumps({"sources": CLAIMS.digests(), **old}) if isinstance(old, dict) else old
    record.write_bytes(text.encode() if isinstance(text, str) else text)
    assert run(record) == 0
    assert f"{record} was no record (" in capsys.readouterr().out
    assert list(json.loads(record.read_text("utf-8"))["cuda"]) == ["12.4"]


def test_a_column_that_fails_costs_none_of_those_before_it(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def compiled(matrix: Any, cuda: str, folder: Path) -> dict[str, Any]:
        if cuda == "12.4":
            raise RefusedError("no compiler")
        cell = CLAIMS.judged(NOT, {"precision": "fp8", "cubin_bytes": 3000, "said": ""})
        return {"cells": {architecture: {"fp8": cell} for architecture in matrix.architectures}}

    monkeypatch.setattr(program, "compiled", compiled)
    record = tmp_path / "matrix.json"
    assert program.main(["12.1", "12.4", "--record", str(record)]) == 2
    out, err = capsys.readouterr()
    assert "FAILED: CUDA 12.1 sm_80 fp8" in out
    assert err == "error: no compiler\n"
    assert list(json.loads(record.read_text("utf-8"))["cuda"]) == ["12.1"]


def test_what_the_compiler_says_last_is_told_with_the_folder(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["12.4", "--record", str(tmp_path / "matrix.json")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: NVRTC of CUDA 12.4 ended with exit code 1: FileNotFoundError: got 0 libnvrtc")
    assert f"\n  where: {tmp_path}\n  hint: Delete that folder" in err
    assert "Traceback" not in err


def test_a_broken_matrix_is_told_in_one_error(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "matrix.yaml"
    path.write_text(matrix_path().read_text("utf-8").replace("  sm_86: {gpus", "  sm_80: {gpus"), "utf-8")
    monkeypatch.setattr(program, "matrix_path", lambda: path)
    assert program.main([]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: got the key sm_80 twice in one mapping")
    assert f"\n  where: {path}:" in said.err
    assert said.out == ""


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """A pip that unpacks two small wheels; the folders that it was called for."""
    folders: list[Path] = []

    def fetch(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--target") + 1])
        folders.append(folder)
        for requirement, name in zip(command[-2:], ("lib/libnvrtc.so.12", "include/cuda_bf16.h"), strict=True):
            wheel, _, version = requirement.partition("==")
            info = folder / f"{wheel.replace('-', '_')}-{version}.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Name: {wheel}\nVersion: {version}\n", "utf-8")
            (info / "RECORD").write_text(f"nvidia/cuda/{name},,\n{info.name}/METADATA,,\n", "utf-8")
            (folder / "nvidia/cuda" / name).parent.mkdir(parents=True)
            (folder / "nvidia/cuda" / name).touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(PROGRAM, "ROOT", tmp_path)
    monkeypatch.setattr(PROGRAM.subprocess, "run", fetch)
    return folders


@pytest.mark.parametrize("lost", ["nvidia", "nvidia/cuda/include/cuda_bf16.h", "nvidia_cuda_runtime_cu12-*", "*"])
def test_wheels_are_fetched_once_and_again_where_a_part_of_them_is_lost(pip: list[Path], lost: str) -> None:
    for _ in range(2):
        folder = PROGRAM.wheels("12.4", MATRIX.cuda["12.4"])
    assert pip == [folder]
    for path in folder.glob(lost):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for _ in range(2):
        PROGRAM.wheels("12.4", MATRIX.cuda["12.4"])
    assert pip == [folder, folder]


def test_wheels_of_another_version_take_the_place_of_the_old(pip: list[Path]) -> None:
    PROGRAM.wheels("12.4", MATRIX.cuda["12.1"])
    folder = PROGRAM.wheels("12.4", MATRIX.cuda["12.4"])
    assert PROGRAM.wheels("12.4", MATRIX.cuda["12.4"]) == folder
    assert pip == [folder, folder]


def test_a_fetch_that_the_disk_refuses_is_one_error(pip: list[Path], tmp_path: Path) -> None:
    (tmp_path / ".venv").touch()
    with pytest.raises(RefusedError, match="could not fetch nvidia-cuda-nvrtc-cu12"):
        PROGRAM.wheels("12.4", MATRIX.cuda["12.4"])


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
