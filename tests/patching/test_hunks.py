# SPDX-License-Identifier: Apache-2.0
"""What the applier and the patch reader promise beyond agreement with git: refusals, messages, exact bytes.

Agreement with ``git apply`` itself is held by ``test_hunks_like_git``.
"""

from __future__ import annotations

import pytest

from megatron_fixes.errors import DataError, DoesNotFitError
from megatron_fixes.patching.hunks import apply_patch, reverse_patch, touched_paths

PATH = "megatron/core/a.py"
BEFORE = b"one\ntwo\nthree\nfour\nfive\n"
AFTER = b"one\ntwo\n3\nfour\nfive\n"
PATCH = f"""\
Description: Mend three
 --- a line that looks like a file line, and
 +++ another.
Fix-Id: MF0001
---
diff --git a/{PATH} b/{PATH}
index {"1" * 40}..{"2" * 40} 100644
--- a/{PATH}
+++ b/{PATH}
@@ -2,3 +2,3 @@ one
 two
-three
+3
 four
"""


def section(path: str, body: str) -> str:
    return f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n{body}"


def test_only_changed_files_come_back_and_the_input_stays() -> None:
    files = {PATH: BEFORE, "megatron/core/b.py": b"b\n"}
    assert apply_patch(PATCH, files, source="MF0001.patch") == {PATH: AFTER}
    assert files == {PATH: BEFORE, "megatron/core/b.py": b"b\n"}


def test_reverse_undoes_apply() -> None:
    assert reverse_patch(PATCH, {PATH: AFTER}, source="MF0001.patch") == {PATH: BEFORE}


def test_bytes_of_a_patch_give_the_same_as_its_text() -> None:
    assert apply_patch(PATCH.encode(), {PATH: BEFORE}, source="MF0001.patch") == {PATH: AFTER}


def test_bytes_that_are_not_utf8_in_the_target_are_kept() -> None:
    assert apply_patch(PATCH, {PATH: BEFORE + b"\xff\xfe\n"}, source="p") == {PATH: AFTER + b"\xff\xfe\n"}


def test_touched_paths_are_in_order_and_unique() -> None:
    again = section("megatron/core/z.py", "@@ -1 +1 @@\n-a\n+b\n")
    assert touched_paths(again + PATCH[PATCH.index("diff") :] + again) == ("megatron/core/z.py", PATH)


def test_two_sections_of_one_file_apply_one_after_the_other() -> None:
    second = section(PATH, "@@ -3,2 +3,2 @@\n-3\n+drei\n four\n five\n").replace("@@ -3,2", "@@ -3,3")
    second = second.replace("+3,2 @@", "+3,3 @@")
    assert apply_patch(PATCH + second, {PATH: BEFORE}, source="p")[PATH] == AFTER.replace(b"3", b"drei")


def test_mail_signature_after_the_last_hunk_is_ignored() -> None:
    assert apply_patch(PATCH + "-- \n2.39.5\n\n", {PATH: BEFORE}, source="p") == {PATH: AFTER}


def test_misfit_names_file_hunk_expected_line_and_nearest_mismatch() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        apply_patch(PATCH, {PATH: b"zero\n" + BEFORE.replace(b"three", b"THREE")}, source="MF0001.patch")
    text = str(caught.value)
    assert f"{PATH}:2" in text
    assert "hunk 1 of MF0001.patch" in text
    assert "expected at line 2" in text
    assert "got 'THREE' at line 4, expected 'three'" in text


def test_misfit_past_the_end_says_so() -> None:
    with pytest.raises(DoesNotFitError, match="got the end of the file at line 4, expected 'four'"):
        apply_patch(PATCH, {PATH: b"one\ntwo\nthree\n"}, source="p")


def test_match_in_the_wrong_place_is_told_apart_from_a_changed_line() -> None:
    at_begin = section(PATH, "@@ -1,2 +1,2 @@\n-one\n+1\n two\n")
    with pytest.raises(DoesNotFitError, match="expected them at the beginning of the file"):
        apply_patch(at_begin, {PATH: b"zero\n" + BEFORE}, source="p")
    at_end = section(PATH, "@@ -4,2 +4,2 @@\n four\n-five\n+5\n")
    with pytest.raises(DoesNotFitError, match="expected them at the end of the file"):
        apply_patch(at_end, {PATH: BEFORE + b"six\n"}, source="p")


def test_absent_file_does_not_fit() -> None:
    with pytest.raises(DoesNotFitError, match="no such file"):
        apply_patch(PATCH, {"megatron/core/b.py": b""}, source="p")


def test_crlf_target_is_refused_with_the_reason() -> None:
    with pytest.raises(DoesNotFitError) as caught:
        apply_patch(PATCH, {PATH: BEFORE.replace(b"\n", b"\r\n")}, source="p")
    assert "CRLF line ends and the patch LF" in caught.value.hint


