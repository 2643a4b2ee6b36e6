# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the patch of MF0016 could have: file, what is right in it, what is wrong."""

LAYERS = "megatron/core/tensor_parallel/layers.py"
GROUP = "        tp_group = tp_group if expert_group is None else expert_group\n"

MISTAKES = {
    "counts every rank's expert": (LAYERS, GROUP, "        return True\n"),
    "goes by the dense group after all": (LAYERS, GROUP, GROUP.replace("is None", "is not None")),
    "goes by the experts' group for dense parameters": (
        LAYERS,
        'if not getattr(param, "allreduce", True):',
        'if getattr(param, "allreduce", True):',
    ),
    "tells nothing of shards": (LAYERS, '    maybe_copy("allreduce")\n', '    maybe_copy("shared")\n'),
}
