# SPDX-License-Identifier: Apache-2.0
"""DDP with several optimizer instances: gradients of all pipeline stages but the first are reduced twice, silently.

Cause: `_ParamAndGradBucketGroup.finish_grad_sync` (megatron/core/distributed/param_and_grad_buffer.py) calls
`start_grad_sync` while `is_first_batch` is true, which it stays where a pipeline schedule dispatches under `no_sync`.
The guard there against a second dispatch asks for `grad_reduce_handle`, which is always None with
`num_distributed_optimizer_instances > 1`. So the own shard, reduced already, is reduced once more.

Needs torch and megatron-core; four processes on CPU with gloo. Exit code 1: the defect shows; 0: it does not.
"""

import contextlib
import socket
import sys
from types import SimpleNamespace

import torch

torch.cuda.current_device = lambda: torch.device("cpu")  # no GPU is needed to see it
torch.cuda.Stream = lambda **_: SimpleNamespace(wait_stream=lambda stream: None)
torch.cuda.current_stream = torch.cuda.default_stream = lambda *_: torch.cuda.Stream()
torch.cuda.stream = contextlib.nullcontext


def run(rank, port, queue):
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=4)
    parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=2)
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce=True, use_distributed_optimizer=True, num_distributed_optimizer_instances=2
    )
    ddp = DistributedDataParallel(config, ddp_config, torch.nn.Linear(256, 1, bias=False))
    seen = []
    for _ in range(2):
        ddp.zero_grad_buffer()
        with ddp.no_sync():  # as the pipeline schedules do it on later stages: hooks off, then start_grad_sync
            ddp(torch.full((1, 256), float(rank + 1))).sum().backward()
        ddp.start_grad_sync()
        ddp.finish_grad_sync()
        (group,) = ddp.bucket_groups
        shards = group.buckets[0].grad_data.view(2, -1)  # the optimizer reads the own one
        seen.append(f"{shards[group.intra_distributed_optimizer_instance_rank, 0].item():g}")
    queue.put((rank, seen))


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(run, (free_port, results), nprocs=4)
    by_rank = dict(results.get() for _ in range(4))
    print("observed: mean gradient in two steps:", "; ".join(f"rank {r}: {' '.join(by_rank[r])}" for r in range(4)))
    print("expected: 2.5 (the mean of 1, 2, 3, 4) on every rank in both steps")
    sys.exit(any(got != "2.5" for seen in by_rank.values() for got in seen))
