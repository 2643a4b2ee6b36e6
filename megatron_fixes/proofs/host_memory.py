# SPDX-License-Identifier: Apache-2.0
"""Tells tensors in host memory from those on the device, where both are on the CPU (``shim``).

Inside the block a tensor is in host memory if it came from ``cpu()``, from a factory with ``device="cpu"``, or from
an operation on such tensors only; every other one says that it is on the device (``is_cuda``). Copies between the
two are real copies, and pinning means nothing.

Not handled: how long a copy takes. What a GPU would be bound to wait for is what ``recorder`` knows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_IS_CUDA: Any = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


class HostMemory(TorchFunctionMode):
    """Remembers which storages are in host memory; they are kept until it goes, so that no address means two."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, torch.UntypedStorage] = {}

    def _holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._storages

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if func == _IS_CUDA:
            return not self._holds(args[0])
        if func is torch.Tensor.pin_memory:
            return args[0]
        given = _tensors((args, kwargs))
        if func is torch.Tensor.cpu:
            result, to_host = args[0].clone(), True
        else:
            result = func(*args, **kwargs)
            to_host = kwargs.get("device") == "cpu" if not given else all(map(self._holds, given))
        if to_host:
            for tensor in _tensors(result):
                storage = tensor.untyped_storage()
                self._storages[storage.data_ptr()] = storage
        return result
