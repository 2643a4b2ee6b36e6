# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the patch of MF0011 could have: file, what is right in it, what is wrong.

They are made in the newest line, where MF0003 keeps the flag that it asks; where MF0011 has a flag of its own (up to
0.15), each hunk by itself is held by ``test_hunks``.
"""

BUFFER = "megatron/core/distributed/param_and_grad_buffer.py"
SEVERAL = (
    "            and self.ddp_config.num_distributed_optimizer_instances > 1\n            and not self.is_first_batch\n"
)
FLAG = "            and not self.grad_reduce_dispatched\n            and not self.grad_reduce_finished\n        ):\n"
MESSAGE = '                "params have grad available), so its grads'

MISTAKES = {
    "refuses the first batch": (BUFFER, SEVERAL, SEVERAL.replace("            and not self.is_first_batch\n", "")),
    "asks in the first batch only": (BUFFER, SEVERAL, SEVERAL.replace("and not self.is", "and self.is")),
    "refuses with one instance": (BUFFER, SEVERAL, SEVERAL.replace("> 1", ">= 1")),
    "refuses what is dispatched": (BUFFER, FLAG, FLAG.replace("not self.grad_reduce_dispatched", "True")),
    "refuses to finish again": (BUFFER, FLAG, FLAG.replace("            and not self.grad_reduce_finished\n", "")),
    "asks only whether it was finished": (
        BUFFER,
        FLAG,
        FLAG.replace("and not self.grad_reduce_f", "and self.grad_reduce_f"),
    ),
    "asks whether any parameter has a gradient": (
        BUFFER,
        FLAG,
        FLAG.replace("not self.grad_reduce_dispatched", "not self.per_param_grad_ready_counts"),
    ),
    "looks at parameters instead of the dispatch": (
        BUFFER,
        FLAG,
        FLAG.replace("not self.grad_reduce_dispatched", "len(self.per_param_grad_ready_counts) < len(self.params)"),
    ),
    "takes an abandoned batch's dispatch for its own": (
        BUFFER,
        "        self.grad_reduce_finished = False\n        self.grad_reduce_dispatched = False\n",
        "        self.grad_reduce_finished = False\n",
    ),
    "says nothing of the bucket": (BUFFER, MESSAGE, '                "), so its grads'),
}
