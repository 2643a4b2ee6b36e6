# SPDX-License-Identifier: Apache-2.0
"""destroy_model_parallel leaves most process groups of initialize_model_parallel behind in c10d.

Cause: `destroy_model_parallel` (megatron/core/parallel_state.py) sets its globals to None and calls
`destroy_process_group` for the gloo groups of data parallelism only. c10d holds every other group, with its
communicator, until it is asked to destroy it.

Needs torch and megatron-core; two processes on CPU with gloo. Exit code 1: the defect shows; 0: it does not.
"""

import sys
import tempfile

import torch

torch.cuda.current_device = lambda: torch.device("cpu")  # no GPU is needed to see it


def run(rank, folder, queue):
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    held = torch.distributed.distributed_c10d._world.pg_map
    counts = [len(held)]
    for _ in range(4):
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        torch.distributed.barrier()
        parallel_state.destroy_model_parallel()
        counts.append(len(held))
    queue.put((rank, counts))


if __name__ == "__main__":
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as rendezvous:
        torch.multiprocessing.spawn(run, (rendezvous, results), nprocs=2)
    by_rank = dict(results.get() for _ in range(2))
    print("observed: groups held by c10d at first and after each of four rounds:", end=" ")
    print("; ".join(f"rank {rank}: {by_rank[rank]}" for rank in (0, 1)))
    print("expected: [1, 1, 1, 1, 1] on both ranks (the default group)")
    sys.exit(any(set(counts) != {1} for counts in by_rank.values()))
