# SPDX-License-Identifier: Apache-2.0
"""All checks of a release, from bytes to findings.

Order: the signature over ``SHA256SUMS``, the sums of the files, then what each file says of itself and of the others:
MANIFEST, provenance, bill of materials, and that wheel and source distribution carry the same patches as the tarball. A
file whose sum is wrong is not looked into. A file that is not there is no fault unless the whole release is asked for.

What holds after no finding: the holder of the key that *was given* has signed these sums, and every byte that was
looked at is covered by them. Not handled: whether that release is the newest one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from megatron_fixes.errors import RefusedError
from megatron_fixes.release import manifest, provenance, sbom
from megatron_fixes.release.archive import unpack
from megatron_fixes.release.layout import KEYLESS, SIGNATURE, SUMS, Layout, version_of
from megatron_fixes.release.signature import is_unsigned
from megatron_fixes.release.sums import digest, read_sums
from megatron_fixes.release.wheel import read_wheel

Signed = Callable[[bytes, bytes], str]
_BESIDE = {SUMS, SIGNATURE, KEYLESS}  # which say what the files are and who says so, and are none of them


@dataclass(frozen=True)
class Finding:
    """What is wrong with one file."""

    file: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}: {self.message}"


@dataclass
class Report:
    """Outcome of a check.

    Attributes:
        version: Of the release, once its sums were read.
        signer: Who signed, as ssh-keygen says it; empty if nobody did or nobody asked.
        unsigned: Whether the sidecar says UNSIGNED.
        checked: What was found right, a sentence each.
        findings: What was not.
        unchecked: What lies there and was not looked at, a sentence each.
        nothing: Whether no file was asked for but the sums and what signs them.
    """

    version: str | None = None
    signer: str = ""
    unsigned: bool = False
    checked: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    nothing: bool = False

    @property
    def good(self) -> bool:
        """Whether files were checked and nothing is wrong."""
        return not self.findings and not self.nothing

    def add(self, errors: Collection[RefusedError], right: str) -> None:
        """Take over errors; if there are none, what was found right."""
        self.findings += [Finding(error.context, error.message) for error in errors]
        self.checked += [] if errors else [right]

    @contextlib.contextmanager
    def catching(self) -> Iterator[None]:
        """Make a finding of what is refused inside, and go on after it."""
        try:
            yield
        except RefusedError as error:
            self.findings.append(Finding(error.context, error.message))


def check(
    files: Mapping[str, bytes],
    signed: Signed | None,
    *,
    chosen: Collection[str] | None = None,
    allow_unsigned: bool = False,
) -> Report:
    """Check a release, or some files of one.

    Args:
        files: Content by name of what is there; ``SHA256SUMS`` and its signature are always looked for.
        signed: Checks a signature: the sums' bytes and the sidecar's in, who signed out, RefusedError if nobody whom we
            know. None: no key was given.
        chosen: Names that have to be right; None for all that the sums list, and then nothing else may be there. The
            sums alone are no file of the release: then nothing was checked that anybody uses.
        allow_unsigned: A release that says UNSIGNED, or a missing key, is no finding; it is still said.
    """
    report = Report(nothing=chosen is not None and not set(chosen) - _BESIDE)
    if KEYLESS in files:
        report.unchecked.append(f"{KEYLESS}: sigstore checks it, with a network; no other check relies on it")
    if SUMS not in files:
        report.findings.append(Finding(SUMS, "is missing, expected it beside the files"))
        return report
    _check_signature(report, files, signed, allow_unsigned=allow_unsigned)
    with report.catching():
        sums = read_sums(files[SUMS])
        report.version = version_of(sums)
        if report.version is None:
            raise RefusedError(f"lists {', '.join(sums)}: not the files of one release", context=SUMS)
        sound = _check_sums(report, files, sums, chosen)
        _check_contents(report, {name: files[name] for name in sound}, sums, Layout(report.version))
    return report


def _check_signature(
    report: Report, files: Mapping[str, bytes], signed: Signed | None, *, allow_unsigned: bool
) -> None:
    sidecar = files.get(SIGNATURE)
    report.unsigned = sidecar is not None and is_unsigned(sidecar)
    if sidecar is None:
        report.findings.append(Finding(SIGNATURE, "is missing, expected it beside SHA256SUMS"))
    elif signed is not None and not report.unsigned:
        with report.catching():
            report.signer = signed(files[SUMS], sidecar)
            report.checked.append(f"signature: {report.signer}")
    elif not allow_unsigned:
        no_key = "was not checked, since no key was given: name the signer's with --key"
        message = "UNSIGNED: nobody has signed this release" if report.unsigned else no_key
        report.findings.append(Finding(SIGNATURE, message))


def _check_sums(
    report: Report, files: Mapping[str, bytes], sums: Mapping[str, str], chosen: Collection[str] | None
) -> list[str]:
    """Return the names of the files that are as the sums say."""
    errors, sound = [], []
    wanted = {*files, *sums} - _BESIDE if chosen is None else set(chosen) - _BESIDE
    for name in sorted(wanted):
        if name not in sums:
            errors.append(RefusedError("is not listed in SHA256SUMS, expected no such file", context=name))
        elif name not in files:
            errors.append(RefusedError("is missing, expected it as SHA256SUMS lists it", context=name))
        elif (got := digest(files[name])) != sums[name]:
            errors.append(RefusedError(f"got sha256 {got}, expected {sums[name]} as in SHA256SUMS", context=name))
        else:
            sound.append(name)
    if wanted:
        report.add(errors, f"sums: {', '.join(sound)}")
    else:
        report.unchecked.append("every file of the release: none was asked for")
    return sound


def _check_contents(report: Report, files: Mapping[str, bytes], sums: Mapping[str, str], layout: Layout) -> None:
    """Hold what each file says of itself and of the others against the release."""
    commit: str | None = None
    patches: dict[str, dict[str, bytes]] = {}
    if (data := files.get(layout.patches)) is not None:
        with report.catching():
            inside, described = read_patches(data, layout)
            commit = described.commit
            patches[layout.patches] = _patches(inside, f"{layout.root}/patches/")
            report.add(_manifest_faults(described, inside, layout), f"MANIFEST: {len(inside)} files")
    if (data := files.get(layout.provenance)) is not None:
        with report.catching():
            statement = provenance.decode(data, source=layout.provenance)
            subjects = {name: sums[name] for name in layout.artefacts}
            faults = provenance.faults(
                statement, subjects, version=layout.version, commit=commit, source=layout.provenance
            )
            report.add(faults, f"provenance: built from commit {statement.commit}")
    if (data := files.get(layout.sbom)) is not None:
        listed = {name: sums[name] for name in layout.artefacts if name != layout.sbom}
        faults = sbom.faults(data, listed, version=layout.version, source=layout.sbom)
        report.add(faults, "bill of materials: the artefacts as in the sums")
    for name, read, prefix in (
        (layout.sdist, unpack, f"megatron_fixes-{layout.version}/patches/"),
        (layout.wheel, read_wheel, "megatron_fixes/_data/patches/"),
    ):
        if (data := files.get(name)) is not None:
            with report.catching():
                patches[name] = _patches(read(data, source=name), prefix)
    _compare_patches(report, patches)


def read_patches(data: bytes, layout: Layout) -> tuple[dict[str, bytes], manifest.Manifest]:
    """Read the tarball of patches: its files, and what its manifest says of them.

    Raises:
        RefusedError: It is no archive of our form, or has no manifest.
    """
    files = unpack(data, source=layout.patches)
    name = f"{layout.root}/{manifest.FILE}"
    if name not in files:
        raise RefusedError(f"got no {name} in it, expected the manifest", context=layout.patches)
    return files, manifest.decode(files[name], source=name)


def _manifest_faults(described: manifest.Manifest, files: Mapping[str, bytes], layout: Layout) -> list[RefusedError]:
    prefix = f"{layout.root}/"
    found = [
        RefusedError(f"got {name!r} outside {prefix}, expected one folder", context=layout.patches)
        for name in files
        if not name.startswith(prefix)
    ]
    if described.version != layout.version:
        message = f"says version {described.version}, expected {layout.version} as in the file names"
        found.append(RefusedError(message, context=f"{prefix}{manifest.FILE}"))
    inside = {name.removeprefix(prefix): content for name, content in files.items() if name.startswith(prefix)}
    inside.pop(manifest.FILE)
    return found + manifest.faults(described, inside, source=layout.root)


def _patches(files: Mapping[str, bytes], prefix: str) -> dict[str, bytes]:
    return {name.removeprefix(prefix): content for name, content in files.items() if name.startswith(prefix)}


def _compare_patches(report: Report, patches: Mapping[str, Mapping[str, bytes]]) -> None:
    if not patches:
        return
    first, *others = patches
    errors = []
    for other in others:
        names = sorted({*patches[first], *patches[other]})
        if odd := [name for name in names if patches[first].get(name) != patches[other].get(name)]:
            message = f"carries other patches than {first}, expected the same: {', '.join(odd[:3])}"
            errors.append(RefusedError(message, context=other))
    if not any(patches.values()):
        errors.append(RefusedError("carries no patch, expected some", context=first))
    report.add(errors, f"patches: {len(patches[first])} files, the same in {', '.join(patches)}")
