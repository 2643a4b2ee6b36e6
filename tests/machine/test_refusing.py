# SPDX-License-Identifier: Apache-2.0
"""A driver that refuses, hangs, crashes or babbles costs its answer and nothing else, and what did answer is kept.

``refusal`` is empty only where all that is there answers, or nothing is there at all.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_fixes.machine import child

from .conftest import Parts
from .test_reading import H100, LIBRARY, smi

LOST = "Unable to determine the device handle for GPU3: 0000:4F:00.0: Unknown Error"
INFOROM = "WARNING: infoROM is corrupted at gpu 0000:3B:00.0"
ROWS = f"printf '%s\\n' '{H100}' '{H100}'"


def impatient(parts: Parts, seconds: float = 3) -> None:
    """Wait so long, which is still enough for what does answer on a machine with other work."""
    text = f"from megatron_fixes.machine import graphics\ngraphics.PATIENCE_S = {seconds}\n"
    parts.site.joinpath("sitecustomize.py").write_text(text)


def test_gpus_that_answer_are_kept_beside_one_that_is_lost(parts: Parts, nvml: Callable[[str], None]) -> None:
    whole = LIBRARY.format(init=0, count=4)
    lost = whole.replace("*handle = (void *)(long)(index + 1); return 0;", "*handle = 0; return index == 3 ? 15 : 0;")
    nvml(lost.replace('"Not Supported"', '"GPU is lost"'))
    machine = parts.read()
    assert (machine["gpus"]["value"], len(machine["devices"])) == ("3", 3)
    assert machine["refusal"] == "1 of 4 GPUs did not answer: nvmlDeviceGetHandleByIndex_v2: GPU is lost"


@pytest.mark.parametrize(
    ("script", "refusal"),
    [
        (f"echo '{LOST}'; exit 15", f"nvidia-smi: {LOST}"),
        ("exec /bin/sleep 60", "nvidia-smi gave no answer within 3 s"),
        ("exec >/dev/null 2>/dev/null; exec /bin/sleep 60", "nvidia-smi did not end within 3 s"),
        ("while :; do echo 0123456789012345678901234567890123456789; done", "nvidia-smi gave more than 1 MiB"),
    ],
)
def test_an_nvidia_smi_that_is_there_and_gives_no_answer_refuses(parts: Parts, script: str, refusal: str) -> None:
    impatient(parts, 3 if "sleep" in script else 20)
    parts.program("nvidia-smi", script)
    machine = parts.read()
    assert (machine["refusal"], "value" in machine["driver"]) == (refusal, False)


def test_lines_that_describe_no_gpu_are_counted_and_the_others_kept(parts: Parts) -> None:
    parts.program("nvidia-smi", smi(H100, INFOROM, H100))
    machine = parts.read()
    assert (machine["driver"]["value"], len(machine["devices"])) == ("550.54.15", 2)
    assert machine["refusal"] == f"nvidia-smi: 1 of 3 lines describe no GPU: {INFOROM}"


GARBAGE = [
    "GPU, , , x,",
    "0, x, -1, , 99.9",
    H100.replace("550.54.15", "none"),
    H100.replace("NVIDIA H100 80GB HBM3", ""),
    H100.replace("81559", "9" * 29),
    H100.replace("81559", "0"),
    H100.replace("81559", "many"),
    H100.replace("Disabled", "x"),
    H100.replace(" 9.0", " 99.9"),
    H100.replace(" 9.0", " 9.123"),
    H100.replace(" 9.0", ""),
]


@pytest.mark.parametrize("line", GARBAGE)
def test_as_many_commas_do_not_make_a_gpu(parts: Parts, line: str) -> None:
    parts.program("nvidia-smi", smi(line))
    machine = parts.read()
    said = " ".join(line.split())
    assert (machine["refusal"], "devices" in machine) == (f"nvidia-smi: {said}", False)
    parts.program("nvidia-smi", smi(line, H100))
    machine = parts.read()
    assert (len(machine["devices"]), machine["devices"][0]["capability"]) == (1, "9.0")
    assert machine["refusal"] == f"nvidia-smi: 1 of 2 lines describe no GPU: {said}"


@pytest.mark.parametrize("untold", ["[N/A]", "[Not Supported]", "[Unknown Error]", "[GPU requires reset]", "N/A"])
def test_a_gpu_that_does_not_tell_its_memory_or_capability_is_one(parts: Parts, untold: str) -> None:
    parts.program("nvidia-smi", smi(f"580.95.05, NVIDIA GB10, {untold}, {untold}, {untold}"))
    machine = parts.read()
    assert (machine["devices"], "refusal" in machine) == ([{"name": "NVIDIA GB10"}], False)


def test_the_gpus_are_kept_where_only_the_cuda_version_hangs(parts: Parts) -> None:
    impatient(parts)
    parts.program("nvidia-smi", f'case "$*" in *query-gpu*) {ROWS};; *) exec /bin/sleep 60;; esac')
    machine = parts.read()
    assert (len(machine["devices"]), machine["driver_cuda"]) == (
        2,
        {"missing": "nvidia-smi gave no answer within 3 s"},
    )
    assert "refusal" not in machine


def test_a_trace_of_a_driver_that_tells_nothing_is_a_refusal(parts: Parts) -> None:
    parts.proc.mkdir()
    assert parts.read()["refusal"] == f"{parts.proc} is there, and no driver answers"
    parts.proc.rmdir()
    assert "refusal" not in parts.read()
    control = parts.place / "nvidiactl"
    control.touch()
    text = "from pathlib import Path\nfrom megatron_fixes.machine import driver_files\ndriver_files.CONTROL = "
    parts.site.joinpath("sitecustomize.py").write_text(f"{text}Path({str(control)!r})\n")
    assert parts.read()["refusal"] == f"{control} is there, and no driver answers"


def test_a_driver_of_files_alone_refuses_only_where_something_else_did(parts: Parts) -> None:
    parts.driver("580.95.05", "NVIDIA H200")
    assert "refusal" not in parts.read()
    parts.program("nvidia-smi", f"echo '{LOST}'; exit 15")
    machine = parts.read()
    assert (machine["driver"]["value"], machine["refusal"]) == ("580.95.05", f"nvidia-smi: {LOST}")


@pytest.mark.parametrize(
    ("init", "why"),
    [
        ("raise(SIGSEGV)", "NVML ended its process without an answer, by signal 11"),
        ("(_exit(0), 0)", "NVML ended its process without an answer"),
        ("(exit(0), 0)", "NVML ended its process without an answer"),
        ("signal(SIGTERM, SIG_IGN) ? 0 : sleep(60)", "NVML gave no answer within 3 s"),
    ],
)
def test_a_library_that_ends_or_stops_its_process_does_not_end_ours(
    parts: Parts, nvml: Callable[[str], None], init: str, why: str
) -> None:
    head = "#include <signal.h>\n#include <stdlib.h>\n#include <unistd.h>\n"
    nvml(head + LIBRARY.format(init=init, count=1))
    impatient(parts)
    parts.driver("580.95.05", "NVIDIA H200")
    machine = parts.read()
    assert (machine["driver"]["value"], machine["refusal"]) == ("580.95.05", why)


def test_a_library_may_print_and_crash_at_its_end(parts: Parts, nvml: Callable[[str], None]) -> None:
    loud = 'printf("NVML hello\\n") + fflush(stdout) + fprintf(stderr, "hello\\n") ? 0 : 0'
    source = LIBRARY.format(init=loud, count=1).replace("nvmlShutdown(void) {", "nvmlShutdown(void) { raise(11);")
    nvml("#include <signal.h>\n#include <stdio.h>\n" + source)
    # That what it prints does not come before the JSON is what lets this be read.
    assert parts.read()["gpus"] == {"value": "1", "source": "NVML"}


def test_a_cuda_version_of_zero_is_none(parts: Parts, nvml: Callable[[str], None]) -> None:
    nvml(LIBRARY.format(init=0, count=1).replace("*number = 13000", "*number = 0"))
    machine = parts.read()
    assert machine["driver_cuda"] == {"missing": "got 0 as the driver's CUDA version"}
    assert machine["driver"]["value"] == "580.159.04"


@pytest.mark.parametrize("content", [b"", b"not a library"])
def test_a_library_that_can_not_be_loaded_refuses(parts: Parts, content: bytes) -> None:
    parts.variables["LD_LIBRARY_PATH"] = str(parts.bin)
    (parts.bin / "libnvidia-ml.so.1").write_bytes(content)
    assert "libnvidia-ml.so.1" in parts.read()["refusal"]


def test_where_nothing_is_there_nothing_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from megatron_fixes.machine import driver_files, graphics

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(driver_files, "CONTROL", tmp_path / "none")
    monkeypatch.setattr(driver_files, "has_library", lambda: False)
    monkeypatch.setattr(child, "forked", None)
    monkeypatch.setattr(child, "started", None)
    assert graphics.read(tmp_path / "none").driver.missing == "libnvidia-ml.so.1 is not here; nvidia-smi is not on PATH"


def test_children_of_a_program_that_hangs_are_ended_too(tmp_path: Path) -> None:
    script = f"/bin/sleep 600 & echo $! > {tmp_path}/pid; wait"
    with pytest.raises(child.GivenUpError):
        child.started("/bin/sh", "-c", script, patience_s=1)
    pid = int((tmp_path / "pid").read_text())
    until = time.monotonic() + 10
    while Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize("ask", ["forked", "started"])
def test_a_child_that_no_signal_reaches_is_left_behind(monkeypatch: pytest.MonkeyPatch, ask: str) -> None:
    pids: list[int] = []
    monkeypatch.setattr(child, "_kill", pids.append)
    started = time.monotonic()
    try:
        with pytest.raises(child.GivenUpError):
            if ask == "forked":
                child.forked(lambda: time.sleep(60) or b"", 0.2)
            else:
                child.started("/bin/sleep", "60", patience_s=0.2)
        assert time.monotonic() - started < 20
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_a_fork_neither_prints_nor_goes_on_in_our_place(capfd: pytest.CaptureFixture[str]) -> None:
    def question() -> bytes:
        os.write(1, b"printed")
        os.write(2, b"printed")
        return b"answer"

    assert child.forked(question, 20) == b"answer"
    with pytest.raises(child.GivenUpError, match="ended its process without an answer"):
        child.forked(lambda: 1 / 0, 20)  # type: ignore[arg-type, return-value]
    assert capfd.readouterr() == ("", "")


def test_a_program_is_told_apart_by_its_streams() -> None:
    done = child.started("/bin/sh", "-c", "echo out; echo err >&2; exit 3", patience_s=20)
    assert isinstance(done, subprocess.CompletedProcess)
    assert (done.stdout, done.stderr, done.returncode) == ("out\n", "err\n", 3)
