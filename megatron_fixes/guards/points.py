# SPDX-License-Identifier: Apache-2.0
"""The attach points, as data: which functions of Megatron the guards wrap, and with which parameters they know them.

Several rows for one function are its signatures over the release lines. The lines are what was read; what decides is
the function that is found: absent, it is passed over; with other parameters than any of its rows, it is refused.
Tests compare every row with the releases.
"""

from __future__ import annotations

from dataclasses import dataclass

BUFFER = "megatron.core.distributed.param_and_grad_buffer"
DDP = "megatron.core.distributed.distributed_data_parallel"
STATE = "megatron.core.parallel_state"
LAYERS = "megatron.core.tensor_parallel.layers"

# What is imported last of all that is wrapped, on every line; so nothing is ever wrapped half.
TRIGGER = "megatron.core.distributed"


@dataclass(frozen=True)
class AttachPoint:
    """One function with one signature.

    Attributes:
        guard: Whose wrapper it gets.
        module: Dotted name.
        qualname: Within the module.
        first: First release line with this signature.
        last: Last one that was read.
        parameters: Names in order; of a function that ends with ``...``, those that it starts with.
    """

    guard: str
    module: str
    qualname: str
    first: str
    last: str
    parameters: tuple[str, ...]

    def fits(self, names: tuple[str, ...]) -> bool:
        """Whether a function with these parameters is the one that the guard was written for."""
        if self.parameters[-1:] == ("...",):
            start = self.parameters[:-1]
            return names[: len(start)] == start
        return names == self.parameters


_GROUP, _FORCE = "_ParamAndGradBucketGroup", ("self", "force_all_reduce")
_COLUMN = ("self", "input_size", "output_size", "config", "...")

POINTS = (
    AttachPoint("streams", BUFFER, f"{_GROUP}.start_grad_sync", "0.12", "0.15", ("self",)),
    AttachPoint("streams", BUFFER, f"{_GROUP}.start_grad_sync", "0.16", "0.19", _FORCE),
    AttachPoint("streams", BUFFER, f"{_GROUP}.finish_grad_sync", "0.12", "0.15", ("self",)),
    AttachPoint("streams", BUFFER, f"{_GROUP}.finish_grad_sync", "0.16", "0.19", _FORCE),
    AttachPoint("streams", LAYERS, "ColumnParallelLinear.__init__", "0.12", "0.19", _COLUMN),
    AttachPoint("lifecycle", BUFFER, f"{_GROUP}.start_grad_sync", "0.12", "0.15", ("self",)),
    AttachPoint("lifecycle", BUFFER, f"{_GROUP}.start_grad_sync", "0.16", "0.19", _FORCE),
    AttachPoint("lifecycle", BUFFER, f"{_GROUP}.finish_grad_sync", "0.12", "0.15", ("self",)),
    AttachPoint("lifecycle", BUFFER, f"{_GROUP}.finish_grad_sync", "0.16", "0.19", _FORCE),
    AttachPoint("lifecycle", BUFFER, f"{_GROUP}.start_param_sync", "0.12", "0.19", ("self", "force_sync")),
    AttachPoint("lifecycle", DDP, "DistributedDataParallel.zero_grad_buffer", "0.12", "0.19", ("self",)),
    AttachPoint("teardown", STATE, "destroy_model_parallel", "0.12", "0.19", ()),
)

# Where the code of this Megatron holds a fix of ours, its guard leaves the work to it: what the fix adds, by name.
FIX_DRAINS, FIX_DESTROYS = "_drain_grad_reductions", "_destroy_created_groups"
FIX_COUNTS = "start_remaining_grad_sync"
