# SPDX-License-Identifier: Apache-2.0
"""``ci/gpu_smoke`` and what it runs on GPUs pass nothing that is wrong, wait for nothing without an end, lose nothing.

No GPU here: a library with the prototypes of cuda.h stands for the driver, and functions for the kernel and for ranks.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.loading import ROOT, load_program

torch = pytest.importorskip("torch")

KERNELS = ROOT / "ci" / "kernels"
REFUSED = "ptxas application ptx input, line 44; error   : Feature 'cvt' requires .target sm_89 or higher"
NO_HEADER = 'default_program(8): catastrophic error: cannot open source file "cuda_bf16.h"'
# Addresses that do not fit 32 bits: a pointer that is cut short is not what comes back.
DRIVER = """
#include <string.h>
typedef struct module *CUmodule;
typedef struct function *CUfunction;
typedef struct stream *CUstream;
#define MODULE (CUmodule)0x7123456789abcde0
#define FUNCTION (CUfunction)0x7fedcba987654320
int cuModuleLoadData(CUmodule *module, const void *image) {
  *module = MODULE;
  return memcmp(image, "cubin\\0more", 10) ? 200 : 0;
}
int cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = FUNCTION;
  return module != MODULE ? 400 : strcmp(name, "warp_sum") ? 500 : 0;
}
int cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream stream, void **params,
                   void **extra) {
  if (function != FUNCTION || stream != (CUstream)0x7000000000000010 || extra || shared_bytes) return 400;
  if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || block_x % 32) return 1;
  const float *in = *(const float **)params[0];
  float *out = *(float **)params[1];
  int n = *(int *)params[2];
  for (unsigned index = 0; index < grid_x * block_x && index < (unsigned)n; index++)
    out[index / 32] = in[index] + (index % 32 ? out[index / 32] : 0);
  return 0;
}
"""
LAUNCH = """
import sys, types, torch, device
torch.cuda.current_stream = lambda: types.SimpleNamespace(cuda_stream=0x7000000000000010)
values, sums = torch.arange(32.0 * 300), torch.full((300,), float("nan"))
device.Kernel(b"cubin\\0more", "warp_sum").launch(values, sums)
print(torch.equal(sums, values.view(300, 32).sum(1)))
try:
    device.Kernel(b"cubin\\0more", "other")
except RuntimeError as error:
    print(error)
"""
HANG = """
import time, torch, device
device.DEADLINE_S = 1
torch.cuda.set_device = lambda _: time.sleep(60)
device.main()
"""


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(KERNELS), **variables}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=50)


def test_the_driver_gets_what_its_header_declares(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "driver.c").write_text(DRIVER)
    library = str(tmp_path / "libcuda.so.1")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, str(tmp_path / "driver.c")], check=True, timeout=50)
    done = run(LAUNCH, LD_LIBRARY_PATH=str(tmp_path))
    assert done.stdout == "True\ncuModuleGetFunction returned 500\n", done.stderr


def test_a_rank_that_waits_without_an_end_is_ended() -> None:
    assert run(HANG, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0").returncode == -signal.SIGALRM


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program that ranks run, on the CPU."""
    module = load_program("ci/kernels/device.py")
    monkeypatch.setattr(module, "DEVICE", "cpu")
    return module


def seen(
    device: ModuleType, monkeypatch: pytest.MonkeyPatch, launch: Callable[[Any, Any], object], reduce: Any, cubin: bytes
) -> str:
    """The outcome of rank 0 of two, with a kernel, a reduction and a compiler that are given."""
    monkeypatch.setattr(device, "Kernel", lambda *_: SimpleNamespace(launch=launch))
    monkeypatch.setattr(device.dist, "all_reduce", reduce)
    nvrtc = SimpleNamespace(compile=lambda *_: SimpleNamespace(cubin=cubin, said=REFUSED))
    found: dict[str, str] = device.outcome(nvrtc, "sm_90", "bf16", 0, 2)
    return f"{found['outcome']}: {found['said']}".removesuffix(": ")


