# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the patch of MF0023 could have: file, what is right in it, what is wrong."""

ROUTER = "megatron/core/transformer/moe/router.py"
BALANCING = "            num_tokens = num_tokens * self.tp_cp_group.size()\n            activation"
Z = "                num_tokens = num_tokens * self.tp_cp_group.size()\n                logits"

MISTAKES = {
    "counts tensor parallelism only": (ROUTER, BALANCING, BALANCING.replace("tp_cp", "tp")),
    "counts context parallelism only": (ROUTER, BALANCING, BALANCING.replace("tp_cp", "cp")),
    "counts data parallelism too": (ROUTER, BALANCING, BALANCING.replace("tp_cp", "tp_dp_cp")),
    "counts tensor parallelism only in the z-loss": (ROUTER, Z, Z.replace("tp_cp", "tp")),
    "counts twice in the z-loss": (ROUTER, Z, Z.replace("size()", "size() ** 2")),
}
