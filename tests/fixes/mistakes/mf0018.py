# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the patch of MF0018 could have: file, what is right in it, what is wrong."""

SCHEDULES = "megatron/core/pipeline_parallel/schedules.py"
COUNT = "num_tokens + (num_tokens == 0)"

MISTAKES = {
    "adds one to every count": (SCHEDULES, COUNT, "num_tokens + 1"),
    "divides by one always": (SCHEDULES, COUNT, "num_tokens * 0 + 1"),
    "adds one to all but zero": (SCHEDULES, COUNT, "num_tokens + (num_tokens != 0)"),
    "adds one to a count of one too": (SCHEDULES, COUNT, "num_tokens + (num_tokens <= 1)"),
}
