# SPDX-License-Identifier: Apache-2.0
"""DDP with overlap_grad_reduce: what was counted in the first batch makes gradients of later ones silently wrong.

Cause: `_ParamAndGradBucketGroup.register_grad_ready` (megatron/core/distributed/param_and_grad_buffer.py) dispatches
the reduction when each parameter's gradient has come as often as in the first batch, and takes what comes later into a
buffer that is being reduced; how far that is decides what comes out. A batch with fewer passes never gets there, so
`finish_grad_sync` fails. And `reset` takes the counts from the first batch whatever became of it: if that left a
parameter unused, or was aborted, an assertion fails in `zero_grad_buffer`, then and ever after. Each rank decides so by
itself. If a bucket got no gradient in the first batch of one rank only, that rank dispatches it in `finish_grad_sync`
of the next batch, and its peers by a hook: in another order, so that collectives are paired with the wrong ones, on all
ranks, without an error.

Needs torch and megatron-core; two processes on CPU with gloo. Exit code 1: the defect shows; 0: it does not.
"""

import socket
import sys

import torch

torch.cuda.current_device = lambda: torch.device("cpu")  # no GPU is needed to see it
torch.cuda.current_stream = lambda *_: None

UNUSED = "the other layer unused"
# Passes of each batch, the ranks that leave the other layer unused in the first one, and the bucket size.
LOOPS = {
    "2, 2, 3, 1 passes": ((2, 2, 3, 1), (), None),
    f"{UNUSED}, then used": ((1, 1, 1), (0, 1), None),
    f"{UNUSED} on rank 1 only, then used": ((1, 1, 1), (1,), 1),
}
EXPECTED = [["3", "3", "4.5", "1.5"], ["1.5"] * 3, ["1.5"] * 3]


class Model(torch.nn.Module):
    """Two layers side by side."""

    def __init__(self):
        super().__init__()
        self.one, self.other = (torch.nn.Linear(4, 1, bias=False) for _ in range(2))

    def forward(self, value, both):
        """Both of them, or one."""
        return self.one(value) + 2 * self.other(value) if both else self.one(value)


def mean_gradient(ddp, rank, passes, both):
    try:
        ddp.zero_grad_buffer()
        for _ in range(passes):  # gradient accumulation with the hooks on
            ddp(torch.full((1, 4), float(rank + 1)), both).sum().backward()
        ddp.finish_grad_sync()
    except (AssertionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}".removesuffix(": ")
    return f"{ddp.module.one.weight.main_grad[0, 0].item():g}"


def run(rank, port, queue):
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1)
    seen = {}
    for loop, (batches, unused_on, bucket_size) in LOOPS.items():
        ddp_config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=bucket_size)
        ddp = DistributedDataParallel(config, ddp_config, Model())
        seen[loop] = [
            mean_gradient(ddp, rank, passes, number > 0 or rank not in unused_on)
            for number, passes in enumerate(batches)
        ]
    queue.put((rank, seen))


def right(seen):
    # More passes than before may end in an error that says so.
    return all(
        got == want or (want == "4.5" and "RuntimeError" in got)
        for loop, wanted in zip(LOOPS, EXPECTED, strict=True)
        for got, want in zip(seen[loop], wanted, strict=True)
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
    print("expected: 3 | 3 | 4.5, or an error that says why not | 1.5 on both ranks; then 1.5 | 1.5 | 1.5 twice")
    sys.exit(not all(right(by_rank[rank]) for rank in (0, 1)))
