# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the patch of MF0010 could have: file, what is right in it, what is wrong."""

STATE = "megatron/core/parallel_state.py"

MISTAKES = {
    "forgets dictionaries": (STATE, "and not value", "and value is None"),
    "resets everything to None": (STATE, "globals()[name] = kind()", "globals()[name] = None"),
    "keeps the ranks": (STATE, "and name.isupper() and", 'and "GROUP" in name and'),
    "keeps the MoE tracker": (STATE, "moe_logging.destroy_moe_metrics_tracker()", "pass"),
}