def test_only_the_cpus_sums_and_their_total_are_the_same(device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def right(values: Any, sums: Any) -> None:
        sums.copy_(values.bfloat16().float().view(-1, 32).sum(1))

    def unrounded(values: Any, sums: Any) -> None:
        sums.copy_(values.view(-1, 32).sum(1))

    def one_off(values: Any, sums: Any) -> None:
        right(values, sums)
        sums[-1] += 2**-7

    def added(sums: Any) -> None:
        sums += device.expected(1, torch.bfloat16)

    def outcome(launch: Any, reduce: Any = added, cubin: bytes = b"cubin") -> str:
        return seen(device, monkeypatch, launch, reduce, cubin)

    assert outcome(right) == "same"
    for wrong in (unrounded, one_off, lambda _, sums: sums.zero_(), lambda _, sums: None):
        assert outcome(wrong) == "differs: rank 0's sums are not the CPU's"
    for wrong in (lambda sums: None, lambda sums: sums.zero_(), lambda sums: sums.mul_(2)):
        assert outcome(right, wrong) == "differs: the reduced sums on rank 0 are not the CPU's"
    came: list[object] = []
    assert outcome(right, came.append, b"") == f"refused: {REFUSED}"
    assert came, "its peers wait for a rank that does not reduce"


@pytest.fixture
def smoke(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """``ci/gpu_smoke`` on a machine with two GPUs."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    loader = SourceFileLoader("gpu_smoke", str(ROOT / "ci" / "gpu_smoke"))
    spec = importlib.util.spec_from_loader("gpu_smoke", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    monkeypatch.setattr(module, "machine", lambda: {"devices": ["NVIDIA H200"] * 2})
    return module


def cell(precision: str, outcome: str = "same", said: str = "", architecture: str = "sm_90") -> dict[str, Any]:
    where = {"architecture": architecture, "cuda": "13.0", "precision": precision, "ranks": 2}
    return {**where, "outcome": outcome, "said": said}


ALL = [cell("bf16"), cell("fp16"), cell("fp8")]
NO_FP8 = [cell("bf16", architecture="sm_80"), cell("fp16", architecture="sm_80")]


@pytest.mark.parametrize(
    ("cells", "code", "outcomes", "failures"),
    [
        (ALL, 0, "same same same", 0),
        ([*ALL[:2], cell("fp8", "differs", "rank 1's sums")], 0, "same same differs", 1),
        ([*ALL[:2], cell("fp8", "refused", REFUSED)], 0, "same same refused", 1),
        ([*NO_FP8, cell("fp8", "refused", REFUSED, "sm_80")], 0, "same same refused", 0),
        ([*NO_FP8, cell("fp8", "refused", NO_HEADER, "sm_80")], 0, "same same broken", 1),
        ([*NO_FP8, cell("fp8", "same", "", "sm_80")], 0, "same same same", 1),
        (ALL[:1], 1, "same", 1),
        ([], 0, "", 1),
    ],
)
def test_what_ranks_saw_is_held_against_the_table(
    smoke: ModuleType, monkeypatch: pytest.MonkeyPatch, cells: list[Any], code: int, outcomes: str, failures: int
) -> None:
    said = "".join(f"{json.dumps(one)}\n" for one in cells)
    done = subprocess.CompletedProcess([], code, stdout=f"NCCL version 2.28.9\n{said}")
    monkeypatch.setattr(smoke.subprocess, "run", lambda *_, **__: done)
    record, failed = smoke.kernels()
    assert (" ".join(one["outcome"] for one in record["cells"]), failed) == (outcomes, failures)
    assert record["sources"] == smoke.claims.digests()


def test_a_record_that_can_not_be_written_is_told_before_anything_runs(
    smoke: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(smoke, "kernels", lambda: pytest.fail("it ran"))
    assert smoke.main([str(tmp_path / "not there" / "record.json"), "--only-kernels"]) == 2


def test_a_release_without_a_report_takes_no_other_with_it(
    smoke: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def prove(release: str, fix_ids: list[str], _: str) -> tuple[dict[str, Any], int]:
        if release == "0.14.0":
            return {"error": {"message": "no space left"}}, 1
        evidence = {"case": {"ranks": 2, "summary": "clean"}}
        return {"release": release, "results": [{"id": fix_id, "evidence": evidence} for fix_id in fix_ids]}, 0

    monkeypatch.setattr(smoke, "cells", lambda *_: {"0.14.0": ["MF0001"], "0.16.1": ["MF0003"]})
    monkeypatch.setattr(smoke, "kernels", lambda: ({}, 0))
    monkeypatch.setattr(smoke, "prove", prove)
    monkeypatch.setattr(smoke, "fetch", lambda *_: tmp_path)
    job = {"outcome": "clean", "summary": "", "in_force": [["MF0003"]] * 2}
    monkeypatch.setattr(smoke, "torchrun", lambda *_: job)
    assert smoke.main([str(tmp_path / "record.json")]) == 1
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["torchrun"] == [{"release": "0.16.1", "variant": "overlay", **job}]
