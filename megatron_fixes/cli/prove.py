# SPDX-License-Identifier: Apache-2.0
"""``megatron-fixes prove``: runs proofs on real megatron-core, and says whether each outcome is the expected one.

Expected is ``defect`` on a release that needs the fix, as published, and ``clean`` everywhere else. Progress
goes to stderr: a bar on a terminal, a line a step in a pipe.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import click

from megatron_fixes.catalog.expectation import VARIANTS
from megatron_fixes.cli import output
from megatron_fixes.cli.options import (
    fix_ids_argument,
    json_option,
    known_releases,
    release_option,
    variant_option,
)
from megatron_fixes.cli.proof_events import (
    BACKENDS,
    Result,
    Start,
    ending,
    exit_code,
    progress_line,
    table_rows,
    to_json,
    without_case,
)
from megatron_fixes.errors import UsageError
from megatron_fixes.patching.ids import known_fixes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from megatron_fixes.catalog import Catalog
    from megatron_fixes.cli.proof_events import Event
    from megatron_fixes.errors import MegatronFixesError


def default_release(catalog: Catalog, fix_ids: Sequence[str]) -> str:
    """The newest release that has a patch for one of the fixes, else the newest of all."""
    from packaging.version import Version

    newest_first = sorted(catalog.matrix.releases, key=Version, reverse=True)
    patched = (release for release in newest_first if any(catalog.patch(fix_id, release) for fix_id in fix_ids))
    return next(patched, newest_first[0])


def known_variants(given: Sequence[str]) -> tuple[str, ...]:
    """The variants that are meant, in their own order; all if none is named.

    Raises:
        UsageError: A name that is none of them.
    """
    names = [name.lower() for name in given]
    wrong = [name for name in names if name not in VARIANTS]
    if wrong:
        raise UsageError(f"got variant {', '.join(wrong)}, expected some of {', '.join(VARIANTS)}")
    return tuple(variant for variant in VARIANTS if not names or variant in names)


@contextlib.contextmanager
def progress(steps: int) -> Iterator[Callable[[Event], None]]:
    """Show events on stderr as they come.

    Args:
        steps: How many results there will be at most.
    """
    if not output.is_terminal(sys.stderr):

        def write(event: Event) -> None:
            if line := progress_line(event):
                output.note(line)

        yield write
        return

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=steps)
        waiting: list[str] = []

        def move(event: Event) -> None:
            description = progress_line(event)
            if isinstance(event, Start):
                waiting[:] = event.fixes
            if isinstance(event, Result):
                waiting[:] = [fix_id for fix_id in waiting if fix_id != event.id]
                bar.advance(task)
            if isinstance(event, (Start, Result)):
                description = f"{event.release} {event.variant}: {waiting[0] if waiting else 'done'}"
            if description:
                bar.update(task, description=description)

        yield move


def _print(results: Sequence[Result]) -> None:
    output.table(("release", "fix", "variant", "outcome", "as expected", "seen"), table_rows(results))
    output.say()
    output.say(ending(results), "bold")


def _report(results: Sequence[Result], failure: MegatronFixesError | None, *, as_json: bool, several: bool) -> int:
    if as_json:
        documents = to_json(results)
        if failure is not None:
            output.failure(failure, as_json=True, results=documents)
        else:
            output.print_json(documents if several else documents[0])
    else:
        if results:
            _print(results)
        if failure is not None:
            output.failure(failure, as_json=False)
    return exit_code(results) if failure is None else failure.exit_code


@click.command("prove")
@fix_ids_argument
@release_option
@variant_option
@click.option("--backend", type=click.Choice(BACKENDS), default="gloo", help="gloo: CPU (default); nccl: GPUs.")
@json_option
def prove_command(
    fix_ids: tuple[str, ...], releases: tuple[str, ...], variants: tuple[str, ...], backend: str, as_json: bool
) -> int:
    """Show defects on real megatron-core, and their absence once patched.

    Fetches each release into a cache and runs the proofs of the named fixes (all if none is named) with real
    process groups; a tree of yours is not looked at. Without --release: the newest one that has a patch. Needs torch.
    """
    from megatron_fixes.catalog import load
    from megatron_fixes.cli.proof_process import listen

    catalog = load()
    fix_ids = known_fixes(catalog.matrix, fix_ids)
    chosen = known_releases(catalog.matrix, releases)
    variants = known_variants(variants)
    if not chosen:
        chosen = (default_release(catalog, fix_ids or tuple(catalog.matrix.fixes)),)
        output.note(f"no --release given: proving on {chosen[0]}, the newest that has a patch")
    command = [sys.executable, "-m", "megatron_fixes.proofs", "--backend", backend]
    command += ["--variant", ",".join(variants), "--release", ",".join(chosen), *fix_ids]
    steps = len(chosen) * len(variants) * len(fix_ids or catalog.matrix.fixes)
    with progress(steps) as heed:
        results, failure = listen(command, heed)
    failure = failure or without_case(results)
    results = [result for result in results if not result.no_case]
    return _report(results, failure, as_json=as_json, several=len(chosen) > 1)
