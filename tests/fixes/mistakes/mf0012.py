# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the patch of MF0012 could have: file, what is right in it, what is wrong."""

BUFFER = "megatron/core/distributed/param_and_grad_buffer.py"
PLAIN = "self.reduce_scatter_func = dist_reduce_scatter_func"
FP32 = "self.reduce_scatter_func = reduce_scatter_with_fp32_accumulation"
CLASS = "type(self).reduce_scatter_func = staticmethod(reduce_scatter_with_fp32_accumulation)"

MISTAKES = {
    "chooses for all bucket groups that are built later": (
        BUFFER,
        PLAIN,
        "self.reduce_scatter_func = getattr(type(self), 'reduce_scatter_func', dist_reduce_scatter_func)\n"
        f"        if self.ddp_config.reduce_scatter_with_fp32_accumulation:\n            {CLASS}",
    ),
    "never sums in FP32": (BUFFER, FP32, PLAIN),
    "calls none of its own": (
        BUFFER,
        "grad_reduce_handle = self.reduce_scatter_func(",
        "grad_reduce_handle = dist_reduce_scatter_func(",
    ),
}
