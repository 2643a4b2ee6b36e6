# SPDX-License-Identifier: Apache-2.0
"""Leaves out tests that need hardware which isn't there, and says which hardware that is.

``@pytest.mark.gpu`` needs one CUDA device, ``@pytest.mark.gpu(count=2)`` two. torch is imported only when such a test
was collected, so that everything else runs without it.
"""

from __future__ import annotations

import functools

import pytest


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
