# SPDX-License-Identifier: Apache-2.0
"""A glance at the machine asks for a closer look exactly where the rules would stop ``apply`` by the same files."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

from .conftest import Parts

BOTH = (
    "import sys; from pathlib import Path; from megatron_fixes.machine import glance\n"
    "import megatron_fixes; path = Path(megatron_fixes.__file__).parent / 'catalog' / 'matrix.json'\n"
    "print(glance.may_not_work(Path(sys.argv[1]), path), 'msgspec' in sys.modules, 'packaging' in sys.modules)\n"
    "from megatron_fixes.catalog.matrix import load_matrix; from megatron_fixes.machine import reading, rules\n"
    "found = rules.judge(reading.from_files(proc=Path(sys.argv[1])), load_matrix(path))\n"
    "print(any(finding.stops for finding in found))\n"
)
WHEEL = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"
CASES = [
    *itertools.product(("450.80.01", "525.60.13", "580.95.05"), (("NVIDIA L4",),), ("11.8", "12.8", "13.0"), (WHEEL,)),
    ("580.95.05", ("NVIDIA L4",), "13.0", "sm_90"),
    ("580.95.05", ("NVIDIA L4", "NVIDIA H200"), "13.0", "sm_90"),
    ("580.95.05", ("NVIDIA L4", "a GPU without a row"), "13.0", "sm_90"),
    ("580.95.05", (), "13.0", "sm_90"),
    ("580.95.05", ("NVIDIA L4",), "13.0", "compute_80"),
    ("580.95.05", ("NVIDIA L4",), "99.0", WHEEL),
    ("450.80.01", ("NVIDIA L4",), None, WHEEL),
]


@pytest.mark.parametrize(("driver", "gpus", "cuda", "code"), CASES)
def test_a_glance_sees_what_the_rules_see(
    parts: Parts, driver: str, gpus: tuple[str, ...], cuda: str | None, code: str
) -> None:
    parts.driver(driver, *gpus)
    parts.torch("2.11.0", cuda, code)
    command = [sys.executable, "-c", BOTH, str(parts.proc)]
    done = subprocess.run(command, capture_output=True, text=True, env=parts.environment(), timeout=60)
    glance, rules = done.stdout.splitlines()
    assert glance == f"{rules} False False", done.stderr
