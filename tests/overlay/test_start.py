# SPDX-License-Identifier: Apache-2.0
"""Every way to start a Python: the wheel's ``.pth`` turns the overlay on or leaves the process untouched.

Not handled here: torchrun and DataLoader workers (tests/overlay_torch).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULT = "from megatron.core.distributed import Buffer; print(Buffer([1, 2]).finish())"
# Unpatched: -(1 + 2) * 1. Patched: (1 + 2) * 2.
PLAIN, MENDED = "-3", "6"


@pytest.mark.parametrize("word", [None, "", "0", "none", "NONE", " off ", " 0"])
def test_off_it_does_nothing_at_all(word: str | None, env: Any) -> None:
    code = f"""{RESULT}
import sys
print([name for name in sys.modules if name.startswith("megatron_fixes")])
print([type(finder).__name__ for finder in sys.meta_path if "verlay" in type(finder).__name__])"""
    assert env.run(code, on=word).stdout.split("\n")[:3] == [PLAIN, "[]", "[]"]
    assert list(env.home.iterdir()) == []


@pytest.mark.parametrize("word", ["all", "ALL", " mf9001,MF9002 ", "MF9002", "MF9001 MF9002"])
def test_on_by_the_variable_alone(word: str, env: Any) -> None:
    done = env.run(RESULT, on=word)
    assert (done.stdout.strip(), done.stderr) == (MENDED, "")


@pytest.mark.parametrize("flags", [["-O"], ["-OO"], ["-E"], ["-I"], ["-s"], ["-B"], ["-X", "utf8"], ["-X", "dev"]])
def test_on_with_the_flags_of_python(flags: list[str], env: Any) -> None:
    assert env.run(RESULT, *flags).stdout.strip() == MENDED
    assert env.run(RESULT, *flags).stdout.strip() == MENDED


@pytest.mark.skipif(sys.version_info < (3, 11), reason="python -P came with 3.11")
def test_on_with_a_safe_path(env: Any) -> None:
    assert env.run(RESULT, "-P").stdout.strip() == MENDED


def test_without_site_it_is_off_and_says_why(env: Any) -> None:
    path = os.pathsep.join([str(env.site), *(p for p in (env.site / "dependencies.pth").read_text().split())])
    assert env.run(RESULT, "-S", PYTHONPATH=path).stdout.strip() == PLAIN
    code = "import json, megatron_fixes.overlay as o; print(json.dumps([o.status().why, o.where_from().pth_problem]))"
    why, problem = json.loads(env.run(code, "-S", PYTHONPATH=path).stdout)
    assert "its .pth file did not run" in why
    assert "python -S reads no .pth files" in problem
    assert env.run(f"import megatron_fixes.auto\n{RESULT}", "-S", PYTHONPATH=path).stdout.strip() == MENDED


def test_where_from_names_the_pth_and_the_tree(env: Any) -> None:
    code = "import json, megatron_fixes.overlay as o; print(json.dumps(o.where_from().to_json()))"
    facts = json.loads(env.run(code).stdout)
    assert facts["pth_found"] == [str(env.site / "megatron-fixes.pth")]
    assert (facts["pth_runs"], facts["pth_problem"], facts["installed_by"]) == (True, "", "pth")
    assert facts["trees"] == [str(env.site)]
    assert facts["finders_before"] == []
    assert [setting["name"] for setting in facts["settings"]] == [
        "MEGATRON_FIXES",
        "MEGATRON_FIXES_STRICT",
        "MEGATRON_FIXES_CACHE",
        "MEGATRON_GUARDS",
        "MEGATRON_GUARDS_DEADLINE_S",
        "MEGATRON_GUARDS_ABORT",
    ]


def test_a_pth_that_runs_twice_installs_once(env: Any) -> None:
    code = f"""import site, sys
site.addsitedir({str(env.site)!r}, set()); exec(open({str(env.site / "megatron-fixes.pth")!r}).read())
import megatron_fixes.auto, megatron_fixes.overlay; megatron_fixes.overlay.install()
print(sum(type(finder).__name__ == "OverlayFinder" for finder in sys.meta_path), type(sys.meta_path[0]).__name__)"""
    assert env.run(code).stdout.split() == ["1", "OverlayFinder"]


def test_as_a_script_and_as_a_module(env: Any) -> None:
    (env.home / "script.py").write_text(RESULT)
    assert env.start(["script.py"]).stdout.strip() == MENDED
    assert env.start(["-m", "script"]).stdout.strip() == MENDED
    assert env.start(["-m", "megatron.core.distributed.buffer"]).returncode == 0


CHILDREN = """import multiprocessing as mp, subprocess, sys
{first}
def work(queue):
    from megatron.core.distributed import Buffer
    queue.put(Buffer([1, 2]).finish())
def main():
    import megatron.core
    context = mp.get_context(sys.argv[1])
    queue = context.Queue()
    child = context.Process(target=work, args=(queue,)); child.start()
    print(queue.get(timeout=30)); child.join()
    print(subprocess.run([sys.executable, "-c", {result!r}], capture_output=True, text=True).stdout.strip())
if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
@pytest.mark.parametrize("first", ["", "import megatron_fixes.auto"])
def test_children_are_covered(method: str, first: str, env: Any) -> None:
    (env.home / "script.py").write_text(CHILDREN.format(first=first, result=RESULT))
    done = env.start(["script.py", method], on=None if first else "all")
    assert done.stdout.split() == [MENDED, MENDED]


