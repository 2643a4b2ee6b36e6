# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the patch of MF0014 could have: file, what is right in it, what is wrong."""

OPTIMIZER = "megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py"
WAIT = "torch.cuda.current_stream().wait_stream(self._h2d_stream)"

MISTAKES = {
    "waits for the stream of the gradients": (OPTIMIZER, WAIT, WAIT.replace("h2d", "d2h")),
    "waits the wrong way": (OPTIMIZER, WAIT, "self._h2d_stream.wait_stream(torch.cuda.current_stream())"),
    "waits with the stream of the gradients": (OPTIMIZER, WAIT, "self._d2h_stream.wait_stream(self._h2d_stream)"),
    "copies nothing": (
        OPTIMIZER,
        "                        gpu_param.data.copy_(param.data, non_blocking=True)\n",
        "                        pass\n",
    ),
}
