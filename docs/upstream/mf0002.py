# SPDX-License-Identifier: Apache-2.0
"""DDP: after a step that was aborted in backward, no later step works, or gradients silently stay unreduced.

Cause: `_ParamAndGradBucketGroup.reset` (megatron/core/distributed/param_and_grad_buffer.py) leaves
`grad_reduce_handle` as the aborted step left it, so that `start_grad_sync` asserts in every later step or, while
`is_first_batch` is true, returns and the old collective is taken for the new one. Nothing waits for that old
collective either before `DistributedDataParallel.zero_grad_buffer` zeroes the buffer that it may be writing.

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
    seen = []
    for scheduled in (False, True):  # dispatched by backward hooks, or as the pipeline schedules do it
        torch.manual_seed(0)
        layer = torch.nn.Linear(4, 1, bias=False)
        config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
        ddp = DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=True), layer)

        def backward(value, ddp=ddp, scheduled=scheduled):
            if not scheduled:
                return ddp(torch.full((1, 4), value)).sum().backward()
            with ddp.no_sync():
                ddp(torch.full((1, 4), value)).sum().backward()
            return ddp.start_grad_sync()

        if not scheduled:  # in the first batch the hooks only count
            backward(0.0)
            ddp.finish_grad_sync()
        ddp.zero_grad_buffer()
        backward(100.0)  # all ranks abandon this step: no finish_grad_sync, as when an exception is caught
        try:
            ddp.zero_grad_buffer()
            backward(float(rank + 1))
            ddp.finish_grad_sync()
            seen.append(f"{layer.weight.main_grad[0, 0].item():g}")
        except (AssertionError, RuntimeError) as error:
            seen.append(f"{type(error).__name__}: {error}")
    queue.put((rank, seen))


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(run, (free_port, results), nprocs=2)
    by_rank = dict(results.get() for _ in range(2))
    ways = ["hooks", "start_grad_sync"]
    print("observed: mean gradient in the step after the aborted one")
    for r in (0, 1):
        for way, got in zip(ways, by_rank[r], strict=True):
            print(f"  rank {r}, {way}: {got}")
    print("expected: 1.5 on both ranks, both ways")
    sys.exit(any(got != "1.5" for seen in by_rank.values() for got in seen))
