#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Who notices that an upgrade brought a fix along: ``scan``, or a patch that is tried in reverse.

``python benchmarks/upgrades.py [--json | --markdown]``

Somebody who carries a patch over upgrades has to know when to drop it. A script that is often used for that asks git:
does the patch fit in reverse (then the fix is there already), else does it fit forwards (then apply it), else stop. We
compare functions with known texts. For each fix and each release that

- has it upstream (``fixed-upstream`` in the matrix), the right answer is "there already";
- lacks it (``needed``), the right answer is anything but that.

Ours is what ``scan`` says of the release as published. The script's patch is ours of the newest line that has one,
which is what somebody who upgrades has at hand; not the upstream commit. Each is tried in an empty git repository that
holds the touched files of the release: inside another work tree ``git apply`` passes over files and succeeds. Needs git
and the releases in the cache; nothing of them is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from measuring import laid_out, place

from megatron_fixes import catalog
from megatron_fixes.catalog.series import PatchFile
from megatron_fixes.patching.hunks import touched_paths
from megatron_fixes.patching.scan import scan
from megatron_fixes.patching.target import find_target
from megatron_fixes.proofs.releases import fetch

THERE, APPLIES, STOPS = "there already", "would be applied", "stops"


def by_script(patch: PatchFile, tree: Path) -> str:
    """What a script that tries a patch in reverse, then forwards, would do with a tree."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    with tempfile.TemporaryDirectory() as folder:
        git = ["git", "-C", folder]
        subprocess.run([*git, "init", "--quiet"], env=environment, check=True, capture_output=True)
        for path in touched_paths(patch.text):
            if (tree / path).is_file():
                (Path(folder) / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(tree / path, Path(folder) / path)
        for answer, way in ((THERE, ["--reverse"]), (APPLIES, [])):
            done = subprocess.run(
                [*git, "apply", *way, "--check", patch.path.absolute()],
                env=environment,
                check=False,
                capture_output=True,
            )
            if done.returncode == 0:
                return answer
            if done.returncode != 1:
                raise RuntimeError(f"got exit code {done.returncode} of git apply: {done.stderr.decode()}")
    return STOPS


def measured() -> dict[str, Any]:
    """Both answers for each fix and each release that has it upstream or needs it."""
    known = catalog.load()
    releases = {release: fetch(release, known.matrix) for release in known.matrix.releases}
    ours = {
        release: {row.finding.fix_id: row.finding.verdict for row in scan(find_target(tree), known)}
        for release, tree in releases.items()
    }
    pairs = []
    for fix_id, fix in known.matrix.fixes.items():
        patch = known.patches_of(fix_id)[-1]
        pairs += [
            {
                "fix": fix_id,
                "release": release,
                "truth": cell.verdict,
                "scan": ours[release][fix_id],
                "patch": patch.name,
                "script": by_script(patch, releases[release]),
            }
            for release, cell in fix.cells.items()
            if cell.verdict != "not-affected"
        ]
    return {**place(), "fixes": len(known.matrix.fixes), "pairs": pairs}


def counts(pairs: list[dict[str, str]], truth: str) -> tuple[int, Counter[str], Counter[str]]:
    """Pairs of a kind: how many, what scan says of them, and what the script does."""
    of_kind = [pair for pair in pairs if pair["truth"] == truth]
    return len(of_kind), Counter(pair["scan"] for pair in of_kind), Counter(pair["script"] for pair in of_kind)


def table(found: dict[str, Any], *, markdown: bool) -> str:
    """The counts as a table, of Markdown or plain, and a line for each fix that upstream has mended."""
    rows = [("the release", "pairs", "scan", f"git: {THERE}", f"git: {APPLIES}", f"git: {STOPS}")]
    for truth in ("fixed-upstream", "needed"):
        number, ours, script = counts(found["pairs"], truth)
        said = ", ".join(f"{verdict} {times}" for verdict, times in ours.most_common())
        rows.append((truth, str(number), said, *(str(script[answer]) for answer in (THERE, APPLIES, STOPS))))
    each = [("fixed upstream", "pairs", "scan says so", f"git: {THERE}", f"git: {APPLIES}", f"git: {STOPS}")]
    for fix_id in dict.fromkeys(pair["fix"] for pair in found["pairs"]):
        number, ours, script = counts([pair for pair in found["pairs"] if pair["fix"] == fix_id], "fixed-upstream")
        if number:
            answers = (str(script[answer]) for answer in (THERE, APPLIES, STOPS))
            each.append((fix_id, str(number), str(ours["fixed-upstream"]), *answers))
    where = f"{found['fixes']} fixes; {found['machine']}, Python {found['python']}, git {found['git']}; {found['date']}"
    return "\n\n".join([where, laid_out(rows, markdown), laid_out(each, markdown)])


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="who notices that an upgrade brought a fix along")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true")
    form.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    found = measured()
    print(json.dumps(found, indent=2) if options.json else table(found, markdown=options.markdown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
