# SPDX-License-Identifier: Apache-2.0
"""The release workflow: who comes after whom, who sees the key, and that each target it calls is one of make.

Rights and pins of all workflows are rules of ``test_house_rules``. Not handled: whether GitHub does as it says.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".github" / "workflows"
RELEASE = yaml.safe_load((FOLDER / "release.yml").read_text(encoding="utf-8"))
BUILD = yaml.safe_load((FOLDER / "build.yml").read_text(encoding="utf-8"))
JOBS: dict[str, Any] = {**RELEASE["jobs"], **{f"{name} in build.yml": job for name, job in BUILD["jobs"].items()}}


def comes_after(job: str) -> set[str]:
    """All jobs that have to be over, and good, before a job starts."""
    needs = RELEASE["jobs"][job].get("needs", [])
    direct = {needs} if isinstance(needs, str) else set(needs)
    return direct.union(*(comes_after(one) for one in direct))


def test_nothing_is_published_before_all_else_was_good() -> None:
    order = ["agree", "evidence", "build", "sign", "verify", "publish-pypi", "publish-github"]
    assert set(order) == set(RELEASE["jobs"])
    for number, job in enumerate(order):
        assert comes_after(job) == set(order[:number])
        assert "if" not in RELEASE["jobs"][job] and "continue-on-error" not in RELEASE["jobs"][job]


def test_only_the_signing_step_sees_the_key_and_the_build_sees_no_secret() -> None:
    for name, job in JOBS.items():
        found = [step for step in job.get("steps", ()) if "secrets" in str(step)]
        assert [step["run"].split()[-1] for step in found] == (["sign-dist"] if name == "sign" else [])
        assert "secrets" not in job
    assert "secrets" not in (FOLDER / "build.yml").read_text(encoding="utf-8")


def test_it_starts_from_version_tags_only_and_uses_no_cache() -> None:
    # YAML reads the key "on" as true.
    assert RELEASE[True] == {"push": {"tags": ["v*.*.*"]}}
    assert list(BUILD[True]) == ["workflow_call"]
    assert not [step for job in JOBS.values() for step in job.get("steps", ()) if "cache" in str(step)]


def test_every_target_that_is_called_is_there() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8") + (ROOT / "ci" / "release.mk").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    sessions = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE))
    runs = [step["run"] for job in JOBS.values() for step in job.get("steps", ()) if "run" in step]
    assert len(runs) >= 6
    for run in runs:
        if nox := re.fullmatch(r"pipx run nox -s (\w+)(?: -- (.+))?", run):
            assert nox[1] in sessions
            assert set((nox[2] or "").split()) <= targets
        else:
            assert set(run.removeprefix("make ").split()) <= targets


def test_every_target_that_is_called_is_rehearsed() -> None:
    rehearsal = (ROOT / "ci" / "release_rehearsal").read_text(encoding="utf-8")
    runs = [step["run"] for job in JOBS.values() for step in job.get("steps", ()) if "run" in step]
    called = {target for run in runs for target in run.partition(" -- ")[2].split() or run.split()[-1:]}
    # Only GitHub gives the identity that sigstore asks for.
    assert {target for target in called if f'"{target}"' not in rehearsal} == {"sign-keyless"}


@pytest.mark.parametrize("variable", ["VERSION", "CHECKS", "AGAINST", "RELEASE_KEY"])
def test_every_variable_that_is_set_is_read(variable: str) -> None:
    assert variable in str(RELEASE) + str(BUILD)
    read = [ROOT / "ci" / "release.mk", ROOT / "noxfile.py", ROOT / "scripts" / "release_dist.py"]
    assert any(re.search(rf"^{variable} \?=|environ\.get\(\"{variable}\"", path.read_text(), re.M) for path in read)
