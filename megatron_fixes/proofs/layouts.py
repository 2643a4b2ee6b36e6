# SPDX-License-Identifier: Apache-2.0
"""Layouts of model parallelism for releases that don't all know the same ones."""

from __future__ import annotations

import inspect
from typing import Any

from megatron.core import parallel_state

# For 4 ranks: experts, hierarchical and hybrid context parallelism, and two distributed-optimizer instances.
RICH: dict[str, Any] = {
    "context_parallel_size": 2,
    "hierarchical_context_parallel_sizes": [1, 2],
    "expert_model_parallel_size": 2,
    "num_distributed_optimizer_instances": 2,
    "hybrid_context_parallel": True,
}


def initialize(layout: dict[str, Any]) -> None:
    """Initialise model parallelism with what of a layout the release knows by name."""
    known = inspect.signature(parallel_state.initialize_model_parallel).parameters
    parallel_state.initialize_model_parallel(**{name: value for name, value in layout.items() if name in known})
