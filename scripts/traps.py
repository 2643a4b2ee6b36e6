# SPDX-License-Identifier: Apache-2.0
"""The traps of docs/compatibility.md: a paragraph each, and what the guard says of a recorded machine that is in it.

The answers are not written here: ``megatron_fixes.machine`` judges the record anew each time the page is made.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from megatron_fixes.machine.facts import Machine
from megatron_fixes.machine.rules import judge

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatron_fixes.catalog.matrix import Matrix

RECORDS = Path(__file__).resolve().parent.parent / "tests" / "machine" / "data"


class Trap(NamedTuple):
    """One trap.

    Attributes:
        title: What it is.
        record: The recorded machine that is in it.
        about: What the shown answer begins with: the subject of a finding.
        text: Why it is one.
    """

    title: str
    record: str
    about: str
    text: str


TRAPS = (
    Trap(
        "8.9 is in no list of torch's wheels",
        "l4-runs-code-for-8.6",
        "NVIDIA L4",
        """
        `torch.cuda.get_arch_list()` of an official wheel has no `sm_89`, and an L4 runs all the same.
        Machine code runs on chips of the same major version whose minor version is that of the code or a
        later one, so the code for 8.6 is what it takes. A check for `sm_89` in that list turns away a GPU
        that works.
        """,
    ),
    Trap(
        "No code for the chip",
        "no-code-for-blackwell",
        "NVIDIA GeForce RTX 5090",
        """
        Machine code does not cross major versions. If the build of torch has neither machine code of the
        chip's major version nor PTX, every kernel fails with "no kernel image is available". This stops
        `apply`.
        """,
    ),
    Trap(
        "PTX alone",
        "ptx-alone",
        "NVIDIA",
        """
        A build that has only PTX for a chip works, and the driver compiles it at the first start, which
        takes minutes on every node without a cache. PTX of a newer CUDA version than the driver's is not
        compiled at all.
        """,
    ),
    Trap(
        "Driver older than the toolkit",
        "driver-older-than-toolkit",
        "driver",
        """
        Within a major version of CUDA this is fine: one driver, the least for that major version, runs
        machine code of all its toolkits. What does not work is PTX of the newer toolkit, and with it
        whatever compiles at run time.
        """,
    ),
    Trap(
        "Driver of an older major version",
        "driver-too-old",
        "driver",
        """
        This does not work, and stops `apply`, unless NVIDIA's cuda-compat package lies in front of the
        driver's own libcuda, which it supports on data-center GPUs only.
        """,
    ),
    Trap(
        "Versions with a local part",
        "build-of-nvidia",
        "torch",
        """
        `2.9.1+cu130` is the official wheel of 2.9.1. `2.6.0a0+ecf3bae40a.nv25.01` is what NVIDIA's
        containers have: by the rules of PEP 440 it comes before 2.6.0, and `torch>=2.6.0` refuses it,
        though it was cut from what became 2.6.0. It is read as 2.6.0, and said to be a build of its own.
        """,
    ),
    Trap(
        "A login node",
        "login-node",
        "GPU",
        """
        There is nothing to hold against the table where patches are often put in. That is said once, and
        stops nothing.
        """,
    ),
    Trap(
        "Several kinds of GPU in one node",
        "two-kinds",
        "Quadro P620",
        """
        A workstation has a small card for its display. Each kind is judged by itself; that torch has no
        code for one of them stops nothing as long as another can be used.
        """,
    ),
    Trap(
        "MIG",
        "mig",
        "MIG",
        """
        A GPU that is cut into instances shows up as one device of the same name. The table is about whole
        GPUs.
        """,
    ),
    Trap(
        "nvcc of another version than torch's CUDA",
        "nvcc-of-another-major",
        "nvcc",
        """
        The `nvcc` on PATH has no part in a training job: torch brings its own CUDA. It decides only whether
        extensions can be built, such as apex or TransformerEngine from source.
        """,
    ),
    Trap(
        "TransformerEngine that asks for a newer CUDA than torch's",
        "transformer-engine-newer-than-cuda",
        "TransformerEngine",
        """
        CUDA 11.8 makes code for Hopper, FP8 included, and torch runs there. TransformerEngine asks for more
        from 1.10 on. A job that does without it runs, so this stops nothing.
        """,
    ),
    Trap(
        "NCCL from before the chip",
        "nccl-older-than-blackwell",
        "NCCL",
        """
        Torch may be built against, or made to load, an older NCCL than that of its own wheel. With a chip that
        it does not know it may work for a while: in the report that the answer leads to, on 8 nodes but not on
        10. This stops nothing.
        """,
    ),
    Trap(
        "A container without NVML",
        "container-without-nvml",
        "driver",
        """
        NVML and `nvidia-smi` are absent from a container whose `NVIDIA_DRIVER_CAPABILITIES` lacks
        `utility`, and CUDA works there. The driver's files in `/proc` are left; they name the GPUs, and the
        table knows the chip of the names in it.
        """,
    ),
    Trap(
        "Driver replaced under a running node",
        "driver-updated-under-a-running-node",
        "GPU",
        """
        After an update of the driver's package the old kernel module is still loaded: NVML and CUDA refuse
        until the module is reloaded or the node rebooted. What could not be asked is said as unknown, in
        NVML's own words.
        """,
    ),
    Trap(
        "Torch without CUDA on a GPU node",
        "torch-without-cuda",
        "torch",
        """
        The tools may run in another environment than the job: a CPU build of torch beside a GPU is worth a
        word, and stops nothing.
        """,
    ),
)


def answers(trap: Trap, matrix: Matrix) -> list[str]:
    """What the guard says of the trap's machine, of what the trap is about."""
    machine = msgspec.json.decode((RECORDS / f"{trap.record}.json").read_bytes(), type=Machine)
    found = [finding for finding in judge(machine, matrix) if finding.subject.startswith(trap.about)]
    return [
        f"> {finding.verdict}{', stops `apply`' if finding.stops else ''}: {finding.line}"
        + (f" ([source]({finding.source}))" if finding.source else "")
        for finding in found
    ]


def paragraphs(matrix: Matrix) -> Iterator[str]:
    """The lines of the page's part."""
    for trap in TRAPS:
        yield f"### {trap.title}\n"
        text = " ".join(trap.text.split())
        yield f"{text} `megatron-fixes doctor` on [such a machine](../tests/machine/data/{trap.record}.json):\n"
        yield "  \n".join(answers(trap, matrix)) + "\n"
