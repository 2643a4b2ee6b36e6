# SPDX-License-Identifier: Apache-2.0
"""How the files of a release were made: an in-toto Statement v1 with an SLSA Provenance v1 predicate.

It says what determines the bytes and nothing else: the commit, its time, and the packages that take part. When, where
and by whom it was built is not in it, or nobody could build the same file again; a build service states that in an
attestation of its own. It bears no signature itself: ``SHA256SUMS``, which is signed, covers it.

Source: in-toto attestation framework (Statement v1), slsa.dev/provenance/v1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from megatron_fixes.errors import RefusedError
from megatron_fixes.release import form
from megatron_fixes.release.form import Digest
from megatron_fixes.release.sums import contradictions

BUILDER = "urn:megatron-fixes:scripts:build_release.py"


class Sha256(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A digest set with one digest."""

    sha256: Digest


class Subject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file that was made."""

    name: str
    digest: Sha256


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the build was asked for."""

    version: str
    source_date_epoch: int


class Definition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """SLSA's buildDefinition; the first of ``resolvedDependencies`` is our source."""

    buildType: Literal["urn:megatron-fixes:build-release:1"]
    externalParameters: Parameters
    resolvedDependencies: tuple[dict[str, Any], ...]


class Predicate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """SLSA's provenance."""

    buildDefinition: Definition
    runDetails: dict[str, Any]


class Statement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """in-toto's statement."""

    type: Literal["https://in-toto.io/Statement/v1"] = msgspec.field(name="_type")
    subject: tuple[Subject, ...]
    predicateType: Literal["https://slsa.dev/provenance/v1"]
    predicate: Predicate

    @property
    def commit(self) -> str | None:
        """The commit that it names as source."""
        sources = self.predicate.buildDefinition.resolvedDependencies
        digests = sources[0].get("digest") if sources else None
        commit = digests.get("gitCommit") if isinstance(digests, dict) else None
        return commit if isinstance(commit, str) else None


def make(
    digests: Mapping[str, str], *, version: str, commit: str, epoch: int, packages: Mapping[str, str]
) -> Statement:
    """Make the statement.

    Args:
        digests: sha256 by name, of the files that are its subjects.
        version: Of megatron-fixes.
        commit: Of the source.
        epoch: SOURCE_DATE_EPOCH of the build.
        packages: Version by name, of the packages from PyPI that determine bytes.
    """
    sources: list[dict[str, Any]] = [{"name": "megatron-fixes", "digest": {"gitCommit": commit}}]
    sources += [{"uri": f"pkg:pypi/{name}@{packages[name]}"} for name in sorted(packages)]
    return Statement(
        type="https://in-toto.io/Statement/v1",
        subject=tuple(Subject(name, Sha256(digests[name])) for name in sorted(digests)),
        predicateType="https://slsa.dev/provenance/v1",
        predicate=Predicate(
            Definition("urn:megatron-fixes:build-release:1", Parameters(version, epoch), tuple(sources)),
            {"builder": {"id": BUILDER}},
        ),
    )


def decode(data: bytes, *, source: str) -> Statement:
    """Read the file's bytes; raises as ``form.decode``."""
    return form.decode(data, Statement, "provenance statement", source=source)


def faults(
    statement: Statement, digests: Mapping[str, str], *, version: str, commit: str | None, source: str
) -> list[RefusedError]:
    """Compare a statement with the release that it lies beside.

    Args:
        statement: What is claimed.
        digests: sha256 by name that its subjects must have.
        version: Of the release.
        commit: That the manifest names; None if there is none to compare.
        source: The statement's file, for messages.
    """
    claimed = {subject.name: subject.digest.sha256 for subject in statement.subject}
    found = contradictions(claimed, digests)
    if (said := statement.predicate.buildDefinition.externalParameters.version) != version:
        found.append(f"says that it built version {said}, expected {version}")
    if commit is not None and statement.commit != commit:
        found.append(f"says that it built commit {statement.commit}, expected {commit} as in the manifest")
    return [RefusedError(message, context=source) for message in found]
