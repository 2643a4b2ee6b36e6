#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds a release from a commit, signs it if it is given a key, and verifies it before it is called done.

What is built is the commit and not the work tree, which has to be clean all the same: files that git ignores never
travel. The bytes depend on the commit, the version and the packages in ``ci/release_constraints.txt`` alone: not on
user, path, umask, time zone, locale or date. ``SOURCE_DATE_EPOCH`` is the time of the commit, before and after it is
tagged. Without a key the sidecar says UNSIGNED, and all other files are the same.

Not handled: whether lint, proofs and matrix are green for the commit (``release_dist`` asks that first).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import program
from repository import PACKAGE, commit_of, git, git_bytes, package_version, require_clean
from standalone import BUNDLED, files_of_patches

from megatron_fixes.errors import RefusedError, UsageError
from megatron_fixes.release import archive, form, layout, provenance, sbom, signature, sums, verify, wheel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = "ci/release_constraints.txt"


@dataclass(frozen=True)
class Source:
    """What a release is built from: a commit that carries the version.

    Attributes:
        root: The git checkout.
        version: Such as ``0.1.0``.
        commit: 40 hexadecimal digits.
        epoch: The commit's time.
    """

    root: Path
    version: str
    commit: str
    epoch: int


def find_source(root: Path, version: str) -> Source:
    """Find what the checkout at ``root`` would release as ``version``.

    Raises:
        UsageError: ``version`` is none, there is no git, or ``root`` is no checkout of its own.
        RefusedError: The work tree is not clean, the package has another version, or the tag stands elsewhere.
    """
    version = layout.parse_version(version)
    require_clean(root, "Commit them, or build in a clone of its own.")
    commit, epoch = git(root, "log", "-1", "--format=%H %ct").split()
    tag = f"v{version}"
    if (at := commit_of(root, f"refs/tags/{tag}")) not in (None, commit):
        raise RefusedError(
            f"got the tag {tag} at {at}, expected it at what is checked out, {commit}",
            context=str(root),
            hint=f"Check the tag out: git checkout {tag}",
        )
    if (said := package_version(git(root, "show", f"{commit}:{PACKAGE}"))) != version:
        raise RefusedError(f"got {said}, expected {version}", context=PACKAGE)
    return Source(root, version, commit, int(epoch))


def build(source: Source, out: Path, key: Path | None = None) -> list[Path]:
    """Build, sign and verify the files of a release, and only then put them into ``out``.

    Args:
        source: From ``find_source``.
        out: Made if it is not there; what it holds of this version is replaced, and it may hold nothing else. The
            folder itself is replaced, so a shell that works in it has to enter it again.
        key: What ``ssh-keygen -Y sign`` signs with; None for a release that says UNSIGNED.

    Returns:
        The files, in order of name.

    Raises:
        MegatronFixesError: Anything failed. Nothing in ``out`` was changed.
    """
    names = layout.Layout(source.version)
    out = _place(out, names)
    pinned = pinned_packages(source.root)
    with tempfile.TemporaryDirectory(prefix="megatron-fixes-release-") as folder:
        work = Path(folder)
        tree = export(source, work / "tree")
        files = {names.patches: patches_tarball(source, tree)}
        files[names.sdist] = archive_again(build_with_backend("sdist", tree, work, source.epoch), source.epoch)
        tree = export(source, work / "tree-for-wheel")
        files[names.wheel] = wheel.zip_again(build_with_backend("wheel", tree, work, source.epoch), mtime=source.epoch)
        project = project_of(tree)
    digests = {name: sums.digest(content) for name, content in files.items()}
    bundled = [sbom.Bundled(name, pinned[name], licence, names.patches) for name, licence in BUNDLED.items()]
    files[names.sbom] = sbom.make(project, source.version, source.epoch, digests, bundled)
    digests[names.sbom] = sums.digest(files[names.sbom])
    statement = provenance.make(
        digests, version=source.version, commit=source.commit, epoch=source.epoch, packages=pinned
    )
    files[names.provenance] = form.encode(statement)
    files[layout.SUMS] = sums.write_sums({name: sums.digest(content) for name, content in files.items()})
    files[layout.SIGNATURE] = signature.sign(files[layout.SUMS], key) if key else signature.UNSIGNED
    require_good(files, key)
    try:
        return _put(files, out, names)
    except OSError as error:
        raise RefusedError(f"got '{error.strerror}' from the system", context=str(error.filename or out)) from None


