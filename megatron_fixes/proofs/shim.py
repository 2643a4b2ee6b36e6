# SPDX-License-Identifier: Apache-2.0
"""Lets Megatron-LM's DistributedDataParallel, pipeline schedules and optimizers run on CPU tensors with gloo.

A double for the part of ``torch.cuda`` that Megatron touches on these paths, installed only in processes that
the proof harness started for the gloo backend. It changes where tensors live and which stream is current;
arithmetic, autograd and process groups are the real ones.

* ``torch.cuda.current_device()`` answers ``cpu``, and ``device="cuda"`` in a tensor factory means ``cpu``.
* ``tensor.type()`` names the type as if the tensor were on a GPU (the mixed-precision optimizers sort parameters by
  that name), and ``tensor.cuda()`` gives the tensor itself, as it does for one that is there already.
* Streams and events are names without asynchrony (``collectives.recorded_streams``); what order a GPU would have
  been bound to is what ``StreamOrderChecker`` tells.
* ``torch.utils.cpp_extension.load_inline`` raises ``RuntimeError``, since megatron-core 0.15 compiles an
  extension on import and falls back when that fails.

Not handled: memory (allocator, pinned memory), graphs, and anything that needs a kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_fixes.collectives import recorded_streams

CPU = torch.device("cpu")


class _CudaMeansCpu(TorchFunctionMode):
    """Maps ``device="cuda"`` in any torch function to ``cpu``, and lets a CPU tensor pass for one on a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs = {**kwargs, "device": CPU}
        if func is torch.Tensor.cuda:
            return args[0]
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def install() -> None:
    """Put the double in place for the rest of this process. Call before megatron is imported."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    recorded_streams.install()

    import torch.utils.cpp_extension as cpp_extension

    def no_inline_extensions(*_: Any, **__: Any) -> None:
        raise RuntimeError("inline extensions are not built where there is no GPU")

    extension: Any = cpp_extension
    extension.load_inline = no_inline_extensions
    _CudaMeansCpu().__enter__()
