# SPDX-License-Identifier: Apache-2.0
"""One rank of an NCCL case started as users start jobs: ``python -m torch.distributed.run --nproc-per-node 2 -m …``.

``… -m megatron_fixes.proofs.torchrun TREE FIX CASE``: the tree goes first on the path, the overlay is on if the
environment says so (``MEGATRON_FIXES``), and rank 0 prints one JSON object: the judgement, and what the overlay
had in force on each rank. Bounded in time by the case's deadline, as an alarm.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from pathlib import Path

from megatron_fixes import overlay
from megatron_fixes.proofs.parent import load, prepare
from megatron_fixes.proofs.ranks import GRACE_S


def main(arguments: list[str]) -> None:
    """Run the case on this rank; rank 0 gathers, judges and prints."""
    tree, fix_id, name = Path(arguments[0]), arguments[1], arguments[2]
    prepare(tree, "nccl")
    case = next(case for case in load(fix_id, tree).on("nccl") if case.name == name)
    signal.alarm(int(case.timeout_s + GRACE_S))

    import torch
    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", timeout=timedelta(seconds=case.timeout_s))
    evidence = case.run(rank)
    # Through the store: a case may leave collectives behind that never end.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"evidence/{rank}", json.dumps({"evidence": evidence, "in_force": list(overlay.status().in_force)}))
    if rank == 0:
        gathered = [json.loads(store.get(f"evidence/{peer}")) for peer in range(dist.get_world_size())]
        judgement = case.judge([one["evidence"] for one in gathered])
        report = {"id": fix_id, "case": name, "outcome": judgement.outcome, "summary": judgement.summary}
        print(json.dumps({**report, "in_force": [one["in_force"] for one in gathered]}), flush=True)
        store.set("judged", "1")
    store.wait(["judged"])
    # As in rank: groups that Megatron made are not torn down one by one.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
