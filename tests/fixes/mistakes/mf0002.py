# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the patch of MF0002 could have: file, what is right in it, what is wrong."""

DRAIN = '        RuntimeError if the ranks didn\'t all abandon it at the same point.\n        """\n'
DDP = "megatron/core/distributed/distributed_data_parallel.py"

MISTAKES = {
    "waits for no handle": (DDP, "                bucket_group.grad_reduce_handle.wait()\n", ""),
    "keeps the handle": (DDP, "                bucket_group.grad_reduce_handle = None\n", ""),
    "asks no other rank": (DDP, "                self._check_all_ranks_abandoned_step(group)\n", ""),
    "takes the word of any point": (DDP, "{group.group_name}/{issued}", "{group.group_name}"),
    "asks itself only": (DDP, "store.wait(list(keys.values()),", "store.wait([own_key],"),
    "swallows that ranks are apart": (DDP, "            store.delete_key(own_key)\n", "            return\n"),
    "leaves out experts": (
        DDP,
        DRAIN + "        for bucket_group in self.bucket_groups + self.expert_parallel_bucket_groups:\n",
        DRAIN + "        for bucket_group in self.bucket_groups:\n",
    ),
    "lets the reduction wait for zeroing": (
        DDP,
        "torch.cuda.current_stream().wait_stream(bucket_group.communication_stream)",
        "bucket_group.communication_stream.wait_stream(torch.cuda.current_stream())",
    ),
}
