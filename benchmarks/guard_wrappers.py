#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the guards' wrappers alone cost, a bucket group and step: real megatron-core on one CPU rank, interleaved.

``python benchmarks/guard_wrappers.py --tree TREE [--rounds 101] [--markdown]``. A step is the calls that guards wrap:
``zero_grad_buffer``, then the reduction of gradients of each of 8 bucket groups of one small bucket, started and
finished; in the second row their gather of parameters too. No forward, backward or optimizer. gloo with one rank,
overlap, distributed optimizer. Steps with all guards and without follow each other in random order in blocks; a
difference is of two blocks that lie side by side.

What is told is CPU time of the thread that trains, without gloo's own threads. There is no deadline: on a GPU one
thread for all compares times, where on a CPU each wait would be bounded instead, which costs hundreds of microseconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from measuring import interleaved, laid_out, place

GROUPS, STEPS = 8, 25
ROWS = {"gradient reduction": False, "gradient reduction and parameter gather": True}


def wrapped_model(tree: Path, store: Path) -> Any:
    """DistributedDataParallel of a few small layers, a bucket group each, on one gloo rank."""
    from megatron_fixes.proofs.parent import prepare

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    prepare(tree, "gloo")
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    dist.init_process_group("gloo", store=dist.FileStore(str(store), 1), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    setting = DistributedDataParallelConfig(
        overlap_grad_reduce=True, overlap_param_gather=True, use_distributed_optimizer=True, bucket_size=1
    )
    layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(GROUPS)]
    ddp = DistributedDataParallel(config, setting, torch.nn.Sequential(*layers))
    for bucket_group in ddp.bucket_groups:
        # As after the first batch, which issues its collectives elsewhere.
        bucket_group.is_first_batch = False
    if len(ddp.bucket_groups) != GROUPS:
        sys.exit(f"got {len(ddp.bucket_groups)} bucket groups, expected {GROUPS}")
    return ddp


def step(ddp: Any, gathers: bool) -> None:
    """What guards wrap in a step."""
    ddp.zero_grad_buffer()
    for bucket_group in ddp.bucket_groups:
        bucket_group.start_grad_sync()
    for bucket_group in ddp.bucket_groups:
        bucket_group.finish_grad_sync()
    for bucket_group in ddp.bucket_groups if gathers else ():
        bucket_group.start_param_sync()
        bucket_group.finish_param_sync(skip_next_bucket_dispatch=True)


def block(ddp: Any, guarded: bool, gathers: bool, _: int) -> float:
    """CPU seconds of this thread a bucket group and step, over some steps."""
    from megatron_fixes import guards

    if guarded:
        guards.install()
    # The double of torch.cuda looks at every torch function, and is not what is measured.
    with torch._C.DisableTorchFunction():
        step(ddp, gathers)
        began = time.thread_time()
        for _step in range(STEPS):
            step(ddp, gathers)
        took = time.thread_time() - began
    if guarded:
        guards.uninstall()
    return took / STEPS / GROUPS


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="what the guards' wrappers alone cost")
    parser.add_argument("--tree", type=Path, required=True, help="holds megatron/core, as ci/fetch_megatron prints it")
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--markdown", action="store_true", help="a table for the docs")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: list[tuple[str, ...]] = [("guards", "without, µs", "with, µs", "difference, µs (quartiles)")]
    with TemporaryDirectory(prefix="megatron-fixes-") as folder:
        ddp = wrapped_model(options.tree, Path(folder, "store"))
        for name, gathers in ROWS.items():
            measures = {g: partial(block, ddp, g == "with", gathers) for g in ("without", "with")}
            taken = interleaved(measures, options.rounds, said=False)
            more = [(with_ - without) * 1e6 for without, with_ in zip(taken["without"], taken["with"], strict=True)]
            low, middle, high = statistics.quantiles(more, n=4)
            medians = [f"{statistics.median(times) * 1e6:.1f}" for times in taken.values()]
            rows.append((name, *medians, f"{middle:.1f} ({low:.1f} to {high:.1f})"))
    print(f"{', '.join(place().values())}; {options.rounds} rounds; a bucket group and step\n")
    print(laid_out(rows, options.markdown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
