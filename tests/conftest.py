# SPDX-License-Identifier: Apache-2.0
"""Leaves out tests that need hardware which isn't there, and says which hardware that is.

``@pytest.mark.gpu`` needs one CUDA device, ``@pytest.mark.gpu(count=2)`` two. torch is imported only when such a test
was collected, so that everything else runs without it.

A shell that runs us in the background has SIGINT ignored, and children inherit that: it is undone here, so that tests
of Ctrl-C mean the same everywhere.

``release_tree`` is a real, unpacked release of megatron-core, fetched once into the cache: copy it before writing.
"""

from __future__ import annotations

import functools
import signal
from pathlib import Path

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@functools.cache
def cuda_devices() -> int:
    """Return how many CUDA devices torch can use; 0 where there is no torch."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        mark = item.get_closest_marker("gpu")
        if mark is None:
            continue
        needed = int(mark.kwargs.get("count", 1))
        if (found := cuda_devices()) < needed:
            devices = "device" if needed == 1 else "devices"
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA {devices}, found {found}"))


@pytest.fixture(scope="session")
def release_tree() -> Path:
    """The unpacked files of megatron-core 0.16.1, to be read only."""
    from megatron_fixes.catalog.data import matrix_path
    from megatron_fixes.catalog.matrix import load_matrix
    from megatron_fixes.proofs.releases import fetch

    return fetch("0.16.1", load_matrix(matrix_path()))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that ``tests/fixes/test_subsets.py`` explains."""
    parser.addoption("--all-subsets", action="store_true", help="prove every closed subset of every series")
