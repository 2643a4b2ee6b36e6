# SPDX-License-Identifier: Apache-2.0
"""A release is in the cache whole or not at all, and what can't be fetched is one clear error."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from megatron_fixes.catalog.data import matrix_path
from megatron_fixes.catalog.matrix import load_matrix
from megatron_fixes.errors import RefusedError, UsageError
from megatron_fixes.proofs.releases import cached, fetch

if TYPE_CHECKING:
    from pathlib import Path

MATRIX = load_matrix(matrix_path())


def test_an_unknown_release_is_the_users_mistake_and_the_known_ones_are_named() -> None:
    with pytest.raises(UsageError, match=r"got release '9\.9\.9'") as caught:
        fetch("9.9.9", MATRIX)
    assert "0.16.1" in caught.value.hint


def test_without_an_index_the_fetch_is_refused_and_the_cache_stays_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_FIXES_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(RefusedError, match=r"could not download megatron-core 0\.16\.1") as caught:
        fetch("0.16.1", MATRIX)
    assert "MEGATRON_FIXES_CACHE" in caught.value.hint
    assert list((tmp_path / "releases").iterdir()) == []


def test_an_index_that_can_not_be_reached_is_named_as_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    # Nothing listens on the port "discard" of this machine.
    settings = {"CONFIG_FILE": os.devnull, "INDEX_URL": "http://127.0.0.1:9/simple", "RETRIES": "1", "TIMEOUT": "5"}
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("MEGATRON_FIXES_CACHE", str(tmp_path))
    with pytest.raises(RefusedError) as caught:
        fetch("0.16.1", MATRIX)
    message = "could not download megatron-core 0.16.1: pip could not reach the package index (NewConnectionError: "
    assert caught.value.message.startswith(message) and caught.value.message.endswith("Connection refused)")


def test_an_incomplete_folder_is_not_taken_for_a_release_and_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGATRON_FIXES_CACHE", str(tmp_path))
    half = tmp_path / "releases" / "0.14.0" / "megatron"
    half.mkdir(parents=True)
    assert cached("0.14.0") is None
    tree = fetch("0.14.0", MATRIX)
    assert (tree / "megatron" / "core" / "distributed" / "param_and_grad_buffer.py").is_file()
    assert cached("0.14.0") == tree
    assert [path.name for path in (tmp_path / "releases").iterdir()] == ["0.14.0"]


def test_two_fetches_at_once_both_succeed(tmp_path: Path) -> None:
    environment = {**os.environ, "MEGATRON_FIXES_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "megatron_fixes.proofs.releases", "0.14.0"]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0] == outputs[1]


def test_a_cache_that_can_not_be_used_is_the_users_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MEGATRON_FIXES_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="can't use the cache folder") as caught:
        fetch("0.16.1", MATRIX)
    assert "MEGATRON_FIXES_CACHE" in caught.value.hint
