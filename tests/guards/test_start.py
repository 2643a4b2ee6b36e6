# SPDX-License-Identifier: Apache-2.0
"""How guards get into a process: by name, by the variable, by the ``.pth``; and that a mistake is told, once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_fixes.config import ABORT, DEADLINE, GUARD_NAMES, GUARDS, guard_settings
from megatron_fixes.errors import UsageError

from .runs import ROOT, drilled, named, python, tree_of

AT_START = "from megatron_fixes.guards import start; start.at_interpreter_start()\n"
BY_PTH = f"for line in open({str(ROOT / 'megatron-fixes.pth')!r}): exec(line)\n"
IMPORT = """
import sys
sys.path.insert(0, {tree!r})
from megatron_fixes.proofs import shim
shim.install()
import megatron.core.distributed
"""
TELL = "import json; from megatron_fixes import guards; print(json.dumps(guards.status().installed))"


def told(code: str, **variables: str) -> tuple[Any, str]:
    """What a process printed last, as JSON, and what it said on stderr that is ours."""
    done = python("-c", code, **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    ours = [line for line in done.stderr.splitlines() if "guards-not-installed" in line]
    return json.loads(done.stdout.splitlines()[-1]), "\n".join(ours)


def test_settings_remember_where_they_came_from() -> None:
    settings = guard_settings(environ={GUARDS: "Teardown; lifecycle", DEADLINE: "2.5", ABORT: "1"})
    assert settings.names.value == ("lifecycle", "teardown") and settings.names.source == f"environment {GUARDS}"
    assert (settings.deadline_s.value, settings.abort.value) == (2.5, True)
    given = guard_settings(["streams"], 3, False, environ={GUARDS: "all", DEADLINE: "2.5"})
    assert (given.names.value, given.deadline_s.value, given.abort.value) == (("streams",), 3.0, False)
    assert given.deadline_s.source == "argument"
    none = guard_settings(environ={GUARDS: "off", DEADLINE: "off"})
    assert (none.names.value, none.deadline_s.value, none.abort.value) == ((), None, False)
    assert guard_settings(environ={GUARDS: "1"}).names.value == GUARD_NAMES
    assert guard_settings(environ={}).names.source == "default"
    assert guard_settings("teardown", environ={}).names.value == ("teardown",)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({GUARDS: "lifecycel,streams"}, "got the guard 'lifecycel', expected some of lifecycle, streams, teardown"),
        ({ABORT: "maybe"}, "got 'maybe', expected 1 or 0"),
        ({DEADLINE: "soon"}, "got 'soon', expected a number of seconds"),
        ({DEADLINE: "-1"}, "more than 0"),
        ({DEADLINE: "1e300"}, "at most 1e+09"),
        ({DEADLINE: "nan"}, "expected a number of seconds"),
        ({DEADLINE: "inf"}, "expected a number of seconds"),
    ],
)
def test_a_wrong_setting_is_one_clear_error(variables: dict[str, str], expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        guard_settings(environ=variables)
    assert expected in str(caught.value) and caught.value.context == f"environment {next(iter(variables))}"


@pytest.mark.parametrize("how", [BY_PTH, BY_PTH * 2], ids=["pth", "pth twice"])
def test_a_wrong_name_in_the_variable_is_one_notice_and_the_interpreter_starts(how: str) -> None:
    installed, said = told(f"{how}{TELL}", **{GUARDS: "lifecycel"})
    assert installed == []
    assert said.count("\n") == 0 and "'lifecycel'" in said and "expected some of" in said


def test_until_megatron_is_imported_nothing_of_torch_is() -> None:
    code = f"{BY_PTH}import sys, json; print(json.dumps([n for n in ('torch', 'megatron') if n in sys.modules]))"
    assert told(code, **{GUARDS: "all"}) == ([], "")


@pytest.mark.parametrize("how", [BY_PTH * 2, "import megatron_fixes.auto\n"], ids=["pth twice", "auto"])
def test_they_are_installed_when_megatron_is_imported(how: str) -> None:
    code = how + IMPORT.format(tree=str(tree_of("0.16.1"))) + TELL
    variables = {GUARDS: "lifecycle,teardown", "MEGATRON_FIXES": "0"}
    assert told(code, **variables) == (["lifecycle", "teardown"], "")


def test_beside_the_overlay_both_are_in_force() -> None:
    code = BY_PTH + IMPORT.format(tree=str(tree_of("0.16.1")))
    code += """import json, megatron_fixes
