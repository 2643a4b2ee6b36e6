# SPDX-License-Identifier: Apache-2.0
"""The release workflows: who comes after whom, who sees the key, and that each target they call is one of make.

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
WORKFLOWS = {
    name: yaml.safe_load((FOLDER / f"{name}.yml").read_text(encoding="utf-8"))
    for name in ("release", "build", "publish")
}
JOBS: dict[str, Any] = {
    f"{job} in {name}": content for name, workflow in WORKFLOWS.items() for job, content in workflow["jobs"].items()
}
# What has a key, an identity or a right to write; nothing that a registry could change runs beside it.
TRUSTED = {
    "sign in release": ["make sign-dist"],
    "sign-keyless in release": ["make sign-keyless"],
    "draft-github in release": ["make draft-github"],
    "attest in build": [],
    "fetch in publish": ["make fetch-draft"],
    "publish-pypi in publish": [],
    "publish-github in publish": ["make publish-github"],
}


def runs_of(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job.get("steps", ()) if "run" in step]


def comes_after(workflow: str, job: str) -> set[str]:
    """All jobs that have to be over, and good, before a job starts."""
    needs = WORKFLOWS[workflow]["jobs"][job].get("needs", [])
    direct = {needs} if isinstance(needs, str) else set(needs)
    return direct.union(*(comes_after(workflow, one) for one in direct))


@pytest.mark.parametrize(
    ("workflow", "order"),
    [
        ("release", ["agree", "evidence", "build", "sign", "sign-keyless", "verify", "draft-github"]),
        ("build", ["build", "attest"]),
        ("publish", ["fetch", "verify", "publish-pypi", "publish-github"]),
    ],
)
def test_nothing_is_published_before_all_else_was_good(workflow: str, order: list[str]) -> None:
    assert set(order) == set(WORKFLOWS[workflow]["jobs"])
    for number, job in enumerate(order):
        assert comes_after(workflow, job) == set(order[:number])
        assert not {"if", "continue-on-error"} & set(WORKFLOWS[workflow]["jobs"][job])


def test_where_a_key_an_identity_or_a_right_to_write_is_nothing_is_installed() -> None:
    for name, job in JOBS.items():
        if "uses" in job:  # its own jobs are in build.yml
            continue
        trusted = "secrets" in str(job) or "write" in job["permissions"].values()
        assert trusted == (name in TRUSTED)
        assert not trusted or runs_of(job) == TRUSTED[name]
    recipes = (ROOT / "ci" / "release.mk").read_text(encoding="utf-8")
    for target in ("sign-dist", "draft-github", "fetch-draft", "publish-github"):
        assert re.search(rf"^{target}:(?: ##.*)?\n\t@\$\(STDLIB\) scripts/\w+\.py .*\n\n", recipes, re.MULTILINE)


def test_every_package_that_signs_without_a_key_is_one_file() -> None:
    lines = (ROOT / "ci" / "sigstore.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9_.-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", pin) for pin in pins)
    assert "sigstore" in {pin.partition("==")[0] for pin in pins}


def test_only_the_signing_step_sees_the_key_and_the_build_sees_no_secret() -> None:
    for name, job in JOBS.items():
        found = [step for step in job.get("steps", ()) if "secrets" in str(step)]
        assert [step["run"] for step in found] == (["make sign-dist"] if name == "sign in release" else [])
        assert "secrets" not in job
        assert "id-token" not in job["permissions"] or "secrets" not in str(job)
    assert "secrets" not in (FOLDER / "build.yml").read_text(encoding="utf-8")


def test_a_signature_is_asked_for_once_a_key_is_committed_and_not_before_a_person_could_sign() -> None:
    asked = {
        name: step.get("env", {}).get("UNSIGNED")
        for name, job in JOBS.items()
        for step in job.get("steps", ())
        if "verify-dist" in step.get("run", "")
    }
    assert asked == {"build in build": "1", "verify in release": "1", "verify in publish": "no-key"}


def test_the_first_job_sees_the_main_branch() -> None:
    for name in ("agree in release", "verify in publish"):
        assert "release-agree" in str(runs_of(JOBS[name])) and JOBS[name]["steps"][0]["with"]["fetch-depth"] == 0


def test_they_start_from_version_tags_or_a_person_only_and_use_no_cache() -> None:
    # YAML reads the key "on" as true.
    started: dict[str, Any] = {name: workflow[True] for name, workflow in WORKFLOWS.items()}
    assert started == {
        "release": {"push": {"tags": ["v*.*.*"]}},
        "build": {"workflow_call": None},
        "publish": {"workflow_dispatch": None},
    }
    assert not [step for job in JOBS.values() for step in job.get("steps", ()) if "cache" in str(step)]


def test_every_target_that_is_called_is_there() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8") + (ROOT / "ci" / "release.mk").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    sessions = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(encoding="utf-8"), re.MULTILINE))
    runs = [run for job in JOBS.values() for run in runs_of(job)]
    assert len(runs) >= 9
    for run in runs:
        if nox := re.fullmatch(r"pipx run nox -s (\w+)(?: -- (.+))?", run):
            assert nox[1] in sessions
            assert set((nox[2] or "").split()) <= targets
        else:
            assert set(run.removeprefix("make ").split()) <= targets


def test_every_job_is_rehearsed_by_the_lines_that_it_has() -> None:
    text = (ROOT / "ci" / "release_rehearsal").read_text(encoding="utf-8")
    taken = {f"{job} in {workflow}" for workflow, job in re.findall(r'\.job\("(\w+)", "([\w-]+)"', text)}
    # Only GitHub gives the identity that sigstore asks for.
    assert taken == {name for name, job in JOBS.items() if runs_of(job)} - {"sign-keyless in release"}


@pytest.mark.parametrize("variable", ["VERSION", "CHECKS", "AGAINST", "UNSIGNED", "RELEASE_KEY"])
def test_every_variable_that_is_set_is_read(variable: str) -> None:
    assert variable in str(WORKFLOWS)
    read = [ROOT / "ci" / "release.mk", ROOT / "noxfile.py", ROOT / "scripts" / "sign_release.py"]
    assert any(re.search(rf"^{variable} \?=|environ\.get\(\"{variable}\"", path.read_text(), re.M) for path in read)
