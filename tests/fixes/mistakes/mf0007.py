# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the patch of MF0007 could have: file, what is right in it, what is wrong."""

DDP = "megatron/core/distributed/distributed_data_parallel.py"
GUARD = "        if torch.cuda.is_initialized():\n"
BEFORE = "            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())\n"
AFTER = "            torch.cuda.default_stream().wait_stream(torch.cuda.current_stream())\n"

MISTAKES = {
    "waits only after": (DDP, BEFORE, "            pass\n"),
    "waits only before": (DDP, AFTER, "            pass\n"),
    "waits the wrong way before": (DDP, BEFORE, AFTER),
    "waits the wrong way after": (DDP, AFTER, BEFORE),
    "asks where there is no CUDA": (DDP, GUARD + BEFORE, "        if True:\n" + BEFORE),
}
