# SPDX-License-Identifier: Apache-2.0
"""One proof on one release, instead of all on all: a rehearsal's."""

from __future__ import annotations

import subprocess
import sys


def test_one_fix_is_proved_on_one_release() -> None:
    """The defect is there before and gone after."""
    command = [sys.executable, "-m", "megatron_fixes", "prove", "MF0003", "--release", "0.16.1"]
    assert subprocess.run([*command, "--variant", "vanilla,patched"], check=False).returncode == 0
