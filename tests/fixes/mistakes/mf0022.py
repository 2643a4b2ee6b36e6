# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the patch of MF0022 could have: file, what is right in it, what is wrong."""

CLIP_GRADS = "megatron/core/optimizer/clip_grads.py"
WHEN = "    if not grads_for_norm and norm_type != 2.0:\n"
ZERO = "        grads_for_norm = [torch.zeros(1, dtype=torch.float, device='cuda')]\n"

MISTAKES = {
    "helps the infinity norm only": (CLIP_GRADS, WHEN, WHEN.replace("!= 2.0", "== inf")),
    "helps finite norms only": (CLIP_GRADS, WHEN, WHEN.replace("!= 2.0", "!= inf")),
    "drops gradients that are there": (CLIP_GRADS, WHEN, WHEN.replace("not grads_for_norm and ", "")),
    "adds one": (CLIP_GRADS, ZERO, ZERO.replace("zeros", "ones")),
    "adds an empty tensor": (CLIP_GRADS, ZERO, ZERO.replace("zeros(1", "zeros(0")),
}
