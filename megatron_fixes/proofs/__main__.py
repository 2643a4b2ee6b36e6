# SPDX-License-Identifier: Apache-2.0
"""Runs proofs over releases and variants: ``python -m megatron_fixes.proofs --release 0.16.1 MF0001 …``.

Fetches each release once, makes the variant in a folder of its own, and has one ``parent`` forked over it
(``fork_server``).
Prints one JSON object a line as things happen (``fetch``, ``fetched``, ``start``, ``result``, ``error``); the
command line renders them. Every result names the outcome that the matrix leads one to expect.

Variants: ``vanilla`` is the release as published; ``patched`` is a copy with the line's whole series, gated fixes
too, put in by the same plan and transaction as ``megatron-fixes apply``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_fixes import catalog, config
from megatron_fixes.catalog.data import with_this_package
from megatron_fixes.catalog.expectation import VARIANTS, expected_outcome
from megatron_fixes.errors import MegatronFixesError, UsageError
from megatron_fixes.patching.plan import make_plan
from megatron_fixes.patching.target import find_target
from megatron_fixes.patching.transaction import commit
from megatron_fixes.proofs.fork_server import Parent
from megatron_fixes.proofs.parent import BRIEFLY
from megatron_fixes.proofs.releases import cached, fetch, require_release
from megatron_fixes.proofs.rendezvous import require_loopback

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from megatron_fixes.catalog import Catalog

# Imports take seconds; each case has its own deadline. This one only bounds a parent that hangs by itself.
PARENT_TIMEOUT_S = 900.0


@contextmanager
def variant_tree(known: Catalog, release: str, variant: str, only: Sequence[str] = ()) -> Iterator[Path]:
    """The tree of a release in a variant, for as long as the block runs.

    Args:
        known: The catalogue whose patches go in.
        release: Fetched if the cache has it not.
        variant: ``patched`` is a copy with the fixes in it; else the cached tree itself, not to be written to.
        only: Fixes to put in, with what they require; all that the release needs if empty.
    """
    pristine = fetch(release, known.matrix)
    if variant != "patched":
        yield pristine
        return
    with tempfile.TemporaryDirectory(prefix=f"megatron-fixes-{release}-") as folder:
        shutil.copytree(pristine / "megatron", Path(folder) / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
        target = find_target(folder)
        plan = make_plan(target, known, only)
        commit(target, plan.changes, plan.fixes, release=target.release)
        yield Path(folder)


def run_parent(
    tree: Path, backend: str, fix_ids: Sequence[str], overlay: Sequence[str] = (), *, briefly: bool = False
) -> Iterator[dict[str, Any]]:
    """Start the parent process over a tree and yield its results; ``not-runnable`` for those it died before.

    Args:
        tree: Holds ``megatron/core``.
        backend: ``gloo`` or ``nccl``.
        fix_ids: Proofs to run, in order.
        overlay: Fixes, or ``all``, that the overlay puts in; it is off if empty, whatever this process's environment.
        briefly: Stop each proof at its first case that is not clean.
    """
    arguments = [str(tree), backend, *fix_ids, *([BRIEFLY] if briefly else [])]
    environment = with_this_package(os.environ)
    environment.update({config.FIXES: ",".join(overlay) or "none", config.STRICT: "0"})
    left = list(fix_ids)
    with tempfile.TemporaryFile("w+") as log, tempfile.TemporaryDirectory(prefix="megatron-fixes-") as scratch:
        # What the parent leaves if it is killed lies in there too.
        environment["TMPDIR"] = scratch
        parent = Parent(arguments, environment, scratch, log)
        watchdog = threading.Timer(PARENT_TIMEOUT_S, parent.kill)
        watchdog.start()
        done = False
        try:
            for line in parent.stdout:
                result = json.loads(line)
                left.remove(result["id"])
                yield result
            done = True
        finally:
            watchdog.cancel()
            if not done:
                parent.kill()  # the kernel ends its ranks with it
            code = parent.wait()
        log.seek(0)
        last = (log.read().strip().splitlines() or ["no message"])[-1]
    for fix_id in left:
        reason = f"the proof's process ended with exit code {code}: {last}"
        yield {"id": fix_id, "outcome": "not-runnable", "evidence": {"reason": reason}}


def say(event: str, **fields: Any) -> None:
    """Print one event."""
    print(json.dumps({"event": event, **fields}), flush=True)


def prove(known: Catalog, release: str, variant: str, backend: str, fix_ids: Sequence[str], *, named: bool) -> None:
    """Run proofs over one release in one variant and say each result.

    Args:
        known: The catalogue.
        release: In the matrix.
        variant: One of ``VARIANTS``.
        backend: ``gloo`` or ``nccl``.
        fix_ids: Fixes to prove.
        named: The user named them; else those without a case for the backend are passed over.
    """
    expected = {fix_id: expected_outcome(known, fix_id, release, variant) for fix_id in fix_ids}
    runnable = [fix_id for fix_id in fix_ids if expected[fix_id] != "not-runnable"]
    say("start", release=release, variant=variant, fixes=runnable)
    results = [
        {"id": fix_id, "outcome": "not-runnable", "evidence": {"reason": f"no patch for {release} yet"}}
        for fix_id in fix_ids
        if fix_id not in runnable
    ]

    def report(result: dict[str, Any]) -> None:
        fix_id = result["id"]
        if named or not result["evidence"].get("no_case"):
            say("result", release=release, backend=backend, variant=variant, expected=expected[fix_id], **result)

    series = [patch for fix_id in known.matrix.fixes if (patch := known.patch(fix_id, release))]
    with variant_tree(known, release, variant, [patch.fix_id for patch in series]) as tree:
        gated = [patch.fix_id for patch in series if patch.gated]
        overlay = [config.ALL, *gated] if variant == "overlay" else []
        for result in run_parent(tree, backend, runnable, overlay) if runnable else ():
            report(result)
    for result in results:
        report(result)


def _split(values: Sequence[str]) -> list[str]:
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def main(arguments: Sequence[str]) -> int:
    """Parse, check everything that can be checked before anything is fetched, and run."""
    parser = argparse.ArgumentParser(prog="python -m megatron_fixes.proofs")
    parser.add_argument("fixes", nargs="*")
    parser.add_argument("--release", action="append", required=True)
    parser.add_argument("--variant", action="append", default=[])
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    options = parser.parse_args(arguments)
    known = catalog.load()
    releases, variants = _split(options.release), _split(options.variant) or list(VARIANTS)
    fix_ids = [fix_id.upper() for fix_id in _split(options.fixes)] or list(known.matrix.fixes)
    for release in releases:
        require_release(known.matrix, release)
    for kind, got, expected in (("fix", fix_ids, known.matrix.fixes), ("variant", variants, VARIANTS)):
        wrong = [name for name in got if name not in expected]
        if wrong:
            raise UsageError(f"got {kind} {', '.join(wrong)}, expected some of {', '.join(expected)}")
    missing = [name for name in ("torch", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"proofs run real Megatron-LM, but {' and '.join(missing)} can't be imported here",
            hint="Install what proofs need, from a clone of this project: pip install '.[prove]'.",
        )
    require_loopback()
    for release in releases:
        if cached(release) is None:
            say("fetch", release=release)
            fetch(release, known.matrix)
        say("fetched", release=release)
        for variant in variants:
            prove(known, release, variant, options.backend, fix_ids, named=bool(options.fixes))
    return 0


if __name__ == "__main__":
    # So that the parent process is ended, and folders removed, on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main(sys.argv[1:]))
    except MegatronFixesError as error:
        say("error", message=error.message, context=error.context, hint=error.hint, exit_code=error.exit_code)
        sys.exit(error.exit_code)