def test_crlf_patch_is_refused_with_the_reason() -> None:
    with pytest.raises(DataError, match="CRLF"):
        apply_patch(PATCH.replace("\n", "\r\n"), {PATH: BEFORE}, source="p")


def test_file_that_goes_on_after_a_final_line_of_the_patch_does_not_fit() -> None:
    """Git 2.39 applies this one and glues ``c`` and ``d`` together."""
    patch = section(PATH, "@@ -1,3 +1,3 @@\n-a\n+A\n b\n c\n\\ No newline at end of file\n")
    assert apply_patch(patch, {PATH: b"a\nb\nc"}, source="p") == {PATH: b"A\nb\nc"}
    with pytest.raises(DoesNotFitError):
        apply_patch(patch, {PATH: b"a\nb\nc\nd\n"}, source="p")


def test_newline_at_the_end_can_be_added_and_taken_away() -> None:
    marker = "\\ No newline at end of file\n"
    add = section(PATH, f"@@ -1,2 +1,2 @@\n a\n-b\n{marker}+b\n")
    assert apply_patch(add, {PATH: b"a\nb"}, source="p") == {PATH: b"a\nb\n"}
    assert reverse_patch(add, {PATH: b"a\nb\n"}, source="p") == {PATH: b"a\nb"}


HEAD = PATCH[PATCH.index("diff") : PATCH.index("@@")]
HUNK = PATCH[PATCH.index("@@") :]
REFUSED = {
    "no diff": "Description: nothing\n",
    "cut in a line": PATCH[:-3],
    "cut between lines": PATCH[: -len(" four\n")],
    "cut after the head": HEAD,
    "count too small": HEAD + HUNK.replace("-2,3 +2,3", "-2,2 +2,2"),
    "old count too big": HEAD + HUNK.replace("-2,3", "-2,4"),
    "new count too small": HEAD + HUNK.replace("+2,3", "+2,2"),
    "no change": HEAD + "@@ -1,2 +1,2 @@\n one\n two\n",
    "stray line after the hunk": PATCH + "+stray\n",
    "stray line between hunks": HEAD + HUNK + " stray\n@@ -5 +5 @@\n-five\n+5\n",
    "blank line between hunks": HEAD + HUNK + "\n@@ -5 +5 @@\n-five\n+5\n",
    "unknown line in a hunk": HEAD + HUNK.replace("-three", "*three"),
    "hunk in the head": HUNK + PATCH,
    "marker in the middle": HEAD + HUNK.replace(" two\n", " two\n\\ No newline at end of file\n"),
    "surrogate": PATCH.replace("three", "\udcff"),
    "parent": section("../a.py", "@@ -1 +1 @@\n-a\n+b\n"),
    "parent inside": section("megatron/../../a.py", "@@ -1 +1 @@\n-a\n+b\n"),
    "absolute": section("/etc/a.py", "@@ -1 +1 @@\n-a\n+b\n"),
    "rename": f"diff --git a/x b/y\nsimilarity index 90%\nrename from x\nrename to y\n{HUNK}",
    "two names": f"diff --git a/x b/y\n--- a/x\n+++ b/y\n{HUNK}",
    "names differ from the diff line": f"diff --git a/x b/x\n--- a/y\n+++ b/y\n{HUNK}",
    "no prefix": f"diff --git x x\n--- x\n+++ x\n{HUNK}",
    "mode": "diff --git a/x b/x\nold mode 100644\nnew mode 100755\n",
    "new file": "diff --git a/x b/x\nnew file mode 100644\n--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+a\n",
    "deleted file": "diff --git a/x b/x\ndeleted file mode 100644\n--- a/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n",
    "binary": "diff --git a/x b/x\nindex 1..2 100644\nBinary files a/x and b/x differ\n",
    "git binary": "diff --git a/x b/x\nindex 1..2 100644\nGIT binary patch\nliteral 1\nIcmZPo0000\n\n",
    "quoted": f'diff --git "a/\\303\\251" "b/\\303\\251"\n--- "a/\\303\\251"\n+++ "b/\\303\\251"\n{HUNK}',
}


@pytest.mark.parametrize("name", REFUSED)
def test_malformed_or_unsupported_patch_is_a_data_error_with_its_place(name: str) -> None:
    with pytest.raises(DataError) as caught:
        apply_patch(REFUSED[name], {PATH: BEFORE, "x": BEFORE, "y": BEFORE, "../a.py": b"a\n"}, source="bad.patch")
    assert caught.value.context.startswith("bad.patch")


def test_bytes_that_are_not_utf8_in_a_patch_are_a_data_error() -> None:
    with pytest.raises(DataError, match="not UTF-8"):
        touched_paths(PATCH.encode().replace(b"three", b"\xff"))


@pytest.mark.parametrize("cut", range(PATCH.index("diff"), len(PATCH)))
def test_patch_cut_anywhere_is_never_applied_in_part(cut: int) -> None:
    with pytest.raises((DataError, DoesNotFitError)):
        apply_patch(PATCH[:cut], {PATH: BEFORE}, source="p")