def test_auto_sets_the_variable_and_keeps_what_it_says(env: Any) -> None:
    code = f"import megatron_fixes.auto, os; print(os.environ['MEGATRON_FIXES'])\n{RESULT}"
    assert env.run(code, on=None).stdout.split() == ["all", MENDED]
    assert env.run(code, on="").stdout.split() == ["all", MENDED]
    assert env.run(code, on="MF9001").stdout.split() == ["MF9001", "3"]
    assert env.run(code, on="0").stdout.split() == ["0", PLAIN]


def test_uninstall_gives_the_original_back(env: Any) -> None:
    code = f"""import importlib, megatron_fixes.overlay as overlay
{RESULT}
import megatron.core.distributed.buffer as buffer
overlay.uninstall(); importlib.reload(buffer); print(buffer.Buffer([1, 2]).finish())
status = overlay.status(); print(status.on, status.why)"""
    assert env.run(code).stdout.splitlines() == [
        MENDED,
        PLAIN,
        "False uninstalled; modules that were loaded before stay patched",
    ]


def test_settings_given_as_arguments(env: Any) -> None:
    code = f"""from megatron_fixes import config, overlay
overlay.install(config.overlay_settings(fixes=["MF9001"]))
{RESULT}
try: overlay.install(config.overlay_settings(fixes=["all"]))
except Exception as error: print(type(error).__name__)"""
    assert env.run(code, on=None).stdout.split() == ["3", "UsageError"]


def test_the_pth_and_the_settings_agree_on_what_off_means() -> None:
    from megatron_fixes import config

    lines = (ROOT / "megatron-fixes.pth").read_text().splitlines()
    assert [variable for line in lines for variable in (config.FIXES, config.GUARDS) if f'"{variable}"' in line] == [
        config.FIXES,
        config.GUARDS,
    ]
    # Python runs each line of a .pth by itself.
    assert all(line.startswith("import ") and repr(config.OFF).replace("'", '"') in line for line in lines)


def test_off_costs_less_than_half_a_millisecond() -> None:
    line = compile((ROOT / "megatron-fixes.pth").read_text(), "pth", "exec")
    spent = []
    for _ in range(200):
        began = time.perf_counter()
        exec(line, {})
        spent.append(time.perf_counter() - began)
    assert "MEGATRON_FIXES" not in os.environ
    assert statistics.median(spent) < 0.0005


def test_off_loads_no_module_more_than_a_python_without_us(env: Any) -> None:
    code = "import sys; print(sorted(sys.modules))"
    with_us = env.run(code, on=None).stdout
    pth = env.site / "megatron-fixes.pth"
    aside = pth.rename(pth.with_suffix(".aside"))
    try:
        assert env.run(code, on=None).stdout == with_us
    finally:
        aside.rename(pth)


def test_site_packages_stay_as_they_were(env: Any) -> None:
    def seen() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in env.site.rglob("*.py") if p.is_relative_to(env.site / "megatron")}

    before = seen()
    subprocess.run(["chmod", "-R", "a-w", str(env.site / "megatron")], check=True)
    try:
        assert env.run(RESULT).stdout.strip() == MENDED
    finally:
        subprocess.run(["chmod", "-R", "u+w", str(env.site / "megatron")], check=True)
    assert seen() == before


def test_a_checkout_on_the_path_goes_before_the_installed_one(env: Any, tree: Any) -> None:
    checkout = tree("checkout")
    status = env.status(PYTHONPATH=str(checkout))
    assert status["root"] == str(checkout)
    assert status["modules"][0]["origin"].startswith(str(checkout))
    assert status["in_force"] == ["MF9001", "MF9002"]


@pytest.mark.parametrize("word", ["1", "yes", "True", "ON"])
def test_words_that_mean_yes_mean_all(word: str, env: Any) -> None:
    assert env.status(on=word)["in_force"] == env.status(on="all")["in_force"]


@pytest.mark.parametrize("word", ["no", "False", "OFF", "none", "0", " "])
def test_words_that_mean_no_turn_it_off(word: str, env: Any) -> None:
    assert env.run("import sys; print('megatron_fixes' in sys.modules)", on=word).stdout == "False\n"


def test_the_status_prints_as_a_line_that_says_what_is_in_force(env: Any) -> None:
    code = "import megatron.core.distributed, megatron.core.pair.left, megatron.core.pair.right, megatron_fixes"
    printed = env.run(f"{code}\nprint(megatron_fixes.status())").stdout
    assert printed.startswith("megatron-fixes ") and printed.count("\n") == 1
    assert "MF9001, MF9002, MF9003 in force, megatron-core 9.1.0 at " in printed
    assert "off (MEGATRON_FIXES is not set)" in env.run(f"{code}\nprint(megatron_fixes.status())", on=None).stdout


def test_what_apply_put_in_is_said_to_be_in_the_files(env: Any, tree: Any) -> None:
    code = "import megatron.core.distributed, megatron.core.pair, megatron_fixes"
    for only, said in (
        ("MF9001,MF9002,MF9003", "no fix put in at import, MF9001, MF9002, MF9003 in the files already, "),
        ("MF9001", "MF9002 in force, MF9001 in the files already, "),
    ):
        applied = tree(only)
        env.start(["-m", "megatron_fixes", "apply", str(applied), "--only", only], on=None)
        printed = env.run(f"{code}\nprint(megatron_fixes.status())", PYTHONPATH=str(applied)).stdout
        assert f": {said}megatron-core 9.1.0 at {applied}" in printed
        assert env.status(code, PYTHONPATH=str(applied))["in_files"] == only.split(",")
