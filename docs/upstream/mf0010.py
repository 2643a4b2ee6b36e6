# SPDX-License-Identifier: Apache-2.0
"""After destroy_model_parallel and another layout, topology queries answer for the old one and MoE logging fails.

Cause: `destroy_model_parallel` (megatron/core/parallel_state.py) resets its globals one by one and misses some, such as
`_EMBEDDING_GLOBAL_RANKS` and `_HYBRID_DP_CP_GROUPS`; and nothing calls `destroy_moe_metrics_tracker`
(megatron/core/transformer/moe/moe_logging.py), so that the tracker keeps the number of layers of the old model.

Needs torch and megatron-core; four processes on CPU with gloo. Exit code 1: the defect shows; 0: it does not.
"""

import sys
import tempfile

import torch

torch.cuda.current_device = lambda: torch.device("cpu")  # no GPU is needed to see it


def run(rank, folder, queue):
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import save_to_aux_losses_tracker

    def log(layers):
        for layer in range(1, layers + 1):
            save_to_aux_losses_tracker("load_balancing_loss", torch.ones(()), layer, layers)

    torch.distributed.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=4)
    parallel_state.initialize_model_parallel(hybrid_context_parallel=True)
    log(2)
    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=4)
    seen = []
    if parallel_state.is_rank_in_embedding_group() and rank in (1, 2):
        seen.append(f"stage {rank} of 4 is in the embedding group")
    try:
        parallel_state.get_hybrid_data_context_parallel_groups(group_size=2)
        seen.append("a hybrid DPxCP group of the old layout is handed out")
    except (AssertionError, KeyError):
        pass
    try:
        log(6)
    except IndexError as error:
        seen.append(f"IndexError: {error}")
    queue.put((rank, seen))


if __name__ == "__main__":
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as rendezvous:
        torch.multiprocessing.spawn(run, (rendezvous, results), nprocs=4)
    by_rank = dict(results.get() for _ in range(4))
    print("observed: what is wrong in the new layout")
    for rank in range(4):
        print(f"  rank {rank}: {'; '.join(by_rank[rank]) or 'nothing wrong'}")
    print("expected: nothing wrong on any rank")
    sys.exit(any(by_rank.values()))
