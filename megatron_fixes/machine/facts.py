# SPDX-License-Identifier: Apache-2.0
"""A machine as data: what ``reading`` saw of it, or what somebody sent as ``megatron-fixes doctor --json``.

Every reading says where it comes from, or why there is none, so that "not installed" and "could not be asked" stay
apart. Versions are texts as their owners write them (``2.6.0a0+ecf3bae40a.nv25.01``); ``rules`` makes sense of them.
"""

from __future__ import annotations

import msgspec


class Reading(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One value with where it was read, or the reason why there is none."""

    value: str = ""
    source: str = ""
    missing: str = ""

    def __bool__(self) -> bool:
        return bool(self.value)


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One GPU.

    Attributes:
        name: As the driver calls it.
        capability: Compute capability such as ``8.9``; empty if it could not be asked.
        memory_bytes: All of it; 0 if it could not be asked.
        mig: Whether it is cut into MIG instances; None if it can't be, or could not be asked.
    """

    name: str
    capability: str = ""
    memory_bytes: int = 0
    mig: bool | None = None


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """One machine, with the software that a job of this interpreter would get.

    Attributes:
        recorded: How these facts came about, for records: read there, or made up from which page.
        driver: Version of the kernel driver.
        refusal: What of the driver is there and did not answer (NVML, ``nvidia-smi``, some GPUs), and what it said;
            empty where all that is there answers, and where nothing is.
        driver_cuda: The newest CUDA version that the driver's own library offers.
        forward_compatibility: A ``libcuda`` of a newer driver that lies beside the driver's, from ``cuda-compat``.
        gpus: What told of ``devices``, or why there are none; the value is their number.
        devices: In the driver's order.
        nvcc: The toolkit's compiler on PATH.
        torch: Its version.
        torch_cuda: The CUDA version that torch was built with; missing for a build without CUDA.
        torch_code: What torch has code for, such as ``sm_80 sm_90 compute_90``.
        nccl: The NCCL that torch would load.
        megatron_core: The tree that is looked at, or the one that would be imported.
        transformer_engine: As installed.
        apex: As installed; the source says whether it is NVIDIA's.
    """

    recorded: str = ""
    driver: Reading = Reading()
    refusal: str = ""
    driver_cuda: Reading = Reading()
    forward_compatibility: Reading = Reading()
    gpus: Reading = Reading()
    devices: tuple[Device, ...] = ()
    nvcc: Reading = Reading()
    torch: Reading = Reading()
    torch_cuda: Reading = Reading()
    torch_code: Reading = Reading()
    nccl: Reading = Reading()
    megatron_core: Reading = Reading()
    transformer_engine: Reading = Reading()
    apex: Reading = Reading()
