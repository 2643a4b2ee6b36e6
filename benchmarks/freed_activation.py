#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether an activation that the interleaved schedule frees while it is sent arrives whole (docs/not_shipped.md).

``python benchmarks/freed_activation.py --tree TREE [--control | --gloo] [--kept]``: two GPUs, megatron-core up to
0.17.1 with PP 2, VPP 2, ``overlap_p2p_comm`` and ``deallocate_pipeline_outputs``, which ``--kept`` leaves off. Every
activation of a microbatch holds one number. Rank 1 is late with each receive, and before each forward a rank fills
blocks that its allocator gives it with NaN. Told is how many received elements are another number than expected, and,
with NCCL, how many forwards began while the rank's last send was under way.

Torch's own allocator is set as always (``PYTORCH_CUDA_ALLOC_CONF``). ``--control`` takes one that ignores
``record_stream``, and ``--gloo`` two CPU ranks on the double of torch.cuda: gloo keeps the tensor and not its memory.
Both are to have wrong elements, which says no more than that this program would see them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fixes.proofs import world
from megatron_fixes.proofs.proof import Backend

ROUNDS, MICROBATCHES, BLOCKS, LATE_CYCLES, LATE_S = 3, 8, 8, 200_000_000, 0.2


def chunk_class(seen: dict[str, Any], shape: tuple[int, ...], device: torch.device) -> Any:
    """The class of a model chunk: the first makes activations, the others look at what they got and go on."""
    from megatron.core.enums import ModelType

    class Chunk(torch.nn.Module):
        model_type = ModelType.encoder_or_decoder

        def __init__(self, config: Any, stage: int, vp_stage: int) -> None:
            super().__init__()
            self.config, self.vp_stage, self.first = config, vp_stage, stage + vp_stage == 0
            self.zero, self.got = torch.nn.Parameter(torch.zeros((), device=device)), torch.zeros(())

        def set_input_tensor(self, tensor: Any) -> None:
            self.got = tensor[0] if isinstance(tensor, list) else tensor

        def forward(self, number: float) -> Any:
            seen["during"] += "send" in seen and not seen["send"].is_completed()
            _spoiled = [torch.full(shape, torch.nan, device=device) for _ in range(BLOCKS)]
            output = torch.full(shape, number, device=device) + self.zero
            if not self.first:
                seen["received"] += self.got.numel()
                seen["wrong"] += (self.got.detach() != number).sum()
                # Its gradient is what the schedule sends back.
                output = output + 0 * self.got.nan_to_num()
            return output

    return Chunk


def body(rank: int, *, tree: Path, gloo: bool, kept: bool) -> Any:
    """One rank: the schedule, three times."""
    from megatron_fixes.proofs.parent import prepare

    prepare(tree, "gloo" if gloo else "nccl")
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.transformer_config import TransformerConfig

    stages = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    parallel_state.initialize_model_parallel(**stages)
    hidden, device = (1024, torch.device("cpu")) if gloo else (4096, torch.device("cuda", rank))
    seen: dict[str, Any] = {"received": 0, "wrong": torch.zeros((), dtype=torch.long, device=device), "during": 0}
    irecv, isend = dist.irecv, dist.isend

    def late(*args: Any, **kwargs: Any) -> Any:
        if rank == 1:
            time.sleep(LATE_S) if gloo else torch.cuda._sleep(LATE_CYCLES)
        return irecv(*args, **kwargs)

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen["send"] = isend(*args, **kwargs)
        return seen["send"]

    dist.irecv, dist.isend = late, noted
    sizes = {"num_layers": 4, "hidden_size": hidden, "num_attention_heads": 1}
    overlap = {"overlap_p2p_comm": True, "batch_p2p_comm": False, "deallocate_pipeline_outputs": not kept}
    config = TransformerConfig(**sizes, **stages, **overlap, pipeline_dtype=torch.float32)
    make = chunk_class(seen, (hidden, 1, hidden), device)
    model = [make(config, rank, vp_stage) for vp_stage in range(2)]

    sizes = {"num_microbatches": MICROBATCHES, "seq_length": hidden, "micro_batch_size": 1}
    numbers = [float(number + 1) for number in range(MICROBATCHES)]

    def forward_step(data: Any, chunk: Any) -> Any:
        return chunk(next(data)), lambda output: (output.mean(), {})

    for _ in range(ROUNDS):
        data = [iter(numbers) for _ in model]
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=data, model=model, **sizes, forward_only=False
        )
    del seen["send"]
    return {**seen, "wrong": int(seen["wrong"])}


def main() -> int:
    """Run both ranks and say what they saw."""
    parser = argparse.ArgumentParser(description="whether an activation that is freed while it is sent arrives whole")
    parser.add_argument("--tree", type=Path, required=True, help="holds megatron/core, as ci/fetch_megatron prints it")
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--control", action="store_true", help="an allocator that ignores record_stream; needs cc")
    way.add_argument("--gloo", action="store_true", help="two CPU ranks")
    parser.add_argument("--kept", action="store_true", help="free no activation: a control that is to be clean")
    options = parser.parse_args()
    if not options.gloo and torch.cuda.device_count() < 2:
        parser.error("this needs two CUDA devices; --gloo runs on CPUs")
    backend: Backend = "gloo" if options.gloo else "nccl"
    with tempfile.TemporaryDirectory(prefix="megatron-fixes-") as folder:
        if options.control:
            library = f"{folder}/allocator.so"
            subprocess.run(["cc", "-shared", "-fPIC", "-o", library, Path(__file__).with_suffix(".c")], check=True)
            # Before CUDA starts, so before the ranks are forked.
            memory = torch.cuda.memory
            memory.change_current_allocator(memory.CUDAPluggableAllocator(library, "take", "give"))
        one = partial(body, tree=options.tree, gloo=options.gloo, kept=options.kept)
        ended = world.run(one, 2, Path(folder), within_s=300.0, group_timeout_s=60.0, backend=backend)
    for rank, end in enumerate(ended):
        print(f"rank {rank}: {end.result or end.log}")
    return 0 if all(end.result for end in ended) else 1


if __name__ == "__main__":
    sys.exit(main())
