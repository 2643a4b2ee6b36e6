# SPDX-License-Identifier: Apache-2.0
"""Other import hooks keep their say: wrapt, typeguard, editable installs, and finders that call us back."""

from __future__ import annotations

from typing import Any

import pytest

RESULT = "from megatron.core.distributed import Buffer; print(Buffer([1, 2]).finish())"
WRAPT = """import wrapt, sys
seen = []
wrapt.register_post_import_hook(lambda module: seen.append(module.__name__), "megatron.core.distributed.buffer")
"""
TYPEGUARD = """from typeguard import install_import_hook
install_import_hook(["megatron"])
"""
OURS_FIRST = "import megatron_fixes.auto\n"


def needs(env: Any, name: str) -> None:
    if env.run(f"import importlib.util as u; print(u.find_spec({name!r}) is None)").stdout.strip() == "True":
        pytest.skip(f"{name} is not installed")


@pytest.mark.parametrize("order", ["theirs first", "ours first"])
def test_hooks_of_wrapt_run_once_on_the_patched_module(order: str, env: Any) -> None:
    needs(env, "wrapt")
    # wrapt puts its finder first when it is imported: before ours where ours is there already.
    first = {"theirs first": WRAPT, "ours first": WRAPT + OURS_FIRST}[order]
    on = None if order == "ours first" else "all"
    done = env.run(
        f"{first}{RESULT}\nprint(seen)\nimport megatron_fixes; print(megatron_fixes.status().in_force)", on=on
    )
    assert done.stdout.splitlines() == ["6", "['megatron.core.distributed.buffer']", "('MF9001', 'MF9002')"]
    assert done.stderr == ""


def test_typeguard_behind_ours_checks_the_patched_text(env: Any, tree: Any) -> None:
    needs(env, "typeguard")
    plain = (env.site / "megatron/core/distributed/buffer.py").read_text()
    root = tree("typed", megatron__core__distributed__buffer=plain + "\n\ndef typed(x: int) -> int:\n    return x\n")
    code = f"""{TYPEGUARD}{OURS_FIRST}{RESULT}
from megatron.core.distributed.buffer import typed
try: typed("x")
except Exception as error: print(type(error).__name__)
import megatron_fixes; print(megatron_fixes.status().in_force)"""
    done = env.run(code, on=None, PYTHONPATH=str(root))
    assert done.stdout.splitlines() == ["6", "TypeCheckError", "('MF9001', 'MF9002')"]
    assert list(env.cache.rglob("*.code")) == []


def test_typeguard_in_front_of_ours_is_noticed(env: Any) -> None:
    needs(env, "typeguard")
    done = env.run(f"{TYPEGUARD}{RESULT}\nimport this_is_not_there", check=False)
    assert done.stdout.strip() == "-3"
    assert "megatron.core.distributed.buffer was loaded by another import hook, put in front of ours (" in done.stderr
    assert "typeguard.TypeguardFinder" in done.stderr
    strict = env.run(f"{TYPEGUARD}{RESULT}\nimport wave\nprint('on')", MEGATRON_FIXES_STRICT="1", check=False)
    assert (strict.returncode, strict.stdout.count("on")) == (1, 0)


def test_an_editable_megatron_is_patched(env: Any, tree: Any) -> None:
    root = tree("editable")
    hook = f"""import sys
from importlib.util import spec_from_file_location
from pathlib import Path
class Editable:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        place = Path({str(root)!r}, *name.split("."))
        if name.startswith("megatron.") or name == "megatron":
            for file in (place / "__init__.py", place.with_suffix(".py")):
                if file.exists(): return spec_from_file_location(name, file)
sys.meta_path.append(Editable)
sys.path[:] = [p for p in sys.path if p != {str(env.site)!r}] + [{str(root)!r}]
"""
    status = env.status(f"import megatron_fixes.overlay.process, json\n{hook}{RESULT}")
    assert status["root"] == str(root)
    assert status["in_force"] == ["MF9001", "MF9002"]


@pytest.mark.parametrize("place", ["insert(0, Caller())", "append(Caller())", "insert(1, Caller())"])
def test_a_finder_that_asks_all_others_does_not_go_round_for_ever(place: str, env: Any) -> None:
    code = f"""import sys
asked = []
class Caller:
    def find_spec(self, name, path=None, target=None):
        asked.append(name)
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, target)) is not None:
                return spec
sys.meta_path.{place}
{RESULT}
import megatron_fixes; print(megatron_fixes.status().in_force, asked.count("megatron.core.distributed.buffer") < 2)"""
    assert env.run(code).stdout.splitlines() == ["6", "('MF9001', 'MF9002') True"]


def test_a_loader_of_its_own_kind_is_refused(env: Any) -> None:
    code = f"""import sys
from importlib.machinery import PathFinder, SourceFileLoader
class Own(SourceFileLoader):
    def get_code(self, name):
        return compile(self.get_data(self.path).replace(b"factor = 1", b"factor = 5"), self.path, "exec")
class Hook:
    def find_spec(self, name, path=None, target=None):
        spec = PathFinder.find_spec(name, path)
        if name == "megatron.core.distributed.buffer": spec.loader = Own(name, spec.origin)
        return spec
sys.meta_path.insert(1, Hook())
{RESULT}"""
    done = env.run(code)
    assert done.stdout.strip() == "-15"
    assert "its loader __main__.Own has its own get_code" in done.stderr


def test_tools_that_look_for_a_spec_get_the_patched_one(env: Any) -> None:
    code = """import importlib.util as u, sys
spec = u.find_spec("megatron.core.distributed.buffer")
print(type(spec.loader).__name__, spec.name in sys.modules and sys.modules[spec.name].__spec__.origin == spec.origin)
print(u.find_spec("megatron.core.distributed.absent"), u.find_spec("megatron.core.plain").origin[-8:])"""
    assert env.run(code).stdout.splitlines() == ["OverlayLoader True", "None plain.py"]
