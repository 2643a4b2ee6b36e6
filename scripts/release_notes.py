#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the notes of a release from the catalogue and ``CHANGELOG.md``: what each line gets, symptom first.

Whoever runs 0.16.1 reads one list: what they may have seen, and which fix is against it. Gated fixes stand apart, since
``all`` leaves them out. Then what changed, and how to check the download. A pre-release says in its first sentence that
it is one. Not handled: what has no patch (docs/not_shipped.md).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import changelog
import program
from repository import version_of

from megatron_fixes.catalog import load
from megatron_fixes.catalog.ranges import compact
from megatron_fixes.errors import RefusedError
from megatron_fixes.release.folder import read_regular
from megatron_fixes.release.layout import SIGNATURE, Layout, is_prerelease
from megatron_fixes.release.signature import is_unsigned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_fixes.catalog import Catalog

ROOT = Path(__file__).resolve().parents[1]
PRERELEASE = """\
**This is a pre-release, {version}, to try out and to report on.** pip takes it only when asked
(`pip install --pre megatron-fixes`); its patches and its commands may still change. For training runs use the newest
version without a or b or rc in it.
"""
CHECK = """\
In the folder with the files, with the maintainers' public key, from a place that you trust and not from this page, in
`../key.pub`; it stops at the first command that fails:

```
(
set -euo pipefail
mkdir ../checked
echo "megatron-fixes-release $(cat ../key.pub)" > ../checked/signers
ssh-keygen -Y verify -f ../checked/signers -I megatron-fixes-release \\
  -n megatron-fixes-release -s SHA256SUMS.sig < SHA256SUMS
sha256sum --strict --check SHA256SUMS
echo "good"
)
```

`megatron-fixes verify . --key ../key.pub` checks all of it: manifest, provenance and that `{patches}`, `{wheel}` and
`{sdist}` carry the same patches. `make reproduce VERSION=v{version}` in a clone builds the same bytes again.
"""
UNSIGNED = "**Nobody has signed this release**: `SHA256SUMS.sig` says UNSIGNED. Sums and provenance can be checked.\n"


def lines(catalog: Catalog) -> list[str]:
    """For each line of Megatron-LM, newest first: what people see there, and the fix for it."""
    matrix, known = catalog.matrix, catalog.matrix.releases
    parts = []
    for line, releases in reversed(list(matrix.lines().items())):
        rows = []
        for fix_id, fix in sorted(matrix.fixes.items()):
            mended = [one for one in releases if (patch := catalog.patch(fix_id, one)) and not patch.gated]
            if mended:
                only = "" if mended == list(releases) else f" ({compact(mended, known)})"
                rows.append(f"- {fix.symptom} **{fix_id}** {fix.slug}{only}")
        parts.append(f"\n### {line}: {compact(releases, known)}\n\n" + ("\n".join(rows) or "Nothing yet."))
    return parts


def by_name(catalog: Catalog) -> list[str]:
    """The fixes that go in only by name, with the releases that they have a patch for."""
    matrix, found = catalog.matrix, []
    for fix_id, fix in sorted(matrix.fixes.items()):
        gated = [one for one in matrix.releases if (patch := catalog.patch(fix_id, one)) and patch.gated]
        if gated:
            found.append(f"- {fix.symptom} **{fix_id}** {fix.slug} ({compact(gated, matrix.releases)})")
    return found


def notes(catalog: Catalog, version: str, log: str, *, signed: bool) -> str:
    """The whole text.

    Raises:
        RefusedError: The changelog has no section for the version.
    """
    section = changelog.sections(log).get(version)
    if section is None or not section.body:
        raise RefusedError(f"got no section {version}, expected what it changes", context="CHANGELOG.md")
    names = Layout(version)
    check = CHECK.format(version=version, patches=names.patches, wheel=names.wheel, sdist=names.sdist)
    gated = by_name(catalog)
    parts = [
        f"# megatron-fixes {version}\n",
        *([PRERELEASE.format(version=version)] if is_prerelease(version) else []),
        "Patches for released Megatron-LM: what you may have seen, and the fix that is against it.\n",
        "## By line of Megatron-LM",
        *lines(catalog),
        "\n## Only by name\n",
        "These change training in a debatable way, so `all` leaves them out (`--only` puts them in):\n",
        "\n".join(gated) or "None.",
        "\n## What changed\n",
        section.body.strip(),
        "\n## Check this download\n",
        *([] if signed else [UNSIGNED]),
        check,
    ]
    return "\n".join(parts)


@program.tells_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Read the arguments and print the notes."""
    parser = program.parser(__doc__)
    parser.add_argument("version", metavar="VERSION", nargs="?", help="such as v0.1.0 (default: the tag that is here)")
    parser.add_argument("--out", type=Path, help="file to write (default: standard output)")
    parser.add_argument("--dist", type=Path, help="folder with the files: if they are UNSIGNED, the notes say so")
    given = parser.parse_args(arguments)
    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    signed = given.dist is None or not is_unsigned(read_regular(given.dist / SIGNATURE, 2**20, "a release's signature"))
    text = notes(load(), version_of(ROOT, given.version), log, signed=signed)
    if given.out is None:
        print(text, end="")
    else:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
