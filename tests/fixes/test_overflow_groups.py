# SPDX-License-Identifier: Apache-2.0
"""What an optimizer found is the same on all ranks: MF0006 needs no communication of its own.

An optimizer reduces its overflow flag over one process group, the dense and the expert one over different ones. The
flag is the same everywhere if each of those groups has, between its members, every gradient there is. That is asked
of the real groups, in every layout of 8 ranks. PyTorch's fake process groups: nothing is sent.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from megatron_fixes import catalog
from megatron_fixes.proofs.releases import fetch

CATALOG = catalog.load()

PROGRAM = """
import inspect, itertools, json, os, sys
from pathlib import Path
from megatron_fixes.proofs.parent import prepare
prepare(Path(sys.argv[1]), "gloo")
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from megatron.core import parallel_state as ps

WORLD = 8
NAMES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
         "expert_model_parallel_size", "expert_tensor_parallel_size", "num_distributed_optimizer_instances")

# 0.12 shards experts over all their replicas, and the distributed optimizer reduces over all ranks.
PARTIAL = {"partial_expert_data_parallel": True}
if "partial_expert_data_parallel" not in inspect.signature(ps.get_expert_data_parallel_group).parameters:
    PARTIAL = {}
instance = getattr(ps, "get_intra_distributed_optimizer_instance_group", lambda: dist.group.WORLD)

def groups(rank, sizes):
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
    ps.initialize_model_parallel(**dict(zip(NAMES, sizes)), create_gloo_process_groups=False)
    found = {
        "same dense": ps.get_data_parallel_group(with_context_parallel=True),
        "shards dense": ps.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True),
        "same expert": ps.get_expert_data_parallel_group(),
        "shards expert": ps.get_expert_data_parallel_group(**PARTIAL),
        "plain dense": ps.get_model_parallel_group(),
        "plain expert": ps.get_expert_tensor_model_pipeline_parallel_group(),
        "distributed": instance(),
    }
    return {name: dist.get_process_group_ranks(group) for name, group in found.items()}

def in_a_process(rank, sizes):
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            os.write(write, json.dumps(groups(rank, sizes)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        text = stream.read()
    os.wait()
    return json.loads(text)

layouts = []
for sizes in itertools.product((1, 2), (1, 2), (1, 2), (1, 2, 4), (1, 2), (1, 2)):
    tp, pp, cp, ep, etp, instances = sizes
    if WORLD % (tp * pp * cp * instances) or WORLD % (etp * ep * pp * instances):
        continue
    layouts.append({"sizes": sizes, "ranks": [in_a_process(rank, sizes) for rank in range(WORLD)]})
print(json.dumps(layouts))
"""


def covers(ranks: list[dict[str, list[int]]], layer: str, optimizer: str) -> bool:
    """Whether each group that a flag is reduced over has every gradient (every shard of it, if distributed)."""
    group = "distributed" if optimizer == "distributed" else f"plain {layer}"

    def gradient(rank: int) -> tuple[object, ...]:
        shard = ranks[rank][f"shards {layer}"].index(rank) if optimizer == "distributed" else 0
        return tuple(ranks[rank][f"same {layer}"]), shard

    everything = {gradient(rank) for rank in range(len(ranks))}
    return all({gradient(member) for member in of[group]} == everything for of in ranks)


@pytest.mark.parametrize("line", [line for line, series in CATALOG.series.items() if "MF0006" in series.ids()])
def test_each_optimizers_overflow_flag_is_the_same_on_every_rank(line: str) -> None:
    tree = fetch(CATALOG.matrix.lines()[line][-1], CATALOG.matrix)
    command = [sys.executable, "-c", PROGRAM, str(tree)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    layouts = json.loads(done.stdout.splitlines()[-1])
    assert len(layouts) > 30
    for layout in layouts:
        for layer in ("dense", "expert"):
            for optimizer in ("plain", "distributed"):
                assert covers(layout["ranks"], layer, optimizer), (layout["sizes"], layer, optimizer)


def test_a_group_that_lacks_a_gradient_is_seen() -> None:
    # Two ranks with an expert each, whose flag would stay with one rank.
    own = [{"same expert": [rank], "shards expert": [rank], "plain expert": [rank]} for rank in range(2)]
    assert not covers(own, "expert", "plain")
    assert covers([{**of, "plain expert": [0, 1]} for of in own], "expert", "plain")
