# SPDX-License-Identifier: Apache-2.0
"""A mistake in the call of a script, or a machine that lacks something, is one sentence and exit code 2, no traceback.

Nothing is run or written then. Not looked at: what the scripts do when they are called rightly.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loading import ROOT

PY = sys.executable
HERE = {
    "repeat_proofs, unknown": ([PY, "scripts/repeat_proofs.py", "MF0099"], "got MF0099, expected ids or slugs"),
    "repeat_proofs, never": ([PY, "scripts/repeat_proofs.py", "--times", "0"], "expected 1 or more"),
    "repeat_proofs, negative": ([PY, "scripts/repeat_proofs.py", "--times", "-1"], "expected 1 or more"),
    "release_notes": (
        [PY, "scripts/release_notes.py", "v0.1.0", "--dist", "no/folder"],
        "expected a release's signature",
    ),
    "standalone": ([PY, "scripts/standalone.py", "/proc/x"], "expected a folder to write to"),
    "try_release, key": ([PY, "ci/try_release", "--key", "nokey", "docs"], "got nokey as --key, expected a file"),
    "try_release, folder": ([PY, "ci/try_release", "--key", "nokey", "no/folder"], "got no/folder, expected a folder"),
    "try_release, environment": ([PY, "-S", "ci/try_release", "docs"], ".venv/bin/python ci/try_release"),
    "gpu_smoke, environment": ([PY, "-S", "ci/gpu_smoke"], ".venv/bin/python ci/gpu_smoke"),
    "gpu_collectives, option": (["ci/gpu_collectives", "--bogus"], "got --bogus, expected a folder"),
    "gpu_collectives, nothing": (["ci/gpu_collectives"], "got 0 arguments, expected a folder"),
    "gpu_collectives, folder": (["ci/gpu_collectives", "/proc/x"], "expected a folder that can be written"),
    "gpu_collectives, tree": (["ci/gpu_collectives", "OUT", "no/tree"], "got no/tree, expected a tree"),
    "refresh_patch, slug": (
        [PY, "scripts/refresh_patch.py", "start", "MF0003", "typo", "0.16.1", "OUT"],
        "got the slug 'typo', expected 'pp-double-grad-reduce-multi-distopt'",
    ),
    "refresh_patch, taken": (
        [PY, "scripts/refresh_patch.py", "start", "MF9999", "pp-double-grad-reduce-multi-distopt", "0.16.1", "OUT"],
        "expected another: MF0003 has it",
    ),
    "refresh_patch, id": ([PY, "scripts/refresh_patch.py", "start", "mf3", "a", "0.16.1", "OUT"], "such as MF0003"),
}


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)


def held(done: subprocess.CompletedProcess[str], said: str) -> None:
    assert (done.returncode, said in done.stderr) == (2, True), done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "line " not in done.stderr


@pytest.mark.parametrize("case", HERE)
def test_a_mistake_is_one_sentence(case: str, tmp_path: Path) -> None:
    command, said = HERE[case]
    held(run(*(str(tmp_path / "out") if word == "OUT" else word for word in command)), said)
    assert not (tmp_path / "out").exists()


def test_an_edited_tree_is_not_begun_anew(tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    slug = "pp-double-grad-reduce-multi-distopt"
    done = run(PY, "scripts/refresh_patch.py", "start", "MF0003", slug, "0.16.1", str(tmp_path))
    held(done, "got a folder with a megatron in it, expected a new one")
    done = run(PY, "scripts/refresh_patch.py", "start", "MF9999", "a-new-one", "0.16.1", str(tmp_path))
    held(done, "MF9999 is a new fix: compat_matrix.yaml has no row of it yet")


def test_a_machine_without_gpus_is_told(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    record = tmp_path / "record.json"
    held(run(PY, "ci/gpu_smoke", str(record), PATH=str(tmp_path)), "got no nvidia-smi on PATH")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\n", encoding="utf-8")
    (tmp_path / "nvidia-smi").chmod(0o755)
    held(
        run(PY, "ci/gpu_smoke", str(record), PATH=str(tmp_path), CUDA_VISIBLE_DEVICES=""), "got no GPU that torch sees"
    )
    assert not record.exists()
    done = run("ci/gpu_collectives", str(tmp_path / "out"), PYTHON=PY, BACKEND="nccl", CUDA_VISIBLE_DEVICES="")
    held(done, "got no GPU that torch sees; nothing was run")
    assert list((tmp_path / "out").iterdir()) == []


def test_the_environment_that_fetches_is_named(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec "{PY}" -S "$@"\n', encoding="utf-8")
    bare.chmod(0o755)
    held(run("ci/fetch_megatron", "0.16.1", PYTHON=str(bare)), "which makes .venv/bin/python")
