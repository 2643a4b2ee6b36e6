# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the patch of MF0003 could have: file, what is right in it, what is wrong."""

BUFFER = "megatron/core/distributed/param_and_grad_buffer.py"
FLAG = "self.grad_reduce_dispatched = self.ddp_config.overlap_grad_reduce"
START = "        if self.is_first_batch and (\n"

MISTAKES = {
    "remembers without overlap too": (BUFFER, FLAG, "self.grad_reduce_dispatched = True"),
    "remembers nothing": (BUFFER, FLAG, "self.grad_reduce_dispatched = False"),
    "reduces no more where buffers are zeroed by hand": (
        BUFFER,
        "            # Lets finish_grad_sync wait for it where buffers are zeroed without reset().\n"
        "            self.grad_reduce_finished = False\n",
        "",
    ),
    "never reduces with one instance": (
        BUFFER,
        START,
        "        if self.ddp_config.num_distributed_optimizer_instances == 1:\n            return\n" + START,
    ),
}
