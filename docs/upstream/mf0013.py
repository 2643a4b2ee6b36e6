# SPDX-License-Identifier: Apache-2.0
"""HybridDeviceOptimizer updates a parameter that has no gradient with its gradient of an earlier step.

Cause: in megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py, ``_set_sub_optimizer_grads`` only sets
``requires_grad = False`` on the inner parameter (float32 master or CPU copy) when the model's parameter has no
gradient; the inner optimizer skips a parameter by ``grad is None``, and the gradient of the last step is still there.

Run: ``PYTHONPATH=<a Megatron-LM checkout> python mf0013.py``, one process. Exit code 1: the defect shows; 0: it does
not. Without a GPU the branch with a float32 master is shown; with one, that with a copy on the CPU too.
"""

import contextlib
import sys
import types

import torch

GPU = torch.cuda.is_available()
if not GPU:
    stream = types.SimpleNamespace(wait_stream=lambda other: None, record_event=lambda: stream)
    stream.wait, stream.synchronize = (lambda other=None: None), (lambda: None)
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.Stream = torch.cuda.current_stream = lambda: stream
    torch.cuda.stream = lambda _: contextlib.nullcontext()
    torch.Tensor.is_cuda = True

from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer  # noqa: E402


def step_without_gradient(offload_fraction):
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16, device="cuda" if GPU else "cpu"))
    optimizer = HybridDeviceOptimizer(
        [weight],
        offload_fraction=offload_fraction,
        cpu_optimizer_cls=torch.optim.SGD,
        gpu_optimizer_cls=torch.optim.SGD,
        param_update_in_fp32=True,
        lr=0.5,
    )
    weight.sum().backward()
    optimizer.step()
    before = weight.item()
    optimizer.zero_grad()
    optimizer.step()
    return before, weight.item()


if __name__ == "__main__":
    seen = {fraction: step_without_gradient(fraction) for fraction in ((0.0, 1.0) if GPU else (0.0,))}
    print("observed:", "; ".join(f"offload_fraction {f}: a weight goes from {b} to {a}" for f, (b, a) in seen.items()))
    print("expected: a weight without a gradient stays where it is")
    sys.exit(any(before != after for before, after in seen.values()))
