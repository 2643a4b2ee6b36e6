# SPDX-License-Identifier: Apache-2.0
"""ChainedOptimizer: after an overflow in expert parameters only, their gradients are unscaled by the wrong loss scale.

Cause: ``ChainedOptimizer.prepare_grads`` (megatron/core/optimizer/optimizer.py) lets each optimizer update a
``DynamicGradScaler`` of its own with what that optimizer alone found, while ``ChainedOptimizer.get_loss_scale``
scales the loss with the scale of the first. Once the scales differ, nothing brings them together again.

Runs on the CPU with gloo, one process: ``PYTHONPATH=MEGATRON_LM python mf0006.py``. Exits 1 if the defect shows.
"""

import sys
import tempfile

import torch
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """Let "cuda" mean the CPU, and a CPU tensor's type be named as if it were on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)
        named = func is torch.Tensor.type and isinstance(result, str)
        return result.replace("torch.", "torch.cuda.", 1) if named else result


torch.cuda.current_device = lambda: "cpu"
torch.cuda.current_stream = lambda *_: None

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402


class Model(torch.nn.Module):
    """A dense and an expert weight whose gradients are what they are multiplied with."""

    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
        self.expert = torch.nn.Parameter(torch.ones(4, dtype=torch.float16))
        self.expert.allreduce = False

    def forward(self, dense, expert):  # noqa: D102
        return self.dense.float().sum() * dense + self.expert.float().sum() * expert


def main():
    store = f"file://{tempfile.mkdtemp()}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, fp16=True)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), Model())
    settings = OptimizerConfig(
        optimizer="adam", lr=0.01, clip_grad=0.0, fp16=True, params_dtype=torch.float16,
        initial_loss_scale=1024.0, min_loss_scale=1.0, loss_scale_window=1000, hysteresis=1,
    )  # fmt: skip
    chain = get_megatron_optimizer(settings, [model])
    for expert in (1000.0, 1.0):  # 1000 * 1024 leaves the range of fp16, in the expert's gradient only
        model.zero_grad_buffer()
        chain.zero_grad()
        chain.scale_loss(model(1.0, expert)).backward()
        model.finish_grad_sync()
        chain.step()
    scales = [optimizer.get_loss_scale().item() for optimizer in chain.chained_optimizers]
    gradients = [o.fp32_from_float16_groups[0][0].grad[0].item() for o in chain.chained_optimizers]
    print(f"observed: loss scales {scales} and unscaled gradients {gradients} (dense, expert) in the step after it")
    print("expected: loss scales [512.0, 512.0] and unscaled gradients [1.0, 1.0]")
    return int(scales != [512.0, 512.0] or gradients != [1.0, 1.0])


if __name__ == "__main__":
    with OnCpu():
        code = main()
    torch.distributed.destroy_process_group()
    sys.exit(code)
