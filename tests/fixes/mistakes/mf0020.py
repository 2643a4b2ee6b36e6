# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the patch of MF0020 could have: file, what is right in it, what is wrong."""

BASE = "megatron/core/distributed/data_parallel_base.py"
SIGNATURE = "def finish_grad_sync(self, force_all_reduce: bool = False):"

MISTAKES = {
    "takes it by position only": (BASE, SIGNATURE, "def finish_grad_sync(self, *unused):"),
    "takes it under another name": (BASE, SIGNATURE, SIGNATURE.replace("force_all_reduce", "force_allreduce")),
    "belongs to no instance": (BASE, SIGNATURE, SIGNATURE.replace("self, ", "")),
}
