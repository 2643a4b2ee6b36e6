# SPDX-License-Identifier: Apache-2.0
"""What the pipeline schedules and ``finalize_model_grads`` ask of a model that is the only stage, and its CPU mesh."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.enums import ModelType
from torch.distributed import DeviceMesh


class OnlyStage(torch.nn.Module):
    """A model with all that they ask for; a subclass brings parameters and ``forward``."""

    model_type = ModelType.encoder_or_decoder
    share_embeddings_and_output_weights = False
    pre_process = post_process = True

    def set_input_tensor(self, tensor: Any) -> None:
        """It is the only stage."""


class CpuMesh:
    """Stands for ``DeviceMesh`` where an FSDP wrapper makes its mesh, which it asks to be of CUDA devices by name."""

    @staticmethod
    def from_group(group: Any, device_type: str, **more: Any) -> DeviceMesh:
        """As ``DeviceMesh.from_group``, of CPU devices."""
        return DeviceMesh.from_group(group, device_type.replace("cuda", "cpu"), **more)
