# SPDX-License-Identifier: Apache-2.0
"""Runs the project's CUDA source on this machine's GPUs: one rank a GPU, started by ``torch.distributed.run``.

Each rank compiles with the NVRTC that torch brings, loads the machine code by the driver's API into torch's own
context, launches it on torch's current stream, and compares with the CPU's result to the last bit; then the results of
all ranks are added by NCCL and compared again. Rank 0 prints one JSON line a precision: ``same``, or ``differs`` with
the reason. What the compiler does not compile is ``refused``, with its message: whether that is a refusal of this GPU,
the caller tells. A rank that is not done after ``DEADLINE_S`` ends by its alarm, whatever it waits for. The machine's
settings are left alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nvrtc import Nvrtc

SOURCE = Path(__file__).with_name("warp_sum.cu")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
WARPS = 4096
LANES = 32
THREADS = 256
DEVICE = "cuda"
# From the imports on; it takes some 20 s. NCCL has no limit of its own for making a communicator.
DEADLINE_S = 120


class Kernel:
    """A loaded function of a cubin, in the context that is current. Kept until the process ends."""

    def __init__(self, cubin: bytes, name: str) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), cubin)
        self._call("cuModuleGetFunction", ctypes.byref(self._function), module, name.encode())

    def launch(self, values: torch.Tensor, sums: torch.Tensor) -> None:
        """Launch on the current stream.

        Args:
            values: float32 [n], contiguous, on the current device, read; n is a multiple of 32.
            sums: float32 [n / 32], contiguous, on the same device, written.
        """
        arguments = (
            ctypes.c_void_p(values.data_ptr()),
            ctypes.c_void_p(sums.data_ptr()),
            ctypes.c_int(values.numel()),
        )
        pointers = (ctypes.c_void_p * 3)(*(ctypes.addressof(argument) for argument in arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        blocks = -(-values.numel() // THREADS)
        self._call("cuLaunchKernel", self._function, blocks, 1, 1, THREADS, 1, 1, 0, stream, pointers, None)

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._driver, name)(*arguments):
            raise RuntimeError(f"{name} returned {code}")


def inputs(rank: int) -> torch.Tensor:
    """The input of one rank, float32 [WARPS * 32] on the CPU, in [1, 2): sums are exact in any order."""
    return torch.rand(WARPS * LANES, generator=torch.Generator().manual_seed(rank)) + 1


def expected(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """What the kernel must give for the input of a rank, float32 [WARPS] on the CPU."""
    return inputs(rank).to(dtype).float().view(WARPS, LANES).sum(1)


def outcome(nvrtc: Nvrtc, architecture: str, precision: str, rank: int, ranks: int) -> dict[str, str]:
    """Compile, run, compare, reduce, compare. Every rank comes to the reduction, whatever it has seen."""
    compiled = nvrtc.compile(SOURCE, architecture, f"PRECISION_{precision.upper()}")
    sums = torch.full((WARPS,), float("nan"), device=DEVICE)
    if compiled.cubin:
        Kernel(compiled.cubin, "warp_sum").launch(inputs(rank).to(DEVICE), sums)
    alone = torch.equal(sums.cpu(), expected(rank, DTYPES[precision]))
    dist.all_reduce(sums)
    if not compiled.cubin:
        return {"outcome": "refused", "said": compiled.said}
    total = torch.stack([expected(other, DTYPES[precision]) for other in range(ranks)]).sum(0)
    if not alone:
        return {"outcome": "differs", "said": f"rank {rank}'s sums are not the CPU's"}
    if not torch.equal(sums.cpu(), total):
        return {"outcome": "differs", "said": f"the reduced sums on rank {rank} are not the CPU's"}
    return {"outcome": "same", "said": ""}


def main() -> None:
    """Run every precision and print what was seen."""
    signal.alarm(DEADLINE_S)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.zeros(1, device=DEVICE)  # torch's context is current from here on
    dist.init_process_group("nccl")
    major = str(torch.version.cuda).partition(".")[0]
    nvrtc = Nvrtc(Path(torch.__file__).parents[1], os.environ.get("CUDA_HOME", "/usr/local/cuda"), major)
    architecture = "sm_{}{}".format(*torch.cuda.get_device_capability())
    for precision in DTYPES:
        seen: list[Any] = [None] * ranks
        dist.all_gather_object(seen, outcome(nvrtc, architecture, precision, rank, ranks))
        if rank == 0:
            worst = next((one for one in seen if one["outcome"] != "same"), seen[0])
            cell = {"architecture": architecture, "cuda": nvrtc.version, "precision": precision, "ranks": ranks}
            print(json.dumps({**cell, **worst}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
