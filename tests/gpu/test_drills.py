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

drills = load_program("benchmarks/drills.py")
DRILLS = drills.DRILLS
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


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("more", [{"groups": 1}, {"threads": 1}, {"adrift": 1}, {"groups": 9}])
def test_what_a_rank_has_left_is_a_fault_unless_it_gave_a_group_up(backend: str, more: dict[str, int]) -> None:
    def found(drill: Any, left: Any, told: str = "no error") -> list[str]:
        ranks = [drills.Run(drills.Ended(word, 0, 0.1, ""), (told, 0.1, left)) for word in ("a", "b")]
        faults: list[str] = drills.faults(drill._replace(expected=("a", "b")), ranks, backend)
        return faults

    clean = next(drill for drill in DRILLS if not any(drill.given_up))
    assert found(clean, drills.teardowns.Left()) == []
    assert len(found(clean, drills.teardowns.Left(**more))) == len(found(clean, drills.teardowns.Left(), "late")) == 2
    stuck = clean._replace(given_up=(1, 1))
    # gloo never ends what is under way; with NCCL the abort itself may not end.
    inherent = [{"adrift": 1}] if backend == "gloo" else [{"adrift": 1}, {"threads": 1}, {"groups": 1}]
    assert bool(found(stuck, drills.teardowns.Left(**more), "late")) is (more not in inherent)
