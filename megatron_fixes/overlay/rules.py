# SPDX-License-Identifier: Apache-2.0
"""Decides which fixes go into a tree: guards by release, fingerprint and verdict, in that order. Pure.

* Release: only one that the matrix knows; a local part (``0.16.1+abc``) doesn't count. Nothing goes into any other,
  whatever it looks like: there a person decides, with ``apply`` (docs/decisions/0008).
* Fingerprint and verdict: only ``needed`` fixes whose patch fits and gives a known text (``patching.scan``).
* ``all`` leaves gated fixes out; a fix that was named brings what it requires.
* A fix that touches a module whose text uses ``__file__`` stays out: there the copy's place would be seen.

Unlike ``apply``, which refuses as a whole, the fixes that can go in do; the others are told one by one. What went in
is then byte-equal to what ``apply --only`` writes for the same fixes.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from megatron_fixes.catalog import without_local
from megatron_fixes.config import ALL
from megatron_fixes.errors import DoesNotFitError
from megatron_fixes.overlay.decision import Decision, FixState, Refusal
from megatron_fixes.patching.hunks import touched_paths
from megatron_fixes.patching.ids import did_you_mean
from megatron_fixes.patching.scan import apply_all, patches_for, scan_files

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from megatron_fixes.catalog import Catalog
    from megatron_fixes.catalog.series import PatchFile
    from megatron_fixes.patching.scan import Row


def decide(
    catalog: Catalog, files: Mapping[str, bytes], release: str | None, release_source: str, asked: Sequence[str]
) -> tuple[Decision, dict[str, bytes]]:
    """Decide for one tree.

    Args:
        catalog: The known fixes.
        files: The tree's bytes of every file that any fix touches.
        release: What the tree calls itself.
        release_source: What said so.
        asked: Ids, and ``all``.

    Returns:
        The decision, and the new bytes of the files that are changed.
    """
    slugs = {fix_id: fix.slug for fix_id, fix in catalog.matrix.fixes.items()}
    refusals = unknown_ids(asked, slugs)
    touches = {fix: tuple(sorted({f.split("::")[0] for f in names})) for fix, names in catalog.known.touches.items()}
    if (base := without_local(release or "")) not in catalog.matrix.releases:
        refusal = _unknown_release(release, base, tuple(catalog.matrix.releases))
        states = [FixState(fix, "refused", refusal.message, touches[fix]) for fix in catalog.matrix.fixes]
        return Decision(release, release_source, tuple(states), {}, (*refusals, refusal)), {}
    rows = {row.finding.fix_id: row for row in scan_files(files, catalog, base)}
    outcomes = {fix: _outcome(catalog, row, asked, files, rows) for fix, row in rows.items()}
    chosen = [fix for fix, outcome in outcomes.items() if outcome[0] == "in-force"]
    findings = {fix: row.finding for fix, row in rows.items()}
    patches = patches_for(catalog, findings, chosen)
    try:
        changed = apply_all(catalog, patches, files, base) if patches else {}
    except DoesNotFitError as error:
        outcomes.update({fix: ("refused", f"does not fit together with the others: {error.message}") for fix in chosen})
        patches, changed = [], {}
    for patch in patches:
        if patch.fix_id not in chosen:
            outcomes[patch.fix_id] = ("in-force", "required by a fix that was asked for")
    for fix, (state, reason) in outcomes.items():
        if state == "refused":
            refusals.append(_refusal(rows[fix], reason, base, chosen))
    states = [FixState(fix, *outcome, touches[fix]) for fix, outcome in outcomes.items()]
    put_in = {path: tuple(p.fix_id for p in patches if path in _paths(p)) for path in sorted(changed)}
    return Decision(release, release_source, tuple(states), put_in, tuple(refusals)), changed


def unknown_ids(asked: Sequence[str], slugs: Mapping[str, str]) -> list[Refusal]:
    """A refusal for every name that is not one of a known fix; ``slugs`` by id."""
    known = f"correct MEGATRON_FIXES (known: {', '.join(slugs)})"
    return [
        Refusal(
            "unknown-id",
            f"{fix} is not in force: no fix has that id",
            f"{near} correct MEGATRON_FIXES" if (near := did_you_mean(fix, slugs, ALL)) else known,
            fix=fix,
        )
        for fix in asked
        if fix != ALL and fix not in slugs
    ]


def _paths(patch: PatchFile) -> tuple[str, ...]:
    return tuple(touched_paths(patch.text, source=patch.name))


def _unknown_release(release: str | None, base: str, known: Sequence[str]) -> Refusal:
    name = f"megatron-core {release}" if base else "a megatron-core that names no release"
    return Refusal(
        "unknown-release",
        f"no fix is in force: this is {name}, which this version of megatron-fixes does not know",
        f"upgrade megatron-fixes, use one of {known[0]} to {known[-1]}, or put the patches into the files "
        "(`megatron-fixes scan` says how) and unset MEGATRON_FIXES",
    )


def _outcome(
    catalog: Catalog, row: Row, asked: Sequence[str], files: Mapping[str, bytes], rows: Mapping[str, Row]
) -> tuple[str, str]:
    """A fix's state, and why."""
    fix, finding = row.finding.fix_id, row.finding
    if finding.verdict not in ("needed", "drifted"):
        return finding.verdict, finding.reason
    if fix not in asked and ALL not in asked:
        return "not-asked", finding.reason
    if fix not in asked and catalog.is_gated(fix):
        return "gated", "changes training in a debatable way, so it is put in only by name"
    if finding.verdict == "drifted":
        return "refused", finding.reason
    if row.remedy == "none":
        return "refused", finding.reason
    if row.remedy == "does-not-fit":
        blocked = [name for name in _requires(catalog, row) if _cannot_go_in(rows[name])]
        return "refused", f"it requires {', '.join(blocked)}" if blocked else row.misfit.splitlines()[0]
    findings = {name: other.finding for name, other in rows.items()}
    for patch in patches_for(catalog, findings, [fix]):
        for path in _paths(patch):
            if _uses_file_name(files[path]):
                return "refused", f"{path} uses __file__, which would name the patched copy"
    return "in-force", finding.reason


def _requires(catalog: Catalog, row: Row) -> tuple[str, ...]:
    patch = row.finding.release and catalog.patch(row.finding.fix_id, row.finding.release)
    return patch.header.requires if patch else ()


def _cannot_go_in(row: Row) -> bool:
    return row.finding.verdict == "drifted" or row.remedy in ("none", "does-not-fit")


def _uses_file_name(content: bytes) -> bool:
    if b"__file__" not in content:
        return False
    return any(isinstance(node, ast.Name) and node.id == "__file__" for node in ast.walk(ast.parse(content)))


def _refusal(row: Row, reason: str, release: str, fitting: Sequence[str]) -> Refusal:
    fix = row.finding.fix_id
    leave_out = f"to go on without it, set MEGATRON_FIXES={','.join(fitting) or 'none'}"
    if row.finding.verdict == "drifted":
        message = f"{fix} is not in force, the text of this megatron-core {release} is not a known one: {reason}"
        return Refusal("drifted", message, f"see what differs with `megatron-fixes scan`, or {leave_out}", fix)
    if row.remedy == "none":
        message = f"{fix} is not in force: megatron-core {release} needs it, and there is no patch for it yet"
        return Refusal("no-patch", message, leave_out, fix)
    message = f"{fix} is not in force, its patch does not fit this megatron-core {release}: {reason}"
    return Refusal("does-not-fit", message, f"report it with `megatron-fixes scan --json`, or {leave_out}", fix)
