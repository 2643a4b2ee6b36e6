# SPDX-License-Identifier: Apache-2.0
"""A patch's head is read whole or not at all, and every fault is named with its line."""

from __future__ import annotations

import pytest

from megatron_fixes.catalog.header import parse_header

HEAD = """Description: Order one stream after another
 Symptom: the loss drifts.
 .
 Cause: nothing orders them,
 and nobody noticed.
 .
 After this patch: one waits.
Fix-Id: MF0001
Applies-To: 0.16.0 0.16.1
Fixed-In: 0.17.0 (commit 3548385ac3, pull request 3693)
Upstream-Status: Backport [own change]
Numerics: changing
Requires: MF0003
Proof: megatron_fixes.proofs.mf0001
Origin: vendor
Bug: https://github.com/NVIDIA/Megatron-LM/issues/3670
Forwarded: not-needed
Last-Update: 2026-11-29
---
diff --git a/x b/x
"""


def test_a_sound_head_gives_its_fields() -> None:
    header, faults = parse_header(HEAD, "p")
    assert header is not None
    assert faults == []
    assert header.applies_to == ("0.16.0", "0.16.1")
    assert header.requires == ("MF0003",)
    assert header.fixed_release == "0.17.0"
    assert header.paragraphs["Cause"] == "nothing orders them, and nobody noticed."


def test_an_open_defect_has_no_fixed_release() -> None:
    text = HEAD.replace("0.17.0 (commit 3548385ac3, pull request 3693)", "open").replace(
        "Backport [own change]", "Pending"
    )
    header, _ = parse_header(text, "p")
    assert header is not None
    assert header.fixed_release is None


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("Fix-Id: MF0001", "Fix-Id: MF1", 8, "Fix-Id: got 'MF1'"),
        ("Applies-To: 0.16.0 0.16.1", "Applies-To: >=0.16", 9, "exact releases"),
        ("Fixed-In: 0.17.0 (commit 3548385ac3, pull request 3693)", "Fixed-In: soon", 10, "Fixed-In: got 'soon'"),
        ("Backport [own change]", "Merged", 11, "Upstream-Status: got 'Merged'"),
        ("Numerics: changing", "Numerics: maybe", 12, "Numerics"),
        ("Requires: MF0003", "Requires: MF0003,MF0004", 13, "Requires"),
        ("Bug: https://github.com", "Bug: http://github.com", 16, "Bug"),
        ("2026-11-29", "yesterday", 18, "Last-Update"),
        ("Origin: vendor\n", "", 1, "field Origin is missing"),
        ("Origin: vendor", "Origin: vendor\nOrigin: vendor", 16, "field Origin a second time, first in line 15"),
        ("Origin: vendor", "Originn: vendor", 15, "unknown field Originn"),
        ("Origin: vendor", "vendor", 15, "expected 'Field: value'"),
        ("Origin: vendor", "Origin: vendor\n more", 16, "over a second line"),
        (" After this patch: one waits.\n", "", 1, "no paragraph 'After this patch:'"),
        ("---\n", "", 19, "no '---' line"),
    ],
)
def test_each_fault_is_named_with_its_line(old: str, new: str, line: int, message: str) -> None:
    assert old in HEAD
    header, faults = parse_header(HEAD.replace(old, new), "p")
    assert header is None
    assert any(fault.line == line and message in fault.message for fault in faults), faults


def test_all_faults_come_in_one_run() -> None:
    text = HEAD.replace("MF0001", "MF1").replace("changing", "maybe").replace("vendor", "")
    _, faults = parse_header(text, "p")
    assert len(faults) == 3
