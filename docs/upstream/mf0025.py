# SPDX-License-Identifier: Apache-2.0
"""HybridDeviceOptimizer steps on the GPU before the gradients have been converted to the dtype of the masters.

Cause: `HybridDeviceOptimizer.step` (megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py) converts gradients in
`_set_sub_optimizer_grads` on its d2h stream, and then calls `gpu_optimizer.step` on the current stream without a wait.

Needs a GPU, torch and megatron-core. Exit code 1: the defect shows; 0: it does not; 2: no GPU.
"""

import sys

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

SIZE, STEPS, WARM_UP = 4 * 2**20, 9, 3
if not torch.cuda.is_available():
    sys.exit(2)

parameters = [torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.bfloat16, device="cuda")) for _ in range(2)]
optimizer = HybridDeviceOptimizer(
    parameters,
    offload_fraction=0.5,
    cpu_optimizer_cls=torch.optim.SGD,
    gpu_optimizer_cls=torch.optim.SGD,
    param_update_in_fp32=True,
    overlap_cpu_optimizer_d2h_h2d=True,
    lr=1.0,
)
(resident,) = [parameter for parameter in parameters if parameter not in optimizer.gpu_params_map_cpu_copy]
master = optimizer.param_to_fp32_param[resident]
wrong = 0
for step in range(STEPS):
    gradient = float(step * 7 % 61 + 1)
    expected = master.detach() - gradient
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, gradient)
    torch.cuda.synchronize()
    if step >= WARM_UP:
        with torch.cuda.stream(optimizer._d2h_stream):
            torch.cuda._sleep(200_000_000)  # as if copies of other gradients were still under way
    optimizer.step()
    torch.cuda.synchronize()
    wrong += step >= WARM_UP and not torch.equal(master.detach(), expected)
    master.data.copy_(expected)
print(
    f"observed: the float32 master of the parameter on the GPU is wrong after {wrong} of {STEPS - WARM_UP} steps of SGD"
)
print("expected: 0")
sys.exit(wrong > 0)
