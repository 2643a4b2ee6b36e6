# SPDX-License-Identifier: Apache-2.0
"""What the order of launches relies on: by device, by the variable, and by when that was set."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_fixes import events
from megatron_fixes.guards import streams
from megatron_fixes.guards.launch_order import VARIABLE, LaunchFacts, judge

HOPPER, BLACKWELL, RTX = (9, 0), (10, 0), (12, 0)


@pytest.mark.parametrize(
    ("needs", "capability", "setting", "started", "then", "verdict"),
    [
        ("all-reduce", HOPPER, "1", False, None, "kept"),
        ("all-reduce", HOPPER, "1", True, "1", "kept"),
        ("all-reduce", (8, 0), "1", False, "8", "kept"),
        ("all-reduce", HOPPER, "1", True, None, "set-too-late"),
        ("all-reduce", HOPPER, "1", True, "8", "set-too-late"),
        ("all-reduce", HOPPER, None, False, None, "not-kept"),
        ("sequence parallelism", HOPPER, "32", True, "32", "not-kept"),
        ("sequence parallelism", HOPPER, "", False, None, "not-kept"),
        ("all-reduce", BLACKWELL, None, False, None, "not-asked-for"),
        ("all-reduce", BLACKWELL, "1", True, None, "not-asked-for"),
        ("sequence parallelism", RTX, "32", False, None, "not-asked-for"),
        ("", HOPPER, None, False, None, "not-needed"),
    ],
)
def test_verdict(
    needs: str, capability: tuple[int, int], setting: str | None, started: bool, then: str | None, verdict: str
) -> None:
    told, why = judge(LaunchFacts(needs, capability, setting, started, then))
    assert told == verdict
    if verdict in ("not-kept", "set-too-late"):
        assert VARIABLE in why and needs in why and "results are the same" in why


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (SimpleNamespace(allreduce_dgrad=True, sequence_parallel=False), ["all-reduce"]),
        (SimpleNamespace(allreduce_dgrad=False, sequence_parallel=True), ["sequence parallelism"]),
        (SimpleNamespace(allreduce_dgrad=False, sequence_parallel=False), []),
    ],
)
def test_it_is_told_of_a_layer_that_counts_on_it(layer: Any, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: HOPPER)
    monkeypatch.delenv(VARIABLE, raising=False)
    heard: list[Any] = []
    end = events.subscribe(heard.append)
    assert streams.tell_launch_order(layer) == bool(told)
    end()
    assert [event.fields["needs"] for event in heard if event.fields["verdict"] == "not-kept"] == told


def test_it_is_judged_once_a_process_and_not_before_cuda_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = SimpleNamespace(allreduce_dgrad=True, sequence_parallel=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: HOPPER)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    heard: list[Any] = []
    end = events.subscribe(heard.append)
    streams.look_first()
    streams.made_column_parallel(lambda: None, layer, (), {})
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert heard == []
    for _ in range(2):
        streams.made_column_parallel(lambda: None, layer, (), {})
    end()
    assert [event.name for event in heard] == ["launch-order"]
