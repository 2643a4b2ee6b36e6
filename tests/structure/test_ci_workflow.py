# SPDX-License-Identifier: Apache-2.0
"""What the workflow of each push promises of time: the table of every proof runs once, alone, in 25 minutes or fails.

Rights and pins are rules of ``test_house_rules``. Not handled: how long it takes on a machine of GitHub.
"""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
TABLE = "tests/fixes/test_table.py"


def test_the_table_has_a_job_of_its_own_and_the_other_tests_leave_it_out() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))["jobs"]
    runs = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert runs["table"] == ["pipx run nox -s table"]
    assert jobs["table"]["timeout-minutes"] <= 25
    assert runs["torch"] == [f"pipx run nox -s tests_torch -- --ignore={TABLE}"]
    assert (ROOT / TABLE).is_file() and f'"{TABLE}"' in (ROOT / "noxfile.py").read_text("utf-8")
    assert sum("tests_torch" in run or "-s table" in run for name in runs for run in runs[name]) == 2
