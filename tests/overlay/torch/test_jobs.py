# SPDX-License-Identifier: Apache-2.0
"""Jobs as they are started: torchrun, DataLoader workers, TorchScript; with the small Megatron and with a real one."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fixes import catalog
from megatron_fixes.overlay.tables import module_name
from megatron_fixes.patching.hunks import touched_paths

ROOT = Path(__file__).resolve().parents[3]
NO_CACHE = {"MEGATRON_FIXES_CACHE": "/dev/null/cache"}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
QUIET = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
JOB = """import os, sys, json
{first}
import torch.distributed as dist, megatron_fixes
import {module}
dist.init_process_group("gloo")
try:
    status = megatron_fixes.check_ranks()
    states = [one.state for one in status.modules if one.module == "{module}"]
    seen = [dist.get_rank(), status.in_force, *states, status.cache.state]
except Exception as error:
    seen = [dist.get_rank(), type(error).__name__, error.message]
# In one write, as both ranks share the pipe.
os.write(1, (json.dumps(seen) + "\\n").encode())
dist.destroy_process_group()
"""


def lines(text: str) -> list[Any]:
    return sorted(json.loads(line) for line in text.splitlines() if line.startswith("["))


@pytest.fixture(scope="module")
def real(installed: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Any]:
    """Return a function that gives our own wheel, installed, a home folder."""
    conftest = sys.modules[type(installed).__module__]
    base = tmp_path_factory.mktemp("real")
    skip = shutil.ignore_patterns(".*", "__pycache__", "_data", "*.egg-info", "build", "tests", "docs")
    shutil.copytree(ROOT, base / "project", ignore=skip)
    wheel = conftest.build_wheel(base / "project", base / "wheel")
    python, site = conftest.make_venv(base / "venv", wheel)
    return lambda home: type(installed)(python, site, wheel, base, home)


def test_real_megatron_under_torchrun(real: Callable[[Path], Any], release_tree: Path, tmp_path: Path) -> None:
    env = real(tmp_path)
    module = "megatron.core.distributed.param_and_grad_buffer"
    environ = {**QUIET, "PYTHONPATH": str(release_tree), "MEGATRON_FIXES_STRICT": "1"}
    known = catalog.load()
    needed = [fix_id for fix_id, fix in known.matrix.fixes.items() if fix.cells["0.16.1"].verdict == "needed"]
    patches = {fix_id: patch for fix_id in needed if (patch := known.patch(fix_id, "0.16.1"))}
    in_force = sorted(patches)
    # A fix is in force once its modules are loaded.
    touched = {module_name(path) for patch in patches.values() for path in touched_paths(patch.text)}
    (tmp_path / "train.py").write_text(JOB.format(first=f"import {', '.join(sorted(touched))}", module=module))
    done = env.start([*TORCHRUN, "train.py"], on=",".join(in_force), **environ)
    assert lines(done.stdout) == [[rank, in_force, "patched", "used"] for rank in (0, 1)]
    assert "megatron-fixes:" not in done.stderr


def test_ranks_that_differ_are_named_on_every_rank(env: Any) -> None:
    first = "if os.environ['RANK'] == '1': os.environ['MEGATRON_FIXES'] = 'MF9001'"
    (env.home / "train.py").write_text(JOB.format(first=first, module="megatron.core.distributed.buffer"))
    done = env.start([*TORCHRUN, "train.py"], **QUIET)
    text = (
        "got ranks that run different code, expected one: "
        "rank 0: MF9001, MF9002 in force, megatron-core 9.1.0, megatron-fixes 0.1.0; "
        "rank 1: MF9001 in force, megatron-core 9.1.0, megatron-fixes 0.1.0"
    )
    assert lines(done.stdout) == [[rank, "RanksDisagreeError", text] for rank in (0, 1)]


def test_torchrun_ends_when_a_rank_is_refused(env: Any) -> None:
    (env.home / "train.py").write_text("import megatron.core.distributed; print('trains')")
    environ = {**QUIET, "MEGATRON_FIXES_STRICT": "1"}
    done = env.start([*TORCHRUN, "train.py"], on="MF1234", check=False, **environ)
    assert done.returncode == 1
    assert "trains" not in done.stdout
    # torchrun ends the other rank when one has stopped, maybe before it has said anything; the one says why.
    assert re.search(
        r"megatron-fixes: stopped local rank [01] before training, .*: MF1234 is not in force", done.stderr
    )
    assert done.stderr.count("megatron-fixes: MF1234 is not in force") <= 1
    assert "exitcode  : 1" in done.stderr


def test_check_ranks_without_a_process_group_says_so(env: Any) -> None:
    code = """import megatron_fixes
try: megatron_fixes.check_ranks()
except Exception as error: print(type(error).__name__, error.message)"""
    assert env.run(code).stdout.startswith("UsageError got no process group")


@pytest.mark.parametrize("way", [{}, NO_CACHE], ids=["cache", "memory"])
def test_torchscript_compiles_the_patched_text(way: dict[str, str], env: Any) -> None:
    code = """import torch
from megatron.core.pair.left import left
scripted = torch.jit.script(left)
print(scripted(), "wrong" in scripted.code)"""
    assert env.run(code, **way).stdout.strip() == "left False"


LOADER = """import torch.utils.data as data
class Numbers(data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index):
        from megatron.core.distributed.buffer import Buffer
        return Buffer([index, 1]).finish()
def main():
    for method in ("fork", "spawn", "forkserver"):
        print([int(n) for n in data.DataLoader(Numbers(), num_workers=1, multiprocessing_context=method)])
if __name__ == "__main__":
    main()
"""


def test_dataloader_workers_run_patched(env: Any) -> None:
    (env.home / "train.py").write_text(LOADER)
    done = env.start(["train.py"], **QUIET)
    assert done.stdout.splitlines() == ["[2, 4, 6, 8]"] * 3
