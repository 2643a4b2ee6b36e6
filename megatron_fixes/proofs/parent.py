# SPDX-License-Identifier: Apache-2.0
"""The process of one release and variant: imports Megatron once, then forks the ranks of each proof.

Started as ``python -m megatron_fixes.proofs.parent TREE BACKEND FIX_ID…`` with the tree first on ``sys.path``.
Prints one JSON object a line: a result a proof, as it is known. Importing costs seconds and a fork costs
milliseconds, and a case that wrecks its process group wrecks only its own ranks. With NCCL a rank can't be
forked from a process that may have touched CUDA, so there each rank is a process of its own that imports for
itself.

Bounded in time: at a case's deadline the ranks still running are killed by process id, and a rank whose parent
was killed ends by its own alarm. A rank that dies or raises makes the case ``not-runnable``, with its message:
the proof was not carried out. It is never taken for a clean run.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_fixes import config, overlay
from megatron_fixes.proofs.proof import worst

if TYPE_CHECKING:
    from megatron_fixes.catalog.expectation import Outcome
    from megatron_fixes.proofs.proof import Backend, Case, Proof

# Peers of a rank that failed get this long to fail as well; a process group's own timeout comes this much after the
# case's deadline, so that a hang is always told by the deadline.
GRACE_S = 5.0


def prepare(tree: Path, backend: Backend) -> None:
    """Put the tree first on the path; turn the overlay on if the environment says so; for gloo, install the shim.

    Must come before megatron is imported.
    """
    sys.path.insert(0, str(tree))
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
    module = importlib.import_module(f"megatron_fixes.proofs.{fix_id.lower()}")
    origin = importlib.import_module("megatron.core").__file__
    if origin is None or tree.resolve() not in Path(origin).resolve().parents:
        raise ImportError(f"megatron.core came from {origin}, expected it under {tree}")
    proof: Proof = module.PROOF
    return proof


def run_rank(case: Case, rank: int, folder: Path) -> None:
    """Run one rank of a case in this process and write its evidence into ``folder``."""
    import torch
    import torch.distributed as dist

    signal.alarm(int(case.timeout_s + 2 * GRACE_S))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if case.backend == "nccl":
        torch.cuda.set_device(rank)
    try:
        dist.init_process_group(
            case.backend,
            init_method=f"file://{folder / 'rendezvous'}",
            rank=rank,
            world_size=case.world_size,
            timeout=timedelta(seconds=case.timeout_s + GRACE_S),
        )
        evidence = json.dumps(case.run(rank))
    except BaseException as error:
        (folder / f"{rank}.error").write_text(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        raise
    (folder / f"{rank}.part").write_text(evidence)
    os.replace(folder / f"{rank}.part", folder / f"{rank}.json")


def _fork(case: Case, rank: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    # Whatever happens, this child must end here and not go on as a second parent.
    try:
        log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        run_rank(case, rank, folder)
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _spawn(case: Case, fix_id: str, tree: Path, rank: int, folder: Path) -> int:
    command = [sys.executable, "-m", "megatron_fixes.proofs.rank", str(tree), fix_id, case.name, str(rank), str(folder)]
    with (folder / f"{rank}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log).pid


def _wait(pids: dict[int, int], deadline: float) -> dict[int, int | None]:
    """Wait for every rank; kill what is left at the deadline. Maps rank to exit status, None if killed here."""
    codes: dict[int, int | None] = {}
    try:
        while len(codes) < len(pids) and time.monotonic() < deadline:
            for rank, pid in pids.items():
                if rank not in codes:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        codes[rank] = os.waitstatus_to_exitcode(status)
                        if codes[rank]:
                            deadline = min(deadline, time.monotonic() + GRACE_S)
            time.sleep(0.005)
    finally:
        for rank, pid in pids.items():
            if rank not in codes:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[rank] = None
    return codes


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
    return f"rank {rank}: ended with exit code {code}" + (f" ({lines[-1]})" if lines else "")


def run_case(case: Case, fix_id: str, tree: Path) -> dict[str, Any]:
    """Start the ranks of a case, wait, and judge. Never raises for what a rank did."""
    folder = Path(tempfile.mkdtemp(prefix="megatron-fixes-"))
    started = time.monotonic()
    try:
        ranks = range(case.world_size)
        if case.backend == "gloo":
            pids = {rank: _fork(case, rank, folder) for rank in ranks}
        else:
            pids = {rank: _spawn(case, fix_id, tree, rank, folder) for rank in ranks}
        codes = _wait(pids, started + case.timeout_s)
        report: dict[str, Any] = {"ranks": case.world_size, "seconds": round(time.monotonic() - started, 2)}
        failed = {rank: code for rank, code in codes.items() if code}
        late = [rank for rank, code in codes.items() if code is None]
        if failed:
            cause = _first_to_fail(folder, failed)
            return {**report, "outcome": "not-runnable", "summary": _failure(folder, cause, failed[cause])}
        if late:
            summary = f"ranks {late} not done after {case.timeout_s:g} s"
            return {**report, "outcome": "timeout", "summary": summary}
        evidence = [json.loads((folder / f"{rank}.json").read_text()) for rank in ranks]
        judgement = case.judge(evidence)
        return {**report, "outcome": judgement.outcome, "summary": judgement.summary, "by_rank": evidence}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _devices() -> int:
    import torch

    # Counts without creating a context.
    return torch.cuda.device_count()


def run_proof(proof: Proof, backend: Backend, tree: Path) -> dict[str, Any]:
    """Run a proof's cases on one backend, one after the other."""
    needed = max((case.world_size for case in proof.on(backend)), default=0) if backend == "nccl" else 0
    if needed > (found := _devices()):
        reason = f"needs {needed} CUDA devices, found {found}"
        return {"id": proof.fix_id, "outcome": "not-runnable", "evidence": {"reason": reason}}
    cases = {case.name: run_case(case, proof.fix_id, tree) for case in proof.on(backend)}
    outcomes: list[Outcome] = [case["outcome"] for case in cases.values()]
    evidence: dict[str, Any] = dict(cases)
    if not cases:
        evidence.update(reason=f"this proof has no case for {backend}", no_case=True)
    if (status := overlay.status()).on:
        evidence["overlay"] = {"in_force": status.in_force, "refused": [refusal.line for refusal in status.refusals]}
    return {"id": proof.fix_id, "outcome": worst(outcomes), "evidence": evidence}


def main(arguments: list[str]) -> int:
    """Run the named proofs over a tree; print a JSON line each."""
    tree, backend, fix_ids = Path(arguments[0]), arguments[1], arguments[2:]
    assert backend in ("gloo", "nccl")
    prepare(tree, backend)  # type: ignore[arg-type]
    for fix_id in fix_ids:
        try:
            result = run_proof(load(fix_id, tree), backend, tree)  # type: ignore[arg-type]
        except ImportError as error:
            reason = f"{type(error).__name__}: {error}"
            result = {"id": fix_id, "outcome": "not-runnable", "evidence": {"reason": reason}}
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
