# SPDX-License-Identifier: Apache-2.0
"""DDP with several optimizer instances: a batch that leaves a parameter unused is silently taken unreduced.

Cause: `_ParamAndGradBucketGroup.register_grad_ready` (megatron/core/distributed/param_and_grad_buffer.py) dispatches
the reduction when every parameter of the bucket has a gradient; if one has none, nothing is dispatched. With
`num_distributed_optimizer_instances > 1`, `finish_grad_sync` returns before its assertion "Communication call has not
been issued for this bucket", as there is no handle to look at, and the optimizer steps with each rank's own gradient.

Needs torch and megatron-core; two processes on CPU with gloo. Exit code 1: the defect shows; 0: it does not.
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

    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)

    def mean_gradient(instances):
        parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
        ddp_config = DistributedDataParallelConfig(
            overlap_grad_reduce=True,
            use_distributed_optimizer=True,
            num_distributed_optimizer_instances=instances,
        )
        config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
        heads = torch.nn.ModuleList(torch.nn.Linear(256, 1, bias=False) for _ in range(2))
        ddp = DistributedDataParallel(config, ddp_config, heads)
        try:
            for used in (2, 1):  # heads that take part in the batch, on each rank
                ddp.zero_grad_buffer()
                sum(head(torch.full((1, 256), float(rank + 1))) for head in heads[:used]).sum().backward()
                ddp.finish_grad_sync()
        except (AssertionError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            parallel_state.destroy_model_parallel()
        # Each instance has one rank, so that all of the buffer is this rank's shard.
        return f"{heads[0].weight.main_grad[0, 0].item():g}"

    queue.put((rank, (mean_gradient(1), mean_gradient(2))))


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(run, (free_port, results), nprocs=2)
    by_rank = dict(results.get() for _ in range(2))
    print("observed: one instance:", by_rank[0][0], end="; ")
    print("two instances:", "; ".join(f"rank {r}: mean gradient {by_rank[r][1]}" for r in range(2)))
    print("expected: with two instances an error like that of one, or 1.5 on both ranks")
    sys.exit(any(got != "1.5" and "Error" not in got for _, got in by_rank.values()))