from megatron_fixes import guards
status = megatron_fixes.status()
print(json.dumps([guards.status().installed, len(status.in_force), [one.line for one in status.refusals]]))"""
    (installed, in_force, refusals), said = told(code, **{GUARDS: "all", "MEGATRON_FIXES": "all"})
    assert (tuple(installed), refusals, said) == (GUARD_NAMES, [], "") and in_force > 10


def test_installed_by_name_before_megatron_they_wait_for_it() -> None:
    code = "from megatron_fixes import guards\nwaiting = guards.install(['streams']).waiting\n"
    code += IMPORT.format(tree=str(tree_of("0.16.1")))
    code += "import json; print(json.dumps([waiting, guards.status().installed, guards.status().waiting]))"
    assert told(code)[0] == [["streams"], ["streams"], []]


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a release in which one function has one parameter more."""
    tree = tmp_path_factory.mktemp("changed") / "tree"
    shutil.copytree(tree_of("0.16.1"), tree)
    path = tree / "megatron/core/distributed/param_and_grad_buffer.py"
    text = path.read_text()
    known = "def start_grad_sync(self, force_all_reduce: Optional[bool] = False):"
    assert text.count(known) == 1
    path.write_text(text.replace(known, known.replace("):", ", stream=None):")))
    return tree


LEFT_ALONE = """
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as group
from megatron.core import parallel_state
alone = [hasattr(f, "__wrapped__") for f in (group.start_grad_sync, parallel_state.destroy_model_parallel)]
"""


def test_what_is_asked_for_later_holds_also_before_megatron_is_imported() -> None:
    code = BY_PTH + "from megatron_fixes import guards\nguards.install(['lifecycle'], deadline_s=30, abort=True)\n"
    code += IMPORT.format(tree=str(tree_of("0.16.1")))
    code += (
        "import json; status = guards.status(); print(json.dumps([status.installed, status.deadline_s, status.abort]))"
    )
    assert told(code, **{GUARDS: "all", DEADLINE: "2"})[0] == [list(GUARD_NAMES), 30.0, True]


def test_a_second_install_leaves_the_terms_of_the_first_unless_it_names_others() -> None:
    tree = tree_of("0.16.1")
    terms = "from megatron_fixes.guards.late import TERMS; seen.append([TERMS.deadline_s, TERMS.abort])\n"
    code = (
        IMPORT.format(tree=str(tree))
        + "import json; from megatron_fixes import guards; seen = []\n"
        + "guards.install(['lifecycle'], deadline_s=60, abort=True)\n"
        + terms
        + "guards.install(['teardown'])\n"
        + terms
        + "guards.install(deadline_s=5)\n"
        + terms
        + "print(json.dumps(seen))"
    )
    assert told(code)[0] == [[60.0, True], [60.0, True], [5.0, True]]


def test_another_signature_is_refused_by_one_notice_and_megatron_is_left_alone(changed: Path) -> None:
    code = AT_START + IMPORT.format(tree=str(changed)) + LEFT_ALONE
    found, said = told(code + "import json; print(json.dumps(alone))", **{GUARDS: "all"})
    assert found == [False, False]
    assert said.count("\n") == 0
    assert "start_grad_sync(self, force_all_reduce, stream), expected (self) or (self, force_all_reduce)" in said


def test_another_signature_is_an_error_for_who_installs_by_name(changed: Path) -> None:
    code = f"""{IMPORT.format(tree=str(changed))}
from megatron_fixes import guards
try: guards.install()
except Exception as error: name = type(error).__name__
{LEFT_ALONE}
rest = guards.install(["teardown"]).installed
import json; print(json.dumps([name, alone, rest]))"""
    assert told(code)[0] == ["RefusedError", [False, False], ["teardown"]]


def test_with_the_fixes_on_guards_leave_the_work_to_them() -> None:
    drills = ("identity", "gradients", "abandoned", "first_batch", "teardown", "streams")
    found = drilled(tree_of("0.16.1"), drills, fixes="all")
    assert found["identity"]["put_back"] and found["identity"]["second"]
    for rank in found["gradients"]:
        plain, *guarded = (phase["digests"] for phase in rank["result"].values())
        assert guarded == [plain, plain]
    for rank in found["abandoned"]["both"]:
        assert all(report["wrong"] == 0 for steps in rank["result"].values() for report in steps.values())
        # MF0002 drains them.
        assert named(rank, "abandoned-step-drained") == []
    for rank in found["first_batch"]["both"]:
        assert rank["result"]["within"] == rank["result"]["after"] == rank["result"]["whole"]
        # MF0004 counts anew.
        assert named(rank, "abandoned-first-batch") == []
    for rank in found["teardown"]:
        assert rank["result"]["left"] == 0 and named(rank, "process-groups-left") == []
    for rank in found["streams"]:
        assert rank["result"]["races"] == 0 and rank["events"] == []


def test_on_a_patched_tree_they_are_put_on_and_taken_off(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(tree_of("0.16.1"), tree)
    applied = python("-m", "megatron_fixes", "apply", str(tree))
    assert applied.returncode == 0, applied.stdout + applied.stderr
    identity = drilled(tree, ("identity",))["identity"]
    assert identity["put_back"] and identity["second"] and tuple(identity["installed"]) == GUARD_NAMES