def require_good(files: Mapping[str, bytes], key: Path | None) -> None:
    """Verify a whole release as a stranger would, with the key that has signed it.

    Raises:
        RefusedError: A finding.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-fixes-") as folder:
        signed = None
        if key is not None:
            public = Path(folder, "key.pub")
            public.write_bytes(signature.public_half(key))
            signed = functools.partial(signature.verify, key=public)
        report = verify.check(files, signed, allow_unsigned=key is None)
    if report.findings:
        raise RefusedError(
            "got a release that does not verify: " + "; ".join(map(str, report.findings)),
            hint="Report this: it is a fault of the build.",
        )


def pinned_packages(root: Path) -> dict[str, str]:
    """The packages that determine bytes, by name, each installed here at its one version.

    Raises:
        RefusedError: One has another version here.
    """
    lines = (root / CONSTRAINTS).read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    for name, version in pinned.items():
        try:
            here = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            here = "none"
        if here != version:
            raise RefusedError(
                f"got {name} {here}, expected {version}: another version makes other bytes",
                context=CONSTRAINTS,
                hint=f"Install it: {sys.executable} -m pip install -r {CONSTRAINTS}",
            )
    return pinned


def export(source: Source, to: Path) -> Path:
    """Write the commit's files to a folder: as they are stored, whatever attributes and settings git has here.

    Raises:
        RefusedError: The commit holds a link or a submodule.
    """
    listed = git_bytes(source.root, "ls-tree", "-r", "-z", source.commit).decode("utf-8").split("\0")[:-1]
    entries = [(*line.partition("\t")[0].split(), line.partition("\t")[2]) for line in listed]
    if odd := [path for mode, _, _, path in entries if mode not in ("100644", "100755")]:
        raise RefusedError("got a link or a submodule, expected files only", context=odd[0])
    stored = git_bytes(source.root, "cat-file", "--batch", given="".join(f"{e[2]}\n" for e in entries).encode())
    at = 0
    for mode, _, _, path in entries:
        end = stored.index(b"\n", at)
        _, _, size = stored[at:end].decode("ascii").split()
        content = stored[end + 1 : end + 1 + int(size)]
        at = end + 1 + int(size) + 1
        file = to / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(int(mode[-3:], 8))
        os.utime(file, (source.epoch, source.epoch))
    return to


def patches_tarball(source: Source, tree: Path) -> bytes:
    """The tarball of patches, made of an exported tree."""
    root = layout.Layout(source.version).root
    files = files_of_patches(tree, version=source.version, commit=source.commit, epoch=source.epoch)
    return archive.pack(
        {f"{root}/{name}": content for name, content in files.items()},
        mtime=source.epoch,
        executable=[f"{root}/apply.py"],
    )


def build_with_backend(kind: str, tree: Path, work: Path, epoch: int) -> bytes:
    """Run setuptools in ``tree`` and return the bytes of what it makes; ``kind`` is ``sdist`` or ``wheel``.

    Raises:
        RefusedError: It failed.
    """
    out = work / kind
    out.mkdir()
    code = f"import sys; from setuptools import build_meta as b; b.build_{kind}(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)],
        cwd=tree,
        env={
            **{name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ},
            "SOURCE_DATE_EPOCH": str(epoch),
            "PYTHONHASHSEED": "0",
            "LC_ALL": "C.UTF-8",
            "TZ": "UTC",
        },
        capture_output=True,
        text=True,
        check=False,
        umask=0o022,
    )
    if done.returncode:
        raise RefusedError(f"got a {kind} that does not build: {done.stderr.strip()[-2000:]}", context=str(tree))
    (made,) = out.iterdir()
    return made.read_bytes()


def archive_again(data: bytes, epoch: int) -> bytes:
    """A source distribution in our form: the same files under the same names, and nothing else of it."""
    files = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as made:
        for entry in made:
            if (stream := made.extractfile(entry)) is not None:
                files[entry.name] = stream.read()
    return archive.pack(files, mtime=epoch)


def project_of(tree: Path) -> sbom.Project:
    """What pyproject.toml says of the project."""
    import tomllib  # since Python 3.11; the arguments are read on 3.10 too

    said = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    users = {name: texts for name, texts in said["optional-dependencies"].items() if name not in ("test", "lint")}
    return sbom.Project(said["name"], said["description"], said["license"], tuple(said["dependencies"]), users)


def _place(out: Path, names: layout.Layout) -> Path:
    """Where the files will be, as an absolute path; asked before the build, so that nobody waits for a refusal.

    Raises:
        UsageError: It is a link or no folder, or nothing can be made beside it.
        RefusedError: It holds anything but files of this version.
    """
    try:
        if out.is_symlink() or (out.exists() and not out.is_dir()):
            raise UsageError("got a link or a file, expected a folder or the name of a new one", context=str(out))
        place = out.resolve()
        _require_ours(place, names, out)
        place.parent.mkdir(parents=True, exist_ok=True)
        Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent)).rmdir()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        message = f"got '{error}', expected a folder that can be made, and others beside it"
        raise UsageError(message, context=str(out)) from None
    return place


def _require_ours(folder: Path, names: layout.Layout, out: Path) -> None:
    """Refuse a folder with anything in it but regular files of this version; ``out`` is what messages call it."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name not in names.files or path.is_symlink() or not path.is_file():
            message = f"got {path.name} in it, expected nothing but the files of {names.version}"
            raise RefusedError(message, context=str(out))


def _put(files: Mapping[str, bytes], out: Path, names: layout.Layout) -> list[Path]:
    """Write files into a folder that then takes the place of ``out``, so that no part of a release is taken for one.

    What was there is moved away first and removed last, file by file: nothing but what is known to be ours.
    """
    staged, old = (Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent)) for _ in range(2))
    try:
        staged.chmod(0o755)
        for name, content in files.items():
            (staged / name).write_bytes(content)
            (staged / name).chmod(0o644)
        replaced = out.is_dir()
        if replaced:
            out.rename(old)
        try:
            _require_ours(old, names, out)
            staged.rename(out)
        except (OSError, RefusedError):
            if replaced:
                old.rename(out)
            raise
        for path in old.iterdir():
            path.unlink()
    finally:
        shutil.rmtree(staged, ignore_errors=True)
        with contextlib.suppress(OSError):
            old.rmdir()
    return [out / name for name in sorted(files)]


@program.tells_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Read the arguments, build, and say what was made."""
    parser = program.parser(__doc__)
    parser.add_argument("version", metavar="VERSION", help="such as v0.1.0")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the files (default: dist)")
    parser.add_argument("--key", type=Path, help="private key for ssh-keygen -Y sign; without it: UNSIGNED")
    given = parser.parse_args(arguments)
    source = find_source(ROOT, given.version)
    made = build(source, given.out, given.key)
    print(f"megatron-fixes {source.version}, commit {source.commit}, SOURCE_DATE_EPOCH={source.epoch}")
    for path in made:
        print(f"  {path.stat().st_size:>9}  {path.name}")
    print(f"verified; {'signed' if given.key else 'UNSIGNED'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
