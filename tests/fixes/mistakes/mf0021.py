# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the patch of MF0021 could have: file, what is right in it, what is wrong."""

ASYNC = "megatron/core/dist_checkpointing/strategies/async_utils.py"
KEEP = "self.process.keeps_alive = async_fn_args"

MISTAKES = {
    "keeps what was there before the copies": (ASYNC, KEEP, KEEP.replace("async_fn_args", "async_req.async_fn_args")),
    "keeps them with the caller": (ASYNC, KEEP, KEEP.replace("self.process", "self")),
    "keeps those of the last save only": (ASYNC, KEEP, KEEP.replace("self.process", "type(self)")),
}
