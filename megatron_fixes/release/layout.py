# SPDX-License-Identifier: Apache-2.0
"""The files of a release, by version; their names are the same with a key and without.

``SHA256SUMS`` lists all others, and ``SHA256SUMS.sig`` is over it: one signature covers every byte. A CI may put a
second one beside it, sigstore's bundle, which needs a network and is not checked here. Each name but these holds the
version, so a file of one release can't be passed off as that of another: a renamed file is not listed.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from megatron_fixes.errors import UsageError

SUMS = "SHA256SUMS"
SIGNATURE = "SHA256SUMS.sig"
KEYLESS = "SHA256SUMS.sigstore.json"
# What people install, unpack, or take for what tells them whether they may.
_ENDINGS = (".whl", ".tar.gz", ".tgz", ".zip", ".cdx.json", ".intoto.json", ".sig", ".sigstore.json")
# As PEP 440 writes it: one text for each version, so no leading zeros, and no digits but ASCII's.
_NUMBER = r"(?:0|[1-9][0-9]*)"
VERSION = re.compile(rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(?:(?:a|b|rc){_NUMBER})?")


@dataclass(frozen=True)
class Layout:
    """The names of the files of one version, such as ``0.1.0``."""

    version: str

    @property
    def patches(self) -> str:
        """The tarball of patches, with ``apply.py``, for clusters without pip."""
        return f"megatron-fixes-patches-{self.version}.tar.gz"

    @property
    def root(self) -> str:
        """The one folder in the tarball of patches."""
        return self.patches.removesuffix(".tar.gz")

    @property
    def sdist(self) -> str:
        """The source distribution."""
        return f"megatron_fixes-{self.version}.tar.gz"

    @property
    def wheel(self) -> str:
        """The wheel."""
        return f"megatron_fixes-{self.version}-py3-none-any.whl"

    @property
    def sbom(self) -> str:
        """The CycloneDX bill of materials."""
        return f"megatron-fixes-{self.version}.cdx.json"

    @property
    def provenance(self) -> str:
        """The in-toto statement with SLSA provenance."""
        return f"megatron-fixes-{self.version}.intoto.json"

    @property
    def artefacts(self) -> tuple[str, ...]:
        """What people install or unpack, and what tells what is in it: the subjects of the provenance."""
        return tuple(sorted((self.patches, self.sdist, self.wheel, self.sbom)))

    @property
    def summed(self) -> tuple[str, ...]:
        """What ``SHA256SUMS`` lists, in its order."""
        return tuple(sorted((*self.artefacts, self.provenance)))

    @property
    def files(self) -> tuple[str, ...]:
        """All files of the release."""
        return (*self.summed, SUMS, SIGNATURE)


def parse_version(text: str) -> str:
    """Return the version that ``v0.1.0`` or ``0.1.0`` names.

    Raises:
        UsageError: It names none.
    """
    version = text.removeprefix("v")
    if not VERSION.fullmatch(version):
        raise UsageError(f"got the version {text!r}, expected one such as v0.1.0 or v0.2.0rc1")
    return version


def looks_like_ours(name: str) -> bool:
    """Whether a name can be taken for one of a release's files, of any version and however it is written.

    Such a file may not lie beside a release unless its sums list it; any other is nobody's business but its owner's.
    """
    letters = "".join(character for character in name.casefold() if character.isalnum())
    return letters.startswith(("megatronfixes", "sha256sums")) or name.casefold().endswith(_ENDINGS)


def is_prerelease(version: str) -> bool:
    """Whether a version comes before one, such as ``0.2.0rc1``."""
    return bool(re.search(r"[a-z]", version))


def version_of(names: Collection[str]) -> str | None:
    """The version whose files these are, all of those that a release's sums list; None if there is none."""
    for name in names:
        found = re.fullmatch(rf"megatron-fixes-patches-({VERSION.pattern})\.tar\.gz", name)
        if found and Layout(found[1]).summed == tuple(sorted(names)):
            return found[1]
    return None
