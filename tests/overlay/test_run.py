# SPDX-License-Identifier: Apache-2.0
"""What ``megatron-fixes run`` starts runs mended code, children included, and its exit code is the command's."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from megatron_fixes import config
from megatron_fixes.overlay.process import Process

if TYPE_CHECKING:
    from pathlib import Path

STATUS = "import json, megatron_fixes; print(json.dumps(megatron_fixes.status().to_json()))"
RUN = ["-m", "megatron_fixes", "run"]


def test_a_script_with_arguments_runs_mended_code(env: Any, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import sys\nimport megatron.core.distributed\n{STATUS}\nsys.exit(int(sys.argv[1]))\n")
    done = env.start([*RUN, "--", str(script), "7"], on=None, check=False)
    assert done.returncode == 7
    assert "MF9001" in json.loads(done.stdout)["in_force"]


def test_only_names_what_goes_in_and_children_have_it_too(env: Any) -> None:
    child = f"import megatron.core.distributed\n{STATUS}"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    done = env.start([*RUN, "--only", "MF9001", "--", "-c", code], on=None)
    assert json.loads(done.stdout)["in_force"] == ["MF9001"]


def test_slugs_are_as_good_as_ids() -> None:
    slug = "stale-grad-reduce-handle"
    for asked, ids in (((slug,), ("MF0002",)), (("MF0002", slug, "al"), ("MF0002", "al")), (("all",), ("all",))):
        assert Process(config.overlay_settings(fixes=asked), None).asked == ids


def test_the_name_that_was_probably_meant_is_told(env: Any) -> None:
    done = env.run("import megatron.core.distributed", on="al,MF901")
    assert "al is not in force: no fix has that id; did you mean all? correct MEGATRON_FIXES\n" in done.stderr
    assert "MF901 is not in force: no fix has that id; did you mean MF9001? correct MEGATRON_FIXES\n" in done.stderr


def test_a_fix_that_is_asked_for_by_name_and_not_needed_is_told(env: Any) -> None:
    newer = str(env.base / "cache" / "releases" / "9.2.0")
    code = "import megatron.core.distributed, megatron_fixes; print(megatron_fixes.status())"
    line = env.run(code, on="MF9002", PYTHONPATH=newer).stdout.splitlines()[0]
    assert line.endswith(f"no fix in force, megatron-core 9.2.0 at {newer}; MF9002 not needed by 9.2.0")
    assert env.status("import megatron.core.distributed", on="MF9002", PYTHONPATH=newer)["not_needed"] == ["MF9002"]
    assert env.status("import megatron.core.distributed", PYTHONPATH=newer)["not_needed"] == []


def test_strict_stops_where_a_fix_can_not_be_in_force(env: Any, tree: Any) -> None:
    drifted = tree(megatron__core__distributed__buffer="class Buffer:\n    pass\n")
    code = "import megatron.core.distributed\nprint('trained')"
    done = env.start([*RUN, "--strict", "--", "-c", code], on=None, check=False, PYTHONPATH=str(drifted))
    assert done.returncode != 0
    assert "trained" not in done.stdout
    assert "is not in force" in done.stderr


def test_a_program_that_is_not_there_is_the_users_mistake(env: Any) -> None:
    done = env.start([*RUN, "--", "no-such-program"], on=None, check=False)
    assert done.returncode == 2
    assert "can't start no-such-program" in done.stderr
