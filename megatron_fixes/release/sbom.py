# SPDX-License-Identifier: Apache-2.0
"""The bill of materials: a CycloneDX 1.6 document on what a release holds and what an install of it draws in.

Components are of three kinds: our artefacts with their sha256, what ``apply.py`` carries of others with its version,
and what pip installs beside the wheel, where only a range is known before an install. The serial number is made from
the content, so the same release has the same document. Not handled: what those packages require in turn.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from megatron_fixes.errors import RefusedError
from megatron_fixes.release.sums import contradictions, digest

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Bundled:
    """A package from PyPI of which our artefact ``inside`` carries modules."""

    name: str
    version: str
    licence: str
    inside: str


@dataclass(frozen=True)
class Project:
    """What pyproject.toml says: name, description, licence, and requirements, extras among them by name."""

    name: str
    description: str
    licence: str
    requirements: tuple[str, ...]
    extras: Mapping[str, Sequence[str]]


def make(project: Project, version: str, epoch: int, digests: Mapping[str, str], bundled: Sequence[Bundled]) -> bytes:
    """Return the document's bytes.

    Args:
        project: The project.
        version: Its version.
        epoch: SOURCE_DATE_EPOCH, the time that the document bears.
        digests: sha256 by name, of the artefacts.
        bundled: What they carry of others.
    """
    root = f"pkg:pypi/{project.name}@{version}"
    required = [_required(text, "required", "") for text in project.requirements]
    optional = [_required(text, "optional", extra) for extra, texts in sorted(project.extras.items()) for text in texts]
    components = [_file(name, digests[name]) for name in sorted(digests)]
    components += sorted(map(_bundled, bundled), key=lambda component: str(component["bom-ref"]))
    components += sorted([*required, *optional], key=lambda component: str(component["bom-ref"]))
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(epoch, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "component": {
                "bom-ref": root,
                "type": "application",
                "name": project.name,
                "version": version,
                "description": project.description,
                "licenses": [{"expression": project.licence}],
                "purl": root,
            },
        },
        "components": components,
        "dependencies": [{"ref": root, "dependsOn": sorted(str(found["bom-ref"]) for found in required)}],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, f"{root}#{digest(_bytes(document))}")
    return _bytes({**document, "serialNumber": f"urn:uuid:{serial}"})


def faults(data: bytes, digests: Mapping[str, str], *, version: str, source: str) -> list[RefusedError]:
    """Compare a document with the artefacts that it lies beside: its version and their digests."""
    try:
        document = json.loads(data)
        said = document["metadata"]["component"]["version"]
        files = {str(c["name"]): c["hashes"][0]["content"] for c in document["components"] if c["type"] == "file"}
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        return [RefusedError(f"got what is no bill of materials of ours ({error!r})", context=source)]
    found = [f"is of version {said}, expected {version}"] if said != version else []
    return [RefusedError(message, context=source) for message in (*found, *contradictions(files, digests))]


def _bytes(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=1, sort_keys=True).encode("ascii") + b"\n"


def _file(name: str, sha256: str) -> dict[str, Any]:
    hashes = [{"alg": "SHA-256", "content": sha256}]
    return {"bom-ref": f"file:{name}", "type": "file", "name": name, "hashes": hashes}


def _bundled(found: Bundled) -> dict[str, Any]:
    purl = f"pkg:pypi/{found.name}@{found.version}"
    return {
        "bom-ref": purl,
        "type": "library",
        "name": found.name,
        "version": found.version,
        "licenses": [{"expression": found.licence}],
        "purl": purl,
        "scope": "required",
        "properties": [{"name": "megatron-fixes:inside", "value": found.inside}],
    }


def _required(requirement: str, scope: str, extra: str) -> dict[str, Any]:
    match = _NAME.match(requirement)
    if match is None:
        raise ValueError(f"got the requirement {requirement!r}, expected one that begins with a name")
    name = re.sub(r"[-_.]+", "-", match.group()).lower()
    properties = [{"name": "megatron-fixes:requirement", "value": requirement}]
    properties += [{"name": "megatron-fixes:extra", "value": extra}] if extra else []
    return {
        "bom-ref": f"requirement:{extra}:{requirement}",
        "type": "library",
        "name": name,
        "purl": f"pkg:pypi/{name}",
        "scope": scope,
        "properties": properties,
    }
