# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the patch of MF0027 could have: file, what is right in it, what is wrong."""

LAYER = "megatron/core/transformer/moe/moe_layer.py"
SIZES = "if self.config.expert_tensor_parallel_size != self.config.tensor_model_parallel_size:"
PARAMETERS = "for param in self.experts.parameters():\n                param"

MISTAKES = {
    "does it where dense layers are split less only": (LAYER, SIZES, SIZES.replace("!=", ">")),
    "does it where dense layers are split more only": (LAYER, SIZES, SIZES.replace("!=", "<")),
    "does it to the router too": (LAYER, PARAMETERS, PARAMETERS.replace("self.experts", "self")),
    "does it to parameters of the container alone": (
        LAYER,
        PARAMETERS,
        PARAMETERS.replace("parameters()", "parameters(recurse=False)"),
    ),
    "marks them as dense": (LAYER, "param.allreduce = False", "param.allreduce = True"),
}
