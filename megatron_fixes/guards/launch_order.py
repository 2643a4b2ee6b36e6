# SPDX-License-Identifier: Apache-2.0
"""Whether the order of launches that tensor parallelism counts on holds, from facts alone. Pure: no torch, no CUDA.

In backward, ``tensor_parallel.layers`` issues its all-reduce (or the collectives of sequence parallelism) before the
weight gradient's kernels, and relies on ``CUDA_DEVICE_MAX_CONNECTIONS=1`` for the device to start them in that order.
Megatron says that this is needed for a speedup, not for correctness: results are ordered by ``handle.wait()``.

What Megatron asks for, 0.12 to 0.19: ``layers`` warns once where the variable is not 1, whatever the device.
``megatron.training.arguments`` (read in 0.17 to 0.19; earlier wheels have none) refuses tensor or context parallelism
without it below compute capability 10.0, except with FSDP or overlapped expert parallelism, where it warns: its comment
says that the requirement is gone since Blackwell. Forks of earlier releases hold the same condition without
parentheses, which asks for the variable on Blackwell too as soon as tensor parallelism is on. YAML arguments refuse
sequence parallelism without it on every device.

CUDA takes the variable as a *preferred* number of connections, when it starts: the driver may allocate another, and a
value that is set later changes nothing. Not known to us: what keeps the order on Blackwell and later; there nothing is
claimed but that Megatron does not ask for it.

Source: megatron/core/tensor_parallel/layers.py (``linear_with_grad_accumulation_and_async_allreduce``),
megatron/training/arguments.py and yaml_arguments.py of megatron-core 0.17.1, 0.18.2 and 0.19.2.
Source: https://docs.nvidia.com/deploy/topics/topic_5_2_4.html (a preferred number; the driver may differ).
Source: https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/925 (set in a running process it has no effect).
Source: https://github.com/NVIDIA/NeMo-Framework-Launcher/pull/451 (1 below compute capability 10, else 32).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

VARIABLE, WANTED = "CUDA_DEVICE_MAX_CONNECTIONS", "1"
BLACKWELL = (10, 0)

Verdict = Literal["kept", "not-kept", "set-too-late", "not-asked-for", "not-needed"]


@dataclass(frozen=True)
class LaunchFacts:
    """What the verdict depends on.

    Attributes:
        needs: ``all-reduce``, ``sequence parallelism``, or empty if the layer issues nothing in backward.
        capability: The device's compute capability.
        setting: What the variable says now; None: it is not set.
        cuda_was_started: Whether CUDA had started when we first looked.
        setting_then: What the variable said then.
    """

    needs: str
    capability: tuple[int, int]
    setting: str | None
    cuda_was_started: bool
    setting_then: str | None


def judge(facts: LaunchFacts) -> tuple[Verdict, str]:
    """The verdict, and one sentence that says why.

    ``kept`` is as far as the setting goes: a variable that was changed between our first look and CUDA's start is not
    noticed.
    """
    if not facts.needs:
        return "not-needed", "the layer issues no collective in backward"
    device = f"compute capability {facts.capability[0]}.{facts.capability[1]}"
    if facts.capability >= BLACKWELL:
        return "not-asked-for", (
            f"on {device} Megatron does not ask for {VARIABLE}=1; whether its {facts.needs} starts before the weight "
            "gradient is not known"
        )
    if facts.setting != WANTED:
        now = "is not set" if facts.setting is None else f"is {facts.setting}"
        return "not-kept", (
            f"{VARIABLE} {now}: on {device} its {facts.needs} may start after the weight gradient, and not overlap; "
            "results are the same"
        )
    if facts.cuda_was_started and facts.setting_then != WANTED:
        return "set-too-late", (
            f"{VARIABLE} was set to 1 after CUDA had started in this process, which changes nothing: on {device} its "
            f"{facts.needs} may start after the weight gradient, and not overlap; results are the same"
        )
    return "kept", f"{VARIABLE} is 1"
