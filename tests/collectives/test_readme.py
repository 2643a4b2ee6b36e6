# SPDX-License-Identifier: Apache-2.0
"""The example in the README runs as it stands, on two ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from ..loading import ROOT


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    examples = [text for text in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)]
    (example,) = [text for text in examples if "AllReduceContext" in text]
    program = tmp_path / "example.py"
    # A file for each rank: what two ranks print to one pipe can run into one line.
    keep = f"import os, pathlib\npathlib.Path({str(tmp_path)!r}, os.environ['RANK']).write_text(str(gradient.tolist()))"
    program.write_text(f"{example}\n{keep}\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["[2.0, 2.0, 2.0, 2.0]"] * 2
