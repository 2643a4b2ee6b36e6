#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What guards cost a training step: a small GPT of real megatron-core with guards and without, interleaved, medians.

``python benchmarks/guarded_step.py --tree TREE [--rounds 40] [--markdown]``, on a machine with GPUs: a rank each, NCCL,
GPTModel with the local layer spec in Float16Module, 8 layers, hidden 2048, bf16, sequence 1024, overlap and the
distributed optimizer, CUDA_DEVICE_MAX_CONNECTIONS=1, through ``get_forward_backward_func``. Blocks of steps with and
without alternate in one process: guards are installed and taken off between them. ``--tiny`` runs a model of two small
layers on two CPU ranks (gloo), which shows that this program works and nothing about cost.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import nullcontext
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

STEPS = 5  # a block


def batch(rank: int, sizes: dict[str, int], device: Any) -> dict[str, Any]:
    """Tokens to predict, random but fixed."""
    import torch

    generator = torch.Generator().manual_seed(rank)
    shape = (sizes["samples"], sizes["sequence"])
    tokens = torch.randint(0, sizes["vocabulary"], shape, generator=generator).to(device)
    positions = torch.arange(sizes["sequence"]).expand(shape).to(device)
    mask = torch.ones(1, 1, sizes["sequence"], sizes["sequence"]).triu(1).bool().to(device)
    return {"input_ids": tokens, "position_ids": positions, "attention_mask": mask, "labels": tokens.roll(-1, 1)}


def gpt(sizes: dict[str, int], device: Any, *, half: bool) -> Any:
    """The model, and its config."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel()
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(1)
    else:
        get_cuda_rng_tracker().fork = lambda *_: nullcontext()
    config = TransformerConfig(
        num_layers=sizes["layers"],
        hidden_size=sizes["hidden"],
        num_attention_heads=sizes["heads"],
        use_cpu_initialization=device.type == "cpu",
        bf16=half,
        params_dtype=torch.bfloat16 if half else torch.float32,
        pipeline_dtype=torch.bfloat16 if half else torch.float32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), sizes["vocabulary"], sizes["sequence"]).to(device)
    return Float16Module(config, model) if half else model, config


def training(sizes: dict[str, int], rank: int, device: Any, *, half: bool) -> Any:
    """Build model, DDP and optimizer; a function that runs one step."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model, config = gpt(sizes, device, half=half)
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True, bucket_size=40_000_000),
        model,
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-4, bf16=half, use_distributed_optimizer=True), [ddp]
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = ddp.no_sync
    config.grad_scale_func = optimizer.scale_loss
    data = batch(rank, sizes, device)

    def forward(_: Any, module: Any) -> Any:
        return module(**data), lambda output: (output.float().mean(), {"loss": output.detach().float().mean()})

    def step() -> None:
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter([]),
            model=[ddp],
            num_microbatches=sizes["microbatches"],
            seq_length=sizes["sequence"],
            micro_batch_size=sizes["samples"],
            forward_only=False,
        )
        optimizer.step()

    return step


def measure(step: Any, rounds: int, wait: Any) -> dict[str, Any]:
    """Milliseconds of a step, in blocks that alternate."""
    from megatron_fixes import guards

    def block(guarded: bool) -> float:
        if guarded:
            guards.install(deadline_s=600.0)
        step()
        wait()
        began = time.perf_counter()
        for _ in range(STEPS):
            step()
        wait()
        took = (time.perf_counter() - began) / STEPS * 1e3
        if guarded:
            guards.uninstall()
        return took

    block(False)
    taken: dict[bool, list[float]] = {False: [], True: []}
    for number in range(rounds):
        for guarded in (False, True) if number % 2 else (True, False):
            taken[guarded].append(block(guarded))
    ratios = [with_ / without for without, with_ in zip(taken[False], taken[True], strict=True)]
    quarters = statistics.quantiles(ratios, n=4)
    return {
        "without_ms": round(statistics.median(taken[False]), 3),
        "with_ms": round(statistics.median(taken[True]), 3),
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(quarters[0], 4), round(quarters[2], 4)],
    }


TINY = {
    "layers": 2,
    "hidden": 16,
    "heads": 2,
    "vocabulary": 64,
    "sequence": 8,
    "samples": 2,
    "microbatches": 2,
}
SMALL = {
    "layers": 8,
    "hidden": 2048,
    "heads": 16,
    "vocabulary": 32000,
    "sequence": 1024,
    "samples": 2,
    "microbatches": 4,
}


def rank(number: int, ranks: int, tree: str, folder: str, rounds: int, tiny: bool) -> None:
    """One rank; the first writes the report."""
    from megatron_fixes.proofs.parent import prepare

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    prepare(Path(tree), "gloo" if tiny else "nccl")
    import torch
    import torch.distributed as dist

    if not tiny:
        torch.cuda.set_device(number)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo" if tiny else "nccl", store=store, rank=number, world_size=ranks)
    device = torch.device("cpu") if tiny else torch.device("cuda", number)
    step = training(TINY if tiny else SMALL, number, device, half=not tiny)
    report = measure(step, rounds, (lambda: None) if tiny else torch.cuda.synchronize)
    if number == 0:
        Path(folder, "report.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: list[str]) -> int:
    """Measure and print."""
    import torch
    import torch.multiprocessing

    parser = argparse.ArgumentParser(description="what guards cost a training step")
    parser.add_argument("--tree", required=True, help="holds megatron/core, as ci/fetch_megatron prints it")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tiny", action="store_true", help="on CPU, only to see that it works")
    parser.add_argument("--markdown", action="store_true", help="a table for the docs")
    options = parser.parse_args(arguments)
    ranks = 2 if options.tiny else torch.cuda.device_count()
    if not ranks:
        parser.error("torch finds no CUDA device; --tiny runs on a CPU")
    with TemporaryDirectory(prefix="megatron-fixes-") as folder:
        spawned = partial(torch.multiprocessing.spawn, rank, nprocs=ranks)
        spawned((ranks, options.tree, folder, options.rounds, options.tiny))
        report = json.loads(Path(folder, "report.json").read_text())
    machine = "2 CPU ranks, tiny" if options.tiny else f"{ranks} × {torch.cuda.get_device_name(0)}"
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    if not options.markdown:
        print(json.dumps({"machine": machine, "torch": torch.__version__, "date": date, **report}, indent=1))
        return 0
    print(f"{machine}, torch {torch.__version__}, {date}, {options.rounds} rounds of {STEPS} steps each way\n")
    print("| a step | without guards | with | ratio (quartiles) |\n|---|---|---|---|")
    low, high = report["ratio_quartiles"]
    print(f"| median | {report['without_ms']} ms | {report['with_ms']} ms | {report['ratio']} ({low} to {high}) |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
