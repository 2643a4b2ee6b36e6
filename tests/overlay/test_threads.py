# SPDX-License-Identifier: Apache-2.0
"""A cold start never waits for an import that waits for it, whatever other threads import meanwhile.

Python asks finders under its global import lock; a finder that imports there can stop the process for ever.
"""

from __future__ import annotations

from typing import Any

import pytest

# Each is among what deciding needs, and imports more in turn.
NEEDED = ("unidiff", "msgspec", "packaging.version", "megatron_fixes.catalog")
MEANWHILE = """
import importlib, threading
import megatron.core
thread = threading.Thread(target=importlib.import_module, args=({name!r},))
thread.start()
from megatron.core.distributed.buffer import Buffer
thread.join()
print(Buffer([1, 2]).start())
"""


@pytest.mark.parametrize("name", NEEDED)
def test_a_thread_that_imports_what_deciding_needs_does_not_stop_a_cold_start(env: Any, name: str) -> None:
    assert env.run(MEANWHILE.format(name=name)).stdout == "3\n"


def test_all_is_decided_while_megatron_core_is_imported(env: Any) -> None:
    code = "import sys\nimport megatron.core\nprint('megatron_fixes.overlay.rules' in sys.modules)"
    assert [env.run(code).stdout for _ in range(2)] == ["True\n", "False\n"]  # cold, then from the cache


def test_many_threads_that_import_at_once_all_get_the_patched_module(env: Any) -> None:
    names = ["megatron.core.distributed.buffer", "megatron.core.pair.left", "json.tool", *NEEDED] * 4
    code = f"""
import importlib, threading
threads = [threading.Thread(target=importlib.import_module, args=(name,)) for name in {names!r}]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
import megatron.core.distributed.buffer as buffer, megatron.core.pair.left as left
print(buffer.__megatron_fixes__, left.left())
"""
    assert env.run(code).stdout == "('MF9001', 'MF9002') left\n"


def test_the_loader_of_megatron_core_is_left_as_it_was(env: Any) -> None:
    code = "import megatron.core as c\nprint(type(c.__loader__).__name__, type(c.__spec__.loader).__name__)"
    assert env.run(code).stdout == "SourceFileLoader SourceFileLoader\n"
