# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the patch of MF0015 could have: file, what is right in it, what is wrong."""

MAPPINGS = "megatron/core/tensor_parallel/mappings.py"
COPY = "reduced = input_.contiguous()"

MISTAKES = {
    "returns the input": (MAPPINGS, "    return reduced\n", "    return input_\n"),
    "copies every tensor": (MAPPINGS, COPY, "reduced = input_.clone(memory_format=torch.contiguous_format)"),
    "never reduces": (MAPPINGS, "    torch.distributed.all_reduce(reduced, group=group)\n", ""),
    "reduces twice": (
        MAPPINGS,
        "    torch.distributed.all_reduce(reduced, group=group)\n",
        "    torch.distributed.all_reduce(reduced, group=group)\n" * 2,
    ),
    "copies into other strides": (MAPPINGS, COPY, "reduced = input_.clone()"),
}
