# SPDX-License-Identifier: Apache-2.0
"""initialize_model_parallel ignores distributed_timeout_minutes for the experts' gloo and the hybrid DPxCP groups.

Cause: `initialize_model_parallel` (megatron/core/parallel_state.py) creates EXPERT_DATA_PARALLEL_GROUP_GLOO, and
`create_hybrid_dp_cp_groups` the groups of hybrid context parallelism, by `create_group` without `timeout`, so they get
torch's default for the backend: 30 minutes for gloo, 10 for NCCL. EXPERT_MODEL_PARALLEL_GROUP had the same defect up to
0.15.3 (issue 2238).

Needs torch and megatron-core; four processes on CPU with gloo. Exit code 1: the defect shows; 0: it does not.
"""

import sys
import tempfile

import torch

torch.cuda.current_device = lambda: torch.device("cpu")  # no GPU is needed to see it


def run(rank, folder, queue):
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=4)
    parallel_state.initialize_model_parallel(distributed_timeout_minutes=7, hybrid_context_parallel=True)
    seen = {}
    for group in torch.distributed.distributed_c10d._world.pg_map:
        if group is not torch.distributed.group.WORLD:
            timeout = group._get_backend(torch.device("cpu")).options._timeout
            seen[group.group_desc] = timeout.total_seconds() / 60
    queue.put(seen)


if __name__ == "__main__":
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as rendezvous:
        torch.multiprocessing.spawn(run, (rendezvous, results), nprocs=4)
    groups = {name: minutes for _ in range(4) for name, minutes in results.get().items()}
    wrong = {name: minutes for name, minutes in groups.items() if minutes != 7}
    told = ", ".join(f"{name} {minutes:g} minutes" for name, minutes in sorted(wrong.items()))
    print(f"observed: {len(wrong)} of {len(groups)} kinds of groups without the timeout of 7 minutes: {told or '-'}")
    print("expected: 0 kinds of groups without the timeout of 7 minutes")
    sys.exit(bool(wrong))
