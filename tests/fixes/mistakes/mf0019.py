# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the patch of MF0019 could have: file, what is right in it, what is wrong."""

BUFFER = "megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py"
ORDER = "sorted(params, key=self.buffer.param_to_param_group.__getitem__)"

MISTAKES = {
    "turns the order it gets": (BUFFER, ORDER, "reversed(params)"),
    "sorts nothing": (BUFFER, ORDER, "sorted(params, key=lambda param: 0)"),
    "leaves one out": (BUFFER, ORDER, ORDER + "[1:]"),
}
