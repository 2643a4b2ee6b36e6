# SPDX-License-Identifier: Apache-2.0
"""DDP: once one model uses reduce_scatter_with_fp32_accumulation, gradients of all other models stay unreduced.

Cause: `_ParamAndGradBucketGroup.__init__` (megatron/core/distributed/param_and_grad_buffer.py) rebinds the module
global `dist_reduce_scatter_func` for the whole process. Bucket groups without the option then call the custom
collective in `start_grad_sync`, but keep the coalescing manager as their handle, so that nothing calls `wait` of the
custom handle, which is where the sum is formed.

Needs torch and megatron-core; two processes on CPU with gloo. Exit code 1: the defect shows; 0: it does not.
"""

import socket
import sys

import torch

torch.cuda.current_device = lambda: torch.device("cpu")  # no GPU is needed to see it
torch.cuda.current_stream = lambda *_: None


def run(rank, port, queue):
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel()

    def build(fp32_accumulation):
        ddp_config = DistributedDataParallelConfig(
            overlap_grad_reduce=True,
            use_distributed_optimizer=True,
            reduce_scatter_with_fp32_accumulation=fp32_accumulation,
        )
        config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
        layer = torch.nn.Linear(1024, 1, bias=False)  # each rank's shard is one half of it
        return DistributedDataParallel(config, ddp_config, layer)

    def mean_gradient(ddp):
        ddp.zero_grad_buffer()
        ddp(torch.full((1, 1024), float(rank + 1))).sum().backward()
        ddp.finish_grad_sync()
        return ddp.module.weight.main_grad.view(2, -1)[rank, 0].item()  # of the own shard

    old = build(fp32_accumulation=False)
    before = mean_gradient(old)
    build(fp32_accumulation=True)
    new = build(fp32_accumulation=False)
    queue.put((rank, (before, mean_gradient(old), mean_gradient(new))))
    torch.distributed.barrier()  # what nobody waited for may be under way still
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(run, (free_port, results), nprocs=2)
    by_rank = dict(results.get() for _ in range(2))
    names = ("model without the option", "the same after another model with it was built", "a new one without it")
    print("observed: mean gradient:", end=" ")
    print("; ".join(f"{name}: {by_rank[0][i]:g} and {by_rank[1][i]:g}" for i, name in enumerate(names)))
    print("expected: 1.5 and 1.5 (ranks 0 and 1) in all three")
    sys.exit(any(value != 1.5 for values in by_rank.values() for value in values))
