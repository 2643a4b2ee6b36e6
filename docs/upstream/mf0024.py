# SPDX-License-Identifier: Apache-2.0
"""Gradient norm misses the learnable attention sinks of all tensor-parallel ranks but the first.

Cause: `DotProductAttention.__init__` (megatron/core/transformer/dot_product_attention.py) gives each rank the
`softmax_offset` of its own heads without `tensor_model_parallel`, so that `param_is_not_tensor_parallel_duplicate`
takes it for a duplicate on every tensor-parallel rank but the first.

Needs torch and megatron-core; two processes on CPU with gloo. Exit code 1: the defect shows; 0: it does not.
"""

import math
import socket
import sys

import torch

torch.cuda.current_device = lambda: torch.device("cpu")  # no GPU is needed to see it


def on_cpu(make):
    return lambda *args, **kwargs: make(*args, **{key: value for key, value in kwargs.items() if key != "device"})


torch.empty, torch.zeros, torch.ones, torch.tensor = map(on_cpu, (torch.empty, torch.zeros, torch.ones, torch.tensor))
HEADS = 4


def run(rank, port, queue):
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=4 * HEADS,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        attention_dropout=0.0,
        softmax_type="learnable",
    )
    attention = DotProductAttention(config, 1, AttnMaskType.causal, "self")
    torch.nn.init.zeros_(attention.softmax_offset)
    optimizer = FP32Optimizer(torch.optim.SGD(attention.parameters(), lr=0.1), OptimizerConfig(), lambda *_: None)
    torch.manual_seed(rank)
    query, key, value = torch.randn(3, 5, 1, HEADS // 2, 4).unbind(0)
    attention(query, key, value, None).sum().backward()
    queue.put((optimizer.get_grad_norm(), attention.softmax_offset.grad.square().sum().item()))


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(run, (free_port, results), nprocs=2)
    norms, squares = zip(*(results.get() for _ in range(2)), strict=True)
    expected = math.sqrt(sum(squares))
    print(f"observed: gradient norm over {HEADS} heads on 2 ranks: {norms[0]:.6f}")
    print(f"expected: {expected:.6f}")
    sys.exit(not all(math.isclose(norm, expected, rel_tol=1e-5) for norm in norms))
