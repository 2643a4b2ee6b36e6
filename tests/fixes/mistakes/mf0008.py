# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the patch of MF0008 could have: file, what is right in it, what is wrong."""

UTILITIES = "megatron/core/transformer/moe/moe_utils.py"
SIZE = "num_values = num_layers + (0 if mtp_num_layers is None else mtp_num_layers)"

MISTAKES = {
    "counts one layer of prediction always": (UTILITIES, SIZE, "num_values = num_layers + 1"),
    "counts layers of prediction twice": (UTILITIES, SIZE, SIZE + " * 2"),
    "fails without prediction": (UTILITIES, SIZE, "num_values = num_layers + mtp_num_layers"),
    "counts layers of prediction only": (UTILITIES, SIZE, "num_values = mtp_num_layers or num_layers"),
}
