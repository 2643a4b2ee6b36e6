# SPDX-License-Identifier: Apache-2.0
"""``apply`` to files that were edited before: elsewhere, inside a function that a fix touches, or in their line ends.

What happens to edits that are made after an apply is in ``test_revert_edited``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_fixes.patching.hunks import apply_patch

from .conftest import BUFFER, IDS, PATCHES, RELEASE, expected, findings

Cli = Callable[..., Any]
ABOVE = b"# Of this site\n" * 40
BELOW = b"\n\ndef of_this_site():\n    return 1\n"
DEFAULT_STREAM = b"torch.cuda.default_stream().wait_stream(self.communication_stream)"


def test_edits_elsewhere_survive_apply_and_revert(cli: Cli, tree: Path, buffer: Path, contents: Any) -> None:
    pristine = buffer.read_bytes()
    assert cli("apply", tree).code == 0
    patched = buffer.read_bytes()
    assert cli("revert", tree).code == 0
    middle = b"class _ParamAndGradBuffer"
    assert pristine.count(middle) == 1

    def with_edits(content: bytes) -> bytes:
        return ABOVE + content.replace(middle, b"SITE = 1\n\n\n" + middle) + BELOW

    buffer.write_bytes(with_edits(pristine))
    before = contents(tree)
    assert findings(cli("scan", tree, "--json")) == expected()
    assert cli("apply", tree, "--json").json["applied"] == IDS
    assert buffer.read_bytes() == with_edits(patched)
    assert cli("revert", tree, "--json").json["reverted"] == IDS
    assert contents(tree) == before


def test_an_edit_inside_a_touched_function_is_shown_and_nothing_is_written(
    cli: Cli, tree: Path, buffer: Path, contents: Any
) -> None:
    buffer.write_bytes(ABOVE + buffer.read_bytes().replace(DEFAULT_STREAM, b"of_this_site(self)"))
    line = buffer.read_bytes()[: buffer.read_bytes().index(b"of_this_site(self)")].count(b"\n") + 1
    before = contents(tree)
    out = cli("scan", tree).out
    assert " drifted:\n" in out and f"+ {line}: of_this_site(self)" in out
    done = cli("apply", tree)
    assert (done.code, done.out) == (1, "")
    assert "nothing was changed: MF0001 drifted (" in done.err and "finish_grad_sync is not a known text" in done.err
    assert contents(tree) == before


@pytest.mark.parametrize("in_git", [True, False])
@pytest.mark.parametrize("hunks", [slice(0, 1), slice(0, 2), slice(2, 3)])
def test_where_half_of_a_fix_is_in_the_way_to_all_of_it_is_named(
    cli: Cli, git: Cli, tree: Path, contents: Any, hunks: slice, in_git: bool
) -> None:
    path = "megatron/core/parallel_state.py"
    (patch,) = [patch for patch in PATCHES if patch.fix_id == "MF0005"]
    head, *parts = re.split(r"(?m)^(?=@@)", patch.text)
    assert len(parts) == 3
    if in_git:
        git(tree, "init", "-q")
        git(tree, "add", ".")
        git(tree, "commit", "-qm", RELEASE)
    pristine = (tree / path).read_bytes()
    half = apply_patch(head + "".join(parts[hunks]), {path: pristine}, source=patch.name)
    (tree / path).write_bytes(half[path])
    before = contents(tree)
    back = f"git -C {tree} checkout HEAD -- {path}"
    # The first hunk is an import, which says nothing of the fix: there the hunk's own error tells.
    hint = "ut the file back as the release has it" if hunks.stop == 1 else f"ut {path} back as the release has it"
    for done in (cli("scan", tree), cli("apply", tree, "--only", "MF0005"), cli("apply", tree)):
        said = done.out + done.err
        assert f"hint: P{hint}" in said or f"p{hint}" in said
        assert (back in said) == (in_git and hunks.stop != 1)
    assert contents(tree) == before
    if in_git:
        git(tree, *back.split()[3:])
        assert (tree / path).read_bytes() == pristine
        assert cli("apply", tree, "--json").json["applied"] == IDS


def test_an_edit_in_a_hunks_context_does_not_fit_and_nothing_is_written(
    cli: Cli, tree: Path, buffer: Path, contents: Any
) -> None:
    comment = b"# The RS/AR communication stream needs"
    buffer.write_bytes(buffer.read_bytes().replace(comment, b"# Of this site"))
    line = buffer.read_bytes()[: buffer.read_bytes().index(b"# Of this site")].count(b"\n") + 1
    before = contents(tree)
    done = cli("scan", tree, "--json")
    misfit = next(fix for fix in done.json["fixes"] if fix["id"] == "MF0001")
    assert (misfit["verdict"], misfit["remedy"]) == ("needed", "does-not-fit")
    assert f"at line {line}" in misfit["misfit"]
    done = cli("apply", tree)
    assert (done.code, done.out) == (1, "")
    assert "nothing was changed: MF0001 does not fit (" in done.err and f"at line {line}" in done.err
    assert contents(tree) == before


def test_crlf_in_a_touched_file_is_told_by_scan_and_as_lf_it_fits(
    cli: Cli, tree: Path, buffer: Path, contents: Any
) -> None:
    pristine = buffer.read_bytes()
    buffer.write_bytes(pristine.replace(b"\n", b"\r\n"))
    done = cli("scan", tree)
    assert "does-not-fit" in done.out and "convert the file to LF" in done.out
    buffer.write_bytes(buffer.read_bytes().replace(b"\r\n", b"\n"))
    assert cli("apply", tree).code == 0
    assert cli("revert", tree).code == 0
    assert buffer.read_bytes() == pristine


@pytest.mark.parametrize("path", ["megatron/core/package_info.py", "megatron/core/__init__.py"])
def test_crlf_in_other_files_is_nobodys_business(cli: Cli, tree: Path, contents: Any, path: str) -> None:
    (tree / path).write_bytes((tree / path).read_bytes().replace(b"\n", b"\r\n"))
    before = contents(tree)
    done = cli("apply", tree, "--json")
    assert (done.code, done.json["release"], done.json["applied"]) == (0, RELEASE, IDS)
    assert cli("revert", tree).code == 0
    assert contents(tree) == before


def test_a_file_that_became_crlf_after_an_apply_is_not_overwritten(
    cli: Cli, tree: Path, buffer: Path, contents: Any
) -> None:
    assert cli("apply", tree).code == 0
    buffer.write_bytes(buffer.read_bytes().replace(b"\n", b"\r\n"))
    before = contents(tree)
    done = cli("revert", tree)
    assert done.code == 1 and BUFFER in done.err and "  hint: " in done.err
    assert contents(tree) == before
