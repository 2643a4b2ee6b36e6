# SPDX-License-Identifier: Apache-2.0
"""What is read of a machine is what its driver, its programs and its files say, with the source; nothing is imported.

NVML is asked through a library that answers as NVIDIA's does, by its C interface; here it is otherwise missing, as on
a login node. ``nvidia-smi`` and ``nvcc`` are programs on PATH with recorded output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from .conftest import Parts

MISSING = "libnvidia-ml.so.1: cannot open shared object file: No such file or directory"
ABSENT = "libnvidia-ml.so.1 is not here"
SMI = """case "$*" in
*compute_cap*) {query};;
*query-gpu*) {old};;
*) /bin/cat <<'END'
Mon Nov 30 14:00:00 2026
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 550.54.15              Driver Version: 550.54.15      CUDA Version: 12.4     |
|-----------------------------------------+------------------------+----------------------+
END
esac"""
H100 = "550.54.15, NVIDIA H100 80GB HBM3, 81559, Disabled, 9.0"
A100_MIG = "550.54.15, NVIDIA A100-SXM4-40GB, 40960, Enabled, 8.0"
L4 = "550.54.15, NVIDIA L4, 23034, [N/A], 8.9"
NVCC = """/bin/cat <<'END'
nvcc: NVIDIA (R) Cuda compiler driver
Copyright (c) 2005-2024 NVIDIA Corporation
Built on Thu_Mar_28_02:18:24_PDT_2024
Cuda compilation tools, release 12.4, V12.4.131
Build cuda_12.4.r12.4/compiler.34097967_0
END"""
WHEEL = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"
LIBRARY = """
#include <string.h>
typedef struct {{ unsigned long long total, free, used; }} memory;
int nvmlInit_v2(void) {{ return {init}; }}
int nvmlShutdown(void) {{ return 0; }}
const char *nvmlErrorString(int code) {{ return code == 18 ? "Driver/library version mismatch" : "Not Supported"; }}
int nvmlSystemGetDriverVersion(char *text, unsigned length) {{ strncpy(text, "580.159.04", length); return 0; }}
int nvmlSystemGetCudaDriverVersion_v2(int *number) {{ *number = 13000; return 0; }}
int nvmlDeviceGetCount_v2(unsigned *count) {{ *count = {count}; return 0; }}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {{ *handle = (void *)(long)(index + 1); return 0; }}
int nvmlDeviceGetName(void *handle, char *text, unsigned length) {{ strncpy(text, "NVIDIA H200", length); return 0; }}
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {{ *major = 9; *minor = 0; return 0; }}
int nvmlDeviceGetMemoryInfo(void *handle, memory *found) {{ found->total = 150754820096ULL; return 0; }}
int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {{
  if (handle == (void *)2) return 3;
  *current = 1; *pending = 0;
  return 0;
}}
"""


def smi(*rows: str, old: str = "exit 2") -> str:
    return SMI.format(query="printf '%s\\n' " + " ".join(f"'{row}'" for row in rows), old=old)


def test_nvml_is_asked_first(parts: Parts, nvml: Callable[[str], None]) -> None:
    nvml(LIBRARY.format(init=0, count=2))
    parts.program("nvidia-smi", smi(H100))
    machine = parts.read()
    assert machine["driver"] == {"value": "580.159.04", "source": "NVML"}
    assert machine["driver_cuda"] == {"value": "13.0", "source": "NVML"}
    assert machine["gpus"] == {"value": "2", "source": "NVML"}
    h200 = {"name": "NVIDIA H200", "capability": "9.0", "memory_bytes": 150754820096}
    assert machine["devices"] == [{**h200, "mig": True}, h200]


def test_nvidia_smi_is_asked_where_nvml_is_missing(parts: Parts) -> None:
    parts.program("nvidia-smi", smi(H100, A100_MIG, L4))
    machine = parts.read()
    assert machine["driver"] == {"value": "550.54.15", "source": "nvidia-smi"}
    assert machine["driver_cuda"] == {"value": "12.4", "source": "nvidia-smi"}
    assert [(device["capability"], device.get("mig")) for device in machine["devices"]] == [
        ("9.0", False),
        ("8.0", True),
        ("8.9", None),
    ]
    assert machine["devices"][0]["memory_bytes"] == 81559 << 20


def test_an_old_nvidia_smi_is_asked_without_the_compute_capability(parts: Parts) -> None:
    parts.program(
        "nvidia-smi",
        SMI.format(
            query="echo 'Field \"compute_cap\" is not a valid field to query.'; exit 2",
            old="echo '470.57.02, NVIDIA A100-SXM4-40GB, 40536, Disabled'",
        ),
    )
    (device,) = parts.read()["devices"]
    assert device == {"name": "NVIDIA A100-SXM4-40GB", "memory_bytes": 40536 << 20, "mig": False}


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'No devices were found'; exit 6", "nvidia-smi: No devices were found"),
        (
            'echo "NVIDIA-SMI has failed because it couldn\'t communicate with the NVIDIA driver."; exit 9',
            "nvidia-smi: NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.",
        ),
        (
            "echo 'Failed to initialize NVML: Driver/library version mismatch' >&2; exit 18",
            "nvidia-smi: Failed to initialize NVML: Driver/library version mismatch",
        ),
        ("exit 1", "nvidia-smi: no answer"),
    ],
)
def test_a_refusal_of_nvidia_smi_is_the_reason(parts: Parts, script: str, why: str) -> None:
    parts.program("nvidia-smi", script)
    machine = parts.read()
    assert machine["driver"] == {"missing": f"{ABSENT}; {why}"}
    assert "devices" not in machine


def test_a_refusal_of_nvml_is_the_reason(parts: Parts, nvml: Callable[[str], None]) -> None:
    nvml(LIBRARY.format(init=18, count=1))
    parts.driver("570.86.10", "NVIDIA H200")
    machine = parts.read()
    why = "nvmlInit_v2: Driver/library version mismatch; nvidia-smi is not on PATH"
    assert machine["driver"] == {"value": "570.86.10", "source": "the driver's files in /proc", "missing": why}
    assert machine["devices"] == [{"name": "NVIDIA H200"}]


def test_nvml_without_a_gpu_is_not_an_error(parts: Parts, nvml: Callable[[str], None]) -> None:
    nvml(LIBRARY.format(init=0, count=0))
    machine = parts.read()
    assert (machine["driver"]["value"], machine["gpus"]) == ("580.159.04", {"missing": "NVML names none"})


def test_a_library_without_a_function_is_told(parts: Parts, nvml: Callable[[str], None]) -> None:
    nvml("int nvmlInit_v2(void) { return 0; }\nint nvmlShutdown(void) { return 0; }\n")
    assert "libnvidia-ml.so.1 has no nvmlDeviceGetCount_v2" in parts.read()["driver"]["missing"]


def test_in_a_container_without_nvml_the_drivers_files_tell(parts: Parts) -> None:
    parts.driver("535.183.01", "NVIDIA L4", "NVIDIA L4")
    machine = parts.read()
    why = f"{MISSING}; nvidia-smi is not on PATH"
    assert machine["driver"] == {"value": "535.183.01", "source": "the driver's files in /proc", "missing": why}
    assert machine["devices"] == [{"name": "NVIDIA L4"}, {"name": "NVIDIA L4"}]


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build", "580.95.05"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13 16:14:05 UTC 2021", "470.57.02"),
        ("something else", None),
    ],
)
def test_the_drivers_own_version_is_taken(parts: Parts, line: str, version: str | None) -> None:
    parts.proc.mkdir()
    (parts.proc / "version").write_text(line + "\n")
    assert parts.read("files")["driver"].get("value") == version


def test_a_login_node_has_nothing_and_says_why(parts: Parts) -> None:
    parts.torch("2.11.0+cu130", "13.0", WHEEL)
    machine = parts.read()
    assert machine["driver"] == machine["gpus"] == {"missing": f"{ABSENT}; nvidia-smi is not on PATH"}
    assert machine["torch_cuda"] == {"value": "13.0", "source": "torch/version.py"}
    assert machine["torch_code"] == {"missing": "not looked for, as there is no GPU here"}


@pytest.mark.parametrize("kind", ["read", "files"])
def test_torch_is_read_and_not_imported(parts: Parts, kind: str) -> None:
    parts.driver("580.95.05", "NVIDIA L4")
    parts.torch("2.11.0+cu130", "13.0", WHEEL)
    machine = parts.read(kind)
    assert machine["torch"] == {"value": "2.11.0+cu130", "source": "torch/version.py"}
    assert machine["torch_code"] == {"value": WHEEL, "source": "torch/lib/libtorch_python.so"}


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ((), "torch/lib/libtorch_python.so holds no list of GPU code"),
        ((WHEEL, "sm_80 sm_90"), "torch/lib/libtorch_python.so holds 2 lists of GPU code"),
    ],
)
def test_a_list_that_is_not_plain_is_not_guessed(parts: Parts, code: tuple[str, ...], why: str) -> None:
    parts.driver("580.95.05", "NVIDIA L4")
    parts.torch("2.11.0+cu130", "13.0", *code)
    assert parts.read()["torch_code"] == {"missing": why}


@pytest.mark.parametrize("content", [b"", b"MZ", b"\x7fELF\x02\x01" + b"\xff" * 100])
def test_another_kind_of_library_is_a_reason_and_no_error(parts: Parts, content: bytes) -> None:
    parts.driver("580.95.05", "NVIDIA L4")
    parts.torch("2.11.0+cu130", "13.0", WHEEL)
    (parts.site / "torch" / "lib" / "libtorch_python.so").write_bytes(content)
    assert parts.read()["torch_code"]["missing"].startswith("torch/lib/libtorch_python.so can't be read: ")


@pytest.mark.parametrize(
    ("cuda", "hip", "why"), [(None, None, "a build without CUDA"), (None, "6.2.41133", "a build for ROCm 6.2.41133")]
)
def test_a_build_without_cuda_is_told(parts: Parts, cuda: str | None, hip: str | None, why: str) -> None:
    parts.torch("2.13.0", cuda, hip=hip)
    machine = parts.read()
    assert machine["torch_cuda"] == machine["torch_code"] == machine["nccl"] == {"missing": why}


DAMAGED = {
    "no Python": b"cuda = = 1\n",
    "bytes": b"\xff\xfe\x00" * 20,
    "brackets": b"cuda = " + b"(" * 10_000,
    "signs": b"cuda = " + b"-" * 60_000 + b"1",
    "dots": b"cuda = a" + b".b" * 30_000,
    "endless": b"# \n" * 100_000,
}


@pytest.mark.parametrize("kind", ["read", "files"])
@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_torch_whose_version_can_not_be_read_is_a_reason(parts: Parts, content: bytes, kind: str) -> None:
    parts.driver("580.95.05", "NVIDIA L4")
    parts.torch("2.11.0", "13.0")
    (parts.site / "torch" / "version.py").write_bytes(content)
    # What one Python can't read may to another be a name without a text.
    whys = ("torch/version.py can't be read: ", "torch/version.py does not tell its CUDA version")
    assert parts.read(kind)["torch_cuda"]["missing"].startswith(whys)


def test_a_torch_that_does_not_tell_its_cuda_is_no_build_without_it(parts: Parts) -> None:
    parts.torch("2.11.0", "13.0")
    (parts.site / "torch" / "version.py").write_text("__version__ = '2.11.0'\n")
    assert parts.read()["torch_cuda"] == {"missing": "torch/version.py does not tell its CUDA version"}


def test_nccl_is_that_of_torchs_cuda(parts: Parts) -> None:
    parts.torch("2.11.0+cu130", "13.0")
    parts.distribution("nvidia-nccl-cu12", "2.27.5")
    parts.distribution("nvidia-nccl-cu13", "2.28.9")
    assert parts.read()["nccl"] == {"value": "2.28.9", "source": "metadata of nvidia-nccl-cu13"}


def test_nccl_without_metadata_is_told_by_its_file(parts: Parts) -> None:
    parts.torch("2.11.0a0+own", "99.0")  # no environment of tests has its NCCL installed
    (parts.site / "torch" / "lib" / "libnccl.so.2.28.9").write_bytes(b"")
    assert parts.read()["nccl"] == {"value": "2.28.9", "source": "the name of the library's file"}


def test_nvcc_tells_its_release(parts: Parts) -> None:
    path = parts.program("nvcc", NVCC)
    assert parts.read()["nvcc"] == {"value": "12.4", "source": str(path)}
    path.write_text("#!/bin/sh\nexit 1\n")
    assert parts.read()["nvcc"] == {"missing": f"{path} does not tell its version"}


def test_cuda_compat_on_the_library_path_is_seen(parts: Parts) -> None:
    parts.driver("535.183.01", "NVIDIA H200")
    folder = parts.place / "cuda-13.0" / "compat"
    folder.mkdir(parents=True)
    parts.variables["LD_LIBRARY_PATH"] = f"/nowhere:{folder}"
    assert "value" not in parts.read("files")["forward_compatibility"]
    (folder / "libcuda.so.1").write_bytes(b"")
    assert parts.read("files")["forward_compatibility"] == {"value": str(folder), "source": "cuda-compat"}


def test_transformer_engine_and_apex_come_from_metadata_and_files(parts: Parts) -> None:
    parts.distribution("transformer-engine-cu12", "2.8.0+5cf3")
    (parts.site / "apex" / "lib").mkdir(parents=True)
    machine = parts.read()
    assert machine["transformer_engine"] == {"value": "2.8.0+5cf3", "source": "metadata"}
    assert machine["apex"] == {"value": "unknown", "source": "an unrelated project of that name"}


TORCH = """
from types import SimpleNamespace as _Space
_C = _Space(_cuda_getArchFlags=lambda: 'sm_80 sm_90', _nccl_version=1)
cuda = _Space(nccl=_Space(version=lambda: (2, 28, 9)))
"""


@pytest.mark.parametrize(
    ("text", "code"),
    [
        (TORCH, {"value": "sm_80 sm_90", "source": "torch itself"}),
        ("raise OSError('libcudart.so.13')", {"missing": "torch can't be imported: OSError: libcudart.so.13"}),
        (f"print('Welcome to cluster X')\n{TORCH}", {"value": "sm_80 sm_90", "source": "torch itself"}),
        ("print('Welcome'); import os; os._exit(0)", {"missing": "torch, when asked, gave no answer"}),
    ],
)
def test_torch_itself_can_be_asked(parts: Parts, text: str, code: dict[str, Any]) -> None:
    parts.driver("580.95.05", "NVIDIA H200")
    parts.torch("2.11.0a0+own", "13.0", importable=text)
    assert parts.read("read", "ask")["torch_code"] == code
