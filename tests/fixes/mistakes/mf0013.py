# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the patch of MF0013 could have: file, what is right in it, what is wrong."""

OPTIMIZER = "megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py"
MASTER = "                    fp32_param.grad = None\n"
COPY = "                    param.grad = None\n                    param.requires_grad = False\n"
ATTACH = "                param.grad = self.cpu_copy_map_grad[param]\n"

MISTAKES = {
    "zeroes the gradient of a master": (OPTIMIZER, MASTER, MASTER.replace("None", "torch.zeros_like(fp32_param)")),
    "lets go of the model's gradient": (OPTIMIZER, MASTER, MASTER.replace("fp32_param", "param")),
    "zeroes the gradient of a copy": (OPTIMIZER, COPY, COPY.replace("None", "torch.zeros_like(param)")),
    "attaches the buffer once": (
        OPTIMIZER,
        ATTACH,
        "                if param.grad is None and not optimizer.state.get(param):\n    " + ATTACH,
    ),
    "stops the whole optimizer": (OPTIMIZER, COPY + "                    continue", COPY + "                    break"),
}
