# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the patch of MF0004 could have: file, what is right in it, what is wrong."""

BUFFER = "megatron/core/distributed/param_and_grad_buffer.py"
DDP = "megatron/core/distributed/distributed_data_parallel.py"

MISTAKES = {
    "counts in a batch that was abandoned": (
        BUFFER,
        "        if self.grad_counts_agreed:\n",
        "        if len(self.per_param_grad_ready_counts) == len(self.params) and self.is_first_batch:\n"
        "            self.golden_per_param_grad_ready_counts = self.per_param_grad_ready_counts\n",
    ),
    "counts in a batch with parameters unused": (
        BUFFER,
        "            if all_grads_ready and (\n",
        "            if self.per_param_grad_ready_counts and (\n",
    ),
    "never counts": (BUFFER, "            self.is_first_batch = False\n", "            pass\n"),
    "dispatches what is dispatched": (
        BUFFER,
        "if not self.ddp_config.overlap_grad_reduce or self.grad_reduce_dispatched:",
        "if not self.ddp_config.overlap_grad_reduce:",
    ),
    "leaves fewer passes undispatched": (
        BUFFER,
        "        elif all_grads_ready or not self.grad_counts_agreed:\n",
        "        elif not self.grad_counts_agreed:\n",
    ),
    "dispatches the rest in the order of buckets": (
        DDP,
        "key=lambda group: group.last_grad_ready_ns if group.grad_counts_agreed else",
        "key=lambda group:",
    ),
    "dispatches all of it in the order in which grads came": (
        DDP,
        'group.last_grad_ready_ns if group.grad_counts_agreed else float("inf")',
        "group.last_grad_ready_ns",
    ),
    "dispatches first what no hook dispatches": (DDP, 'float("inf")', "0"),
    "leaves unused parameters undispatched": (
        BUFFER,
        "        elif all_grads_ready or not self.grad_counts_agreed:\n",
        "        elif all_grads_ready:\n",
    ),
    "dispatches what is not ready in a recount": (
        BUFFER,
        "        elif all_grads_ready or not self.grad_counts_agreed:\n",
        "        elif all_grads_ready or not self.golden_per_param_grad_ready_counts:\n",
    ),
    "goes by its own counts": (
        BUFFER,
        "        if self.grad_counts_agreed:\n",
        "        if self.golden_per_param_grad_ready_counts:\n",
    ),
    "one rank's counts will do": (DDP, "ReduceOp.MIN", "ReduceOp.MAX"),
    "agrees within one optimizer instance": (
        DDP,
        "self._agree_on_grad_counts(self.bucket_groups, self.dp_cp_group)",
        "self._agree_on_grad_counts(self.bucket_groups, self.intra_dp_cp_group)",
    ),
    "asks once only": (
        DDP,
        "        if self.num_finished_batches & (self.num_finished_batches - 1) == 0:\n",
        "        if self.num_finished_batches == 1:\n",
    ),
    "keeps the first count of a rank": (
        BUFFER,
        "                self.is_first_batch or not self.golden_per_param_grad_ready_counts\n",
        "                not self.golden_per_param_grad_ready_counts\n",
    ),
    "never counts again": (
        BUFFER,
        "                self.is_first_batch or not self.golden_per_param_grad_ready_counts\n",
        "                self.is_first_batch\n",
    ),
    "takes late gradients": (
        BUFFER,
        "        if self.grad_reduce_dispatched:\n            self.grad_came_late = True\n",
        "        if False:\n            self.grad_came_late = True\n",
    ),
    "refuses gradients after the end": (
        BUFFER,
        "        self.grad_reduce_dispatched = False\n        self.last_grad_ready_ns = 0\n",
        "        self.last_grad_ready_ns = 0\n",
    ),
    "takes what is finished for late": (
        BUFFER,
        "        self.grad_reduce_dispatched = False\n        self.last_grad_ready_ns = 0\n",
        "        self.grad_reduce_dispatched = False\n",
    ),
    "passes over gradients after the end": (
        BUFFER,
        "            if self.last_grad_ready_ns:\n",
        "            if False:\n",
    ),
    "dispatches gradients after the end": (
        BUFFER,
        "            if not self.is_first_batch and not self.grad_reduce_finished:\n",
        "            if not self.is_first_batch:\n",
    ),
    "forgets that a gradient came late": (BUFFER, "            self.grad_came_late = True\n", "            pass\n"),
    "counts anew in one bucket group only": (
        DDP,
        "            for bucket_group in bucket_groups:\n                bucket_group.golden",
        "            for bucket_group in bucket_groups[:1]:\n                bucket_group.golden",
    ),
}
