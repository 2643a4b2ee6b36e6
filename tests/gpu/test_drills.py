# SPDX-License-Identifier: Apache-2.0
"""Each drill of ``benchmarks/drills.py`` ends, with us, in time and as it says there: on gloo here, on NCCL with GPUs.

The drills run in a process of their own, since this one may have started CUDA, which no fork can use then. Ranks that
do not end are killed there, each drill by its own limit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from ..loading import ROOT, load_program

DRILLS = load_program("benchmarks/drills.py").DRILLS
# What starting the ranks takes is on top of a drill's limit only once.
LIMIT_S = 60.0 + sum(drill.end_s for drill in DRILLS)
BACKENDS = ["gloo", pytest.param("nccl", marks=pytest.mark.gpu(count=2))]

pytestmark = pytest.mark.timeout(LIMIT_S + 30.0)


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("drills") / "report.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "drills.py"), "--ours", "--backend", request.param]
    # What was in reach stays so: some machines have their packages there.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    # Not pipes: a rank that is killed late may hold them open.
    with (path.parent / "said").open("w") as said:
        process = subprocess.Popen([*command, "--report", str(path)], env=environment, stdout=said, stderr=said)
        try:
            process.wait(LIMIT_S)
        finally:
            process.kill()
            process.wait()
    assert path.exists(), (path.parent / "said").read_text()[-2000:]
    rows: dict[str, Any] = json.loads(path.read_text())
    return rows


@pytest.mark.parametrize("drill", [drill.name for drill in DRILLS])
@pytest.mark.parametrize("report", BACKENDS, indirect=True)
def test_a_drill_ends_in_time_and_in_the_right_error(report: dict[str, Any], drill: str) -> None:
    assert drill in report, f"only {list(report)} ran"
    assert report[drill]["faults"] == [], report[drill]
