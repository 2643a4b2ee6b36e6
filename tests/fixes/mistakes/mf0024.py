# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the patch of MF0024 could have: file, what is right in it, what is wrong."""

ATTENTION = "megatron/core/transformer/dot_product_attention.py"
MARK = "tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)"

MISTAKES = {
    "marks it as a duplicate": (ATTENTION, MARK, MARK.replace("True", "False")),
    "marks the module": (ATTENTION, MARK, MARK.replace("self.softmax_offset", "self")),
    "marks a view": (ATTENTION, MARK, MARK.replace("self.softmax_offset", "self.softmax_offset.data")),
    "marks it on the first rank only": (ATTENTION, MARK, MARK.replace("True", "self.tp_group.rank() == 0")),
}
