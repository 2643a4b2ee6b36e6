# SPDX-License-Identifier: Apache-2.0
"""A file that is known byte for byte is judged as it would be if it were parsed.

Needs the megatron-core packages, which are fetched once into the cache.
"""

from __future__ import annotations

import msgspec
import pytest

from megatron_fixes import catalog
from megatron_fixes.catalog.fingerprint import OUTSIDE
from megatron_fixes.catalog.known import Known
from megatron_fixes.patching.plan import make_plan
from megatron_fixes.patching.scan import look, read_files, scan_files
from megatron_fixes.patching.target import find_target
from megatron_fixes.proofs.releases import fetch

CATALOG = catalog.load()
KNOWN = CATALOG.known
PARSED = msgspec.structs.replace(KNOWN, files={})
NAMES = {name for names in KNOWN.touches.values() for name in names}


def texts(files: dict[str, bytes], known: Known) -> dict[str, list[str]]:
    return {name: [print_.hash for print_ in seen.prints] for name, seen in look(NAMES, files, known).items()}


@pytest.mark.parametrize("release", CATALOG.matrix.releases)
def test_known_files_say_what_parsing_them_would(release: str) -> None:
    target = find_target(fetch(release, CATALOG.matrix))
    published = read_files(target, CATALOG)
    patched = {**published, **{path: after for path, (_, after) in make_plan(target, CATALOG).changes.items()}}
    for files in (published, patched):
        assert all(KNOWN.place_of(path, content) for path, content in files.items())
        assert texts(files, KNOWN) == texts(files, PARSED)


def test_a_byte_more_has_the_file_parsed() -> None:
    path = "megatron/core/distributed/param_and_grad_buffer.py"
    content = (fetch("0.16.1", CATALOG.matrix) / path).read_bytes()
    assert KNOWN.place_of(path, content)
    assert KNOWN.place_of(path, content + b"\n") is None
    files = {path: content + b"\n"}
    names = {name for name in NAMES if name.startswith(path) and OUTSIDE not in name}
    assert {name: seen.prints for name, seen in look(names, files, KNOWN).items()} == {
        name: seen.prints for name, seen in look(names, files, PARSED).items()
    }


def test_an_edit_in_a_known_file_is_seen() -> None:
    target = find_target(fetch("0.16.1", CATALOG.matrix))
    files = read_files(target, CATALOG)
    path = "megatron/core/distributed/param_and_grad_buffer.py"
    files[path] = files[path].replace(b"self.grad_reduce_handle = None", b"self.grad_reduce_handle = 0")
    verdicts = {row.finding.fix_id: row.finding.verdict for row in scan_files(files, CATALOG, "0.16.1")}
    assert verdicts["MF0003"] == "drifted"
