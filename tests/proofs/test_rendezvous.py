# SPDX-License-Identifier: Apache-2.0
"""Without loopback no rank meets another: ``prove`` says so before it runs anything, and waits for no time-out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_fixes.errors import UsageError
from megatron_fixes.proofs import rendezvous

ROOT = Path(__file__).resolve().parents[2]
# A network of its own has a loopback interface that is down.
CUT_OFF = ["unshare", "--map-root-user", "--net"]


def test_where_ranks_can_meet_nothing_is_said() -> None:
    rendezvous.require_loopback()


def test_an_address_that_can_not_be_had_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "LOOPBACK", "192.0.2.1")
    with pytest.raises(UsageError, match=r"on a connection to 192\.0\.2\.1, expected ranks to meet over loopback"):
        rendezvous.require_loopback()


def test_prove_says_at_once_that_loopback_is_down() -> None:
    if shutil.which("unshare") is None or subprocess.run([*CUT_OFF, "true"], capture_output=True).returncode:
        pytest.skip("needs unshare, and leave to make a network namespace")
    command = [*CUT_OFF, sys.executable, "-m", "megatron_fixes", "prove", "MF0003", "--release", "0.16.1"]
    began = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "error: got 'Network is unreachable' on a connection to 127.0.0.1, expected ranks to meet over loopback",
        "  hint: Bring the interface up (ip link set lo up), or prove where it is up.",
    ]
    assert time.monotonic() - began < 30
