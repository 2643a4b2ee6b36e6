# SPDX-License-Identifier: Apache-2.0
"""The applier against the real ``git apply``: equal bytes, or both refuse.

Cases are seeded: a random text, a random edit of it diffed by real git, and the edit's base changed in another
place, so that hunks move, are ambiguous, or no longer fit. Not covered: what the applier refuses on purpose
(``test_hunks``).
"""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from megatron_fixes.errors import DoesNotFitError
from megatron_fixes.patching.hunks import apply_patch, reverse_patch

CASES = 320
PATH = "megatron/core/module.py"
FRAGMENTS = (
    "x = 1", "    return x", "", "", "}", "# naïve — ☃", "a\x0bb", "page\x0c", "sep\u2028sep", "lone\rreturn",
    "\ttab", "trailing  ", "-- minus", "++ plus", "@@ -1 +1 @@", "diff --git a/x b/x", "\\ No newline", "end\r",
    "caf\x85e", "--- a/x", "+++ b/x",
)  # fmt: skip


def git(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[bytes]:
    settings = ("-c", "core.autocrlf=false", "-c", "core.safecrlf=false", "-c", "apply.whitespace=nowarn")
    return subprocess.run(["git", *settings, *arguments], cwd=cwd, capture_output=True, check=False, timeout=30)


def text_of(lines: list[str], *, ends_whole: bool) -> bytes:
    text = "\n".join(lines)
    return (text + "\n" if ends_whole and lines else text).encode()


def edited(rng: random.Random, lines: list[str], edits: int) -> list[str]:
    lines = list(lines)
    for _ in range(edits):
        at = rng.randint(0, len(lines))
        kind = rng.choice(("insert", "delete", "change", "repeat"))
        if kind == "insert" or not lines:
            lines[at:at] = [rng.choice(FRAGMENTS) for _ in range(rng.randint(1, 3))]
        elif kind == "delete":
            del lines[at : at + rng.randint(1, 2)]
        elif kind == "change":
            lines[at : at + 1] = [f"{rng.choice(FRAGMENTS)}{rng.randint(0, 9)}"]
        else:
            lines[at:at] = lines[max(0, at - 4) : at]
    return lines


def random_lines(rng: random.Random) -> list[str]:
    if rng.random() < 0.4:  # repeated lines make a hunk fit in several places
        block = [rng.choice(FRAGMENTS) for _ in range(rng.randint(1, 5))]
        return (block * rng.randint(2, 12))[: rng.randint(1, 40)]
    numbered = [f"{rng.choice(FRAGMENTS)}{n if rng.random() < 0.5 else ''}" for n in range(rng.randint(1, 60))]
    return numbered


def diff(repository: Path, before: bytes, after: bytes) -> bytes:
    file = repository / PATH
    file.write_bytes(before)
    git("add", "-A", cwd=repository)
    file.write_bytes(after)
    return git("diff", "--full-index", "--text", cwd=repository).stdout


def outcome(apply, patch: bytes, content: bytes) -> bytes | None:  # type: ignore[no-untyped-def]
    try:
        return apply(patch, {PATH: content}, source="case").get(PATH, content)
    except DoesNotFitError:
        return None


def git_outcome(repository: Path, patch: bytes, content: bytes, *flags: str) -> bytes | None:
    (repository / PATH).write_bytes(content)
    (repository / "case.patch").write_bytes(patch)
    done = git("apply", *flags, "case.patch", cwd=repository)
    (repository / "case.patch").unlink()
    return (repository / PATH).read_bytes() if done.returncode == 0 else None


def glues_lines(patch: bytes, content: bytes) -> bool:
    """Whether the patch has a no-newline marker, where git may match a prefix of a longer file (see hunks.py)."""
    return b"\n\\ No newline" in patch and content != b""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    assert git("init", "-q", cwd=root).returncode == 0
    (root / PATH).parent.mkdir(parents=True)
    return root


@pytest.mark.parametrize("chunk", range(8))
def test_result_equals_git_apply_or_both_refuse(repository: Path, chunk: int) -> None:
    compared = fitted = refused = glued = 0
    for seed in range(chunk * CASES // 8, (chunk + 1) * CASES // 8):
        rng = random.Random(seed)
        lines = random_lines(rng)
        before = text_of(lines, ends_whole=rng.random() < 0.75)
        after = text_of(edited(rng, lines, rng.randint(1, 5)), ends_whole=rng.random() < 0.75)
        if not before or not after or before == after:
            continue
        patch = diff(repository, before, after)
        target = before if rng.random() < 0.2 else text_of(
            edited(rng, lines, rng.randint(1, 4)), ends_whole=rng.random() < 0.75
        )  # fmt: skip
        ours, theirs = outcome(apply_patch, patch, target), git_outcome(repository, patch, target)
        if ours is None and theirs is not None and glues_lines(patch, target):
            glued += 1
            continue
        assert ours == theirs, f"seed {seed}"
        assert outcome(apply_patch, patch, before) == after, f"seed {seed}"
        assert outcome(reverse_patch, patch, after) == before, f"seed {seed}"
        moved = text_of(edited(rng, after.decode().split("\n"), 1), ends_whole=True)
        theirs = git_outcome(repository, patch, moved, "--reverse")
        if not (theirs is not None and glues_lines(patch, moved)):
            assert outcome(reverse_patch, patch, moved) == theirs, f"seed {seed}"
        compared += 1
        fitted, refused = fitted + (ours is not None), refused + (ours is None)
    assert compared >= 30
    assert fitted >= 5
    assert refused >= 5
    assert glued <= 4


def test_of_two_places_equally_far_the_later_one_is_taken(repository: Path) -> None:
    head = f"diff --git a/{PATH} b/{PATH}\n--- a/{PATH}\n+++ b/{PATH}\n"
    patch = f"{head}@@ -10,3 +10,3 @@\n begin\n-middle\n+MIDDLE\n end\n".encode()
    filler = [f"line {n}" for n in range(20)]
    block = ["begin", "middle", "end"]
    target = text_of([*filler[:6], *block, *filler[6:9], *block, *filler[9:]], ends_whole=True)
    assert target.split(b"\n")[9 - 3] == target.split(b"\n")[9 + 3] == b"begin"
    result = outcome(apply_patch, patch, target)
    assert result == git_outcome(repository, patch, target)
    assert result is not None
    assert result.split(b"\n")[13] == b"MIDDLE"
