# SPDX-License-Identifier: Apache-2.0
"""A path that is shown is the same path when it is pasted into a shell, whatever bytes it holds."""

from __future__ import annotations

import os
import subprocess

import pytest

from megatron_fixes.patching.shell import quote, shown

NAMES = ["plain", "two words", "it's", "$HOME", "b\udcff", "a\nb", "tab\t'q\\", "\x1b[31m", "\x01f", "é", "-x", ""]


@pytest.mark.parametrize("name", NAMES)
def test_bash_reads_back_the_same_bytes(name: str) -> None:
    done = subprocess.run(["bash", "-c", f"printf %s {quote(name)}"], capture_output=True, check=True, timeout=60)
    assert done.stdout == os.fsencode(name)


def test_what_is_shown_has_no_bytes_that_a_terminal_obeys_and_plain_names_stay_as_they_are() -> None:
    assert shown("two words é") == "two words é"
    assert all(shown(name).isprintable() for name in NAMES)
    assert shown("b\udcff") == r"$'b\xff'"
