# SPDX-License-Identifier: Apache-2.0
"""Which entry of torch's list a device runs, as the compatibility guides of CUDA say it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_fixes.machine.code import capability, code_for

WHEEL = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"
VERSIONS = st.tuples(st.integers(5, 12), st.integers(0, 9))


@pytest.mark.parametrize(
    ("names", "device", "expected"),
    [
        (WHEEL, (8, 9), "sm_86"),
        (WHEEL, (8, 0), "sm_80"),
        (WHEEL, (10, 3), "sm_100"),
        (WHEEL, (12, 1), "sm_120"),
        (WHEEL, (7, 0), None),
        (WHEEL, (6, 1), None),
        ("sm_86", (8, 0), None),
        ("sm_80", (9, 0), None),
        ("sm_80 compute_80", (9, 0), "compute_80"),
        ("sm_80 compute_90", (8, 0), "sm_80"),
        ("compute_90", (8, 9), None),
        ("sm_90a", (9, 0), "sm_90a"),
        ("sm_100a", (10, 3), None),
        ("sm_100f", (10, 3), "sm_100f"),
        ("sm_100f", (12, 0), None),
        ("compute_100f", (12, 0), None),
        ("compute_90a", (10, 0), None),
        ("", (9, 0), None),
        ("gfx90a gfx942", (9, 0), None),
    ],
)
def test_the_nearest_code_is_found(names: str, device: tuple[int, int], expected: str | None) -> None:
    found = code_for(names, device)
    assert (found.name if found else None) == expected
    assert found is None or found.ptx == found.name.startswith("compute")


@given(built=VERSIONS, device=VERSIONS)
def test_machine_code_runs_within_its_major_version_and_not_below_its_minor(
    built: tuple[int, int], device: tuple[int, int]
) -> None:
    found = code_for("sm_{}{}".format(*built), device)
    assert (found is not None) == (built[0] == device[0] and built[1] <= device[1])


@pytest.mark.parametrize(("text", "expected"), [("8.9", (8, 9)), ("12.0", (12, 0)), ("[N/A]", None), ("", None)])
def test_a_capability_is_two_numbers(text: str, expected: tuple[int, int] | None) -> None:
    assert capability(text) == expected
