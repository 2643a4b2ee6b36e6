# SPDX-License-Identifier: Apache-2.0
"""The process of one release and variant: imports Megatron once, then forks the ranks of each proof.

Forked by ``fork_server``, or started by hand: ``python -m megatron_fixes.proofs.parent [--briefly] TREE BACKEND
FIX_ID…``. The tree goes first on ``sys.path``. Prints one JSON object a line: a result a proof, as it is known.
Importing costs seconds and a fork costs milliseconds, and a case that wrecks its process group wrecks only its own
ranks. An NCCL rank can't be forked once the import has touched CUDA; then it is a process of its own that imports for
itself.

Bounded in time: at a case's deadline the ranks still running are killed by process id, and a rank whose parent
was killed ends by its own alarm. A rank that dies or raises makes the case ``not-runnable``, with its message:
the proof was not carried out. It is never taken for a clean run. A case whose rank crashed is run once more and says
so (``again_after``): once in some 10,000 cases a rank was seen to find its heap broken.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_fixes import config, overlay
from megatron_fixes.proofs.proof import overall
from megatron_fixes.proofs.ranks import GRACE_S, ForkedRank, SpawnedRank, cuda_starts_in_a_fork, wait
from megatron_fixes.proofs.rendezvous import join_store, keep_store

if TYPE_CHECKING:
    from megatron_fixes.catalog.expectation import Outcome
    from megatron_fixes.proofs.proof import Backend, Case, Proof
    from megatron_fixes.proofs.ranks import Rank

BRIEFLY = "--briefly"
CRASHES = frozenset({-signal.SIGABRT, -signal.SIGBUS, -signal.SIGSEGV})


def prepare(tree: Path, backend: Backend) -> None:
    """Put the tree first on the path; turn the overlay on if the environment says so; for gloo, install the shim.

    Must come before megatron is imported.
    """
    sys.path.insert(0, str(tree))
    # Byte code counts as current by size and time of its source, which a changed tree may keep.
    sys.dont_write_bytecode = True
    # Lets torch look for devices without CUDA's own start, which no fork survives.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    if config.overlay_settings().fixes.value:
        import megatron_fixes.auto  # noqa: F401 - its import acts
    import torch

    torch.set_num_threads(1)
    if backend == "gloo":
        from megatron_fixes.proofs import shim

        shim.install()


def load(fix_id: str, tree: Path) -> Proof:
    """Import a proof module, and check that Megatron came from the tree and from nowhere else.

    Raises:
        ImportError: Something the release needs is missing, or megatron came from elsewhere.
    """
    # Collections would go over all that is imported, here and in each rank, and have each rank copy it by touching it.
    gc.disable()
    try:
        module = importlib.import_module(f"megatron_fixes.proofs.{fix_id.lower()}")
        origin = importlib.import_module("megatron.core").__file__
    finally:
        gc.freeze()
        gc.enable()
    if origin is None or tree.resolve() not in Path(origin).resolve().parents:
        raise ImportError(f"megatron.core came from {origin}, expected it under {tree}")
    proof: Proof = module.PROOF
    return proof


def _loaded(fix_id: str, tree: Path) -> Proof | ImportError:
    try:
        return load(fix_id, tree)
    except ImportError as error:
        return error


def run_rank(case: Case, rank: int, folder: Path) -> None:
    """Run one rank of a case in this process and write its evidence into ``folder``."""
    import torch
    import torch.distributed as dist

    signal.alarm(int(case.timeout_s + 2 * GRACE_S))
    # The first call after a fork makes torch's thread pool anew; two threads of autograd that do so at once abort.
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if case.backend == "nccl":
        torch.cuda.set_device(rank)
    try:
        dist.init_process_group(
            case.backend,
            store=join_store(folder),
            rank=rank,
            world_size=case.world_size,
            # After the case's deadline, so that a hang is always told by that.
            timeout=timedelta(seconds=case.timeout_s + GRACE_S),
        )
        evidence = json.dumps(case.run(rank))
    except BaseException as error:
        (folder / f"{rank}.error").write_text(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        raise
    (folder / f"{rank}.part").write_text(evidence)
    os.replace(folder / f"{rank}.part", folder / f"{rank}.json")


def _start(case: Case, fix_id: str, tree: Path, rank: int, folder: Path) -> Rank:
    log = folder / f"{rank}.log"
    if case.backend == "gloo" or cuda_starts_in_a_fork():
        return ForkedRank(lambda: run_rank(case, rank, folder), log)
    command = [sys.executable, "-m", "megatron_fixes.proofs.rank", str(tree), fix_id, case.name, str(rank), str(folder)]
    return SpawnedRank([*command, str(os.getpid())], log)


def _first_to_fail(folder: Path, failed: dict[int, int]) -> int:
    """The rank that is the cause: peers that lost it fail after it, and none of them is ended by a signal."""

    def order(rank: int) -> tuple[bool, int]:
        error = folder / f"{rank}.error"
        return failed[rank] >= 0, error.stat().st_mtime_ns if error.exists() else sys.maxsize

    return min(failed, key=order)


def _failure(folder: Path, rank: int, code: int) -> str:
    error = folder / f"{rank}.error"
    if error.exists():
        return f"rank {rank}: {error.read_text().splitlines()[0]}"
    log = folder / f"{rank}.log"
    lines = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    # What ends a C++ thread says why before it prints its stack.
    said = next((line.strip() for line in lines if line.strip().startswith("what():")), lines[-1] if lines else "")
    return f"rank {rank}: ended with exit code {code}" + (f" ({said})" if said else "")


def run_case(case: Case, fix_id: str, tree: Path) -> dict[str, Any]:
    """Run a case, and once more if a rank of it crashed. Never raises for what a rank did."""
    report, code = _run_once(case, fix_id, tree)
    if code not in CRASHES:
        return report
    return {**_run_once(case, fix_id, tree)[0], "again_after": report["summary"]}


def _run_once(case: Case, fix_id: str, tree: Path) -> tuple[dict[str, Any], int]:
    """Start the ranks of a case, wait, and judge; return with it the exit code of the rank that failed first, or 0."""
    folder = Path(tempfile.mkdtemp(prefix="megatron-fixes-"))
    started = time.monotonic()
    ranks: dict[int, Rank] = {}
    keeper: Rank | None = None
    try:
        keeper = ForkedRank(lambda: keep_store(folder), folder / "store.log")
        for rank in range(case.world_size):
            ranks[rank] = _start(case, fix_id, tree, rank, folder)
        codes = wait(ranks, started + case.timeout_s)
        report: dict[str, Any] = {"ranks": case.world_size, "seconds": round(time.monotonic() - started, 2)}
        if case.control:
            report["control"] = True
        failed = {rank: code for rank, code in codes.items() if code}
        late = [rank for rank, code in codes.items() if code is None]
        if failed:
            cause = _first_to_fail(folder, failed)
            summary = _failure(folder, cause, failed[cause])
            return {**report, "outcome": "not-runnable", "summary": summary}, failed[cause]
        if late:
            summary = f"ranks {late} not done after {case.timeout_s:g} s"
            return {**report, "outcome": "timeout", "summary": summary}, 0
        evidence = [json.loads((folder / f"{rank}.json").read_text()) for rank in ranks]
        judgement = case.judge(evidence)
        return {**report, "outcome": judgement.outcome, "summary": judgement.summary, "by_rank": evidence}, 0
    finally:
        for started_rank in ranks.values():
            started_rank.kill()
        if keeper:
            keeper.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _devices() -> int:
    import torch

    # Counts without creating a context.
    return torch.cuda.device_count()


def run_proof(
    proof: Proof, backend: Backend, tree: Path, controls: dict[Case, dict[str, Any]], *, briefly: bool = False
) -> dict[str, Any]:
    """Run a proof's cases on one backend, one after the other; a control that another proof ran is not run again.

    Args:
        proof: Whose cases.
        backend: ``gloo`` or ``nccl``.
        tree: Where megatron is imported from.
        controls: Reports of the controls that ran over this tree in this process; added to.
        briefly: Stop at the first case that is not clean.
    """
    needed = max((case.world_size for case in proof.on(backend)), default=0) if backend == "nccl" else 0
    if needed > (found := _devices()):
        reason = f"needs {needed} CUDA devices, found {found}"
        return {"id": proof.fix_id, "outcome": "not-runnable", "evidence": {"reason": reason}}
    outcomes: dict[bool, list[Outcome]] = {True: [], False: []}
    evidence: dict[str, Any] = {}
    for case in proof.on(backend):
        report = controls.get(case) or run_case(case, proof.fix_id, tree)
        if case.control:
            controls[case] = report
        outcomes[case.control].append(report["outcome"])
        evidence[case.name] = report
        if briefly and report["outcome"] != "clean":
            break
    if not evidence:
        evidence.update(reason=f"this proof has no case for {backend}", no_case=True)
    if (status := overlay.status()).on:
        evidence["overlay"] = {"in_force": status.in_force, "refused": [refusal.line for refusal in status.refusals]}
    return {"id": proof.fix_id, "outcome": overall(outcomes[False], outcomes[True]), "evidence": evidence}


def main(arguments: list[str]) -> int:
    """Run the named proofs over a tree; print a JSON line each."""
    briefly = BRIEFLY in arguments
    tree, backend, *fix_ids = [argument for argument in arguments if argument != BRIEFLY]
    assert backend in ("gloo", "nccl")
    prepare(Path(tree), backend)  # type: ignore[arg-type]
    controls: dict[Case, dict[str, Any]] = {}
    # All of them before the first fork: what Megatron imports only when it is needed is then there for every rank.
    loaded = {fix_id: _loaded(fix_id, Path(tree)) for fix_id in dict.fromkeys(fix_ids)}
    for fix_id in fix_ids:
        proof = loaded[fix_id]
        if isinstance(proof, ImportError):
            reason = f"{type(proof).__name__}: {proof}"
            result = {"id": fix_id, "outcome": "not-runnable", "evidence": {"reason": reason}}
        else:
            result = run_proof(proof, backend, Path(tree), controls, briefly=briefly)  # type: ignore[arg-type]
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
