# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the patch of MF0017 could have: file, what is right in it, what is wrong."""

OPTIMIZER = "megatron/core/optimizer/distrib_optimizer.py"
WHEN = "        if distributed_optimizer_instance_id > 0:\n"

MISTAKES = {
    "counts no instance": (OPTIMIZER, WHEN, WHEN.replace("> 0", ">= 0")),
    "counts all instances": (OPTIMIZER, WHEN, WHEN.replace("> 0", "> 1")),
    "marks the first shard only": (
        OPTIMIZER,
        'for shard in group["orig_group"]["params"]:',
        'for shard in group["orig_group"]["params"][:1]:',
    ),
    "marks no shard": (OPTIMIZER, "shard.shared = True", "shard.shared = False"),
}
