# SPDX-License-Identifier: Apache-2.0
"""DDP with overlap_grad_reduce: a batch with more backward passes than the first has silently wrong gradients.

Cause: `_ParamAndGradBucketGroup.register_grad_ready` (megatron/core/distributed/param_and_grad_buffer.py) dispatches
the reduction when each parameter's gradient has come as often as in the first batch, and takes what comes later into a
buffer that is being reduced; how far that is decides what comes out. A batch with fewer passes never gets there, so
`finish_grad_sync` fails. And `reset` takes the counts from the first batch whatever became of it: if that left a
parameter unused, or was aborted, an assertion fails in `zero_grad_buffer`, then and ever after.

Needs torch and megatron-core; two processes on CPU with gloo. Exit code 1: the defect shows; 0: it does not.
"""

import socket
import sys

import torch

torch.cuda.current_device = lambda: torch.device("cpu")  # no GPU is needed to see it
torch.cuda.current_stream = lambda *_: None

# In the first batch of the second one, a parameter takes no part.
LOOPS = {"2, 2, 3, 1 passes": (2, 2, 3, 1), "a parameter unused, then 1, 1 passes": (0, 1, 1)}
EXPECTED = {"2, 2, 3, 1 passes": ["3", "3", "4.5", "1.5"], "a parameter unused, then 1, 1 passes": ["-", "1.5", "1.5"]}


class Model(torch.nn.Module):
    """Two layers side by side."""

    def __init__(self):
        super().__init__()
        self.one, self.other = (torch.nn.Linear(4, 1, bias=False) for _ in range(2))

    def forward(self, value, both):
        """Both of them, or one."""
        return self.one(value) + self.other(value) if both else self.other(value)


def mean_gradient(ddp, rank, passes):
    try:
        ddp.zero_grad_buffer()
        for _ in range(max(passes, 1)):  # gradient accumulation with the hooks on
            ddp(torch.full((1, 4), float(rank + 1)), passes > 0).sum().backward()
        ddp.finish_grad_sync()
    except (AssertionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    return f"{ddp.module.one.weight.main_grad[0, 0].item():g}" if passes else "-"


def run(rank, port, queue):
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    seen = {}
    for loop, batches in LOOPS.items():
        ddp = DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=True), Model())
        seen[loop] = [mean_gradient(ddp, rank, passes) for passes in batches]
    queue.put((rank, seen))


def right(loop, seen):
    # More passes than before may end in an error that says so.
    return all(
        got == want or (want == "4.5" and "RuntimeError" in got) for got, want in zip(seen, EXPECTED[loop], strict=True)
    )


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(run, (free_port, results), nprocs=2)
    by_rank = dict(results.get() for _ in range(2))
    print("observed: mean gradients, batch | batch | ...")
    for rank in (0, 1):
        for loop in LOOPS:
            print(f"  rank {rank}, {loop}: {' | '.join(by_rank[rank][loop])}")
    print("expected: 3 | 3 | 4.5, or an error that says why not | 1.5 on both ranks; - | 1.5 | 1.5 on both ranks")
    sys.exit(not all(right(loop, by_rank[rank][loop]) for rank in (0, 1) for loop in LOOPS))
