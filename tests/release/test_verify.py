# SPDX-License-Identifier: Apache-2.0
"""Any change of a release is found, with the file that it is in; and what we build is found good.

Bytes are changed in memory. Where the signature is not what is asked about, it is taken for good: then the sums are the
last to say no, or the files among themselves where even the sums were written anew.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from megatron_fixes.release import archive, form, layout, manifest, signature, sums
from megatron_fixes.release.verify import check

from .conftest import LAYOUT, Released, check_as_signed, make_key, sealed

Files = dict[str, bytes]
POSITIONS = 24
KINDS = ("patches", "sdist", "wheel", "sbom", "provenance")


def said(files: Files, **options: object) -> list[str]:
    return [str(finding) for finding in check_as_signed(files, **options).findings]


def flipped(content: bytes, at: int, bit: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


def test_what_was_built_is_good(released: Released) -> None:
    report = check(released.files, lambda text, sidecar: signature.verify(text, sidecar, released.public))
    assert report.findings == []
    assert report.version == LAYOUT.version
    assert "ED25519 key SHA256:" in report.signer
    heads = [sentence.partition(":")[0] for sentence in report.checked]
    assert heads == ["signature", "sums", "MANIFEST", "provenance", "bill of materials", "patches"]


@pytest.mark.parametrize("kind", KINDS)
def test_any_changed_byte_of_a_listed_file_is_found(kind: str, released: Released) -> None:
    name = getattr(LAYOUT, kind)
    content = released.files[name]
    draw = random.Random(name)
    places = [0, len(content) - 1, *(draw.randrange(len(content)) for _ in range(POSITIONS))]
    for at in places:
        files = {**released.files, name: flipped(content, at, draw.randrange(8))}
        (finding,) = check_as_signed(files, chosen=[name]).findings
        assert finding.file == name
        assert "expected" in finding.message


def test_any_changed_byte_of_the_sums_is_found(released: Released) -> None:
    good = released.files[layout.SUMS]

    def signed(text: bytes, sidecar: bytes) -> str:
        return "good" if text == good else signature.verify(text, b"", released.public)

    for at in range(len(good)):
        files = {**released.files, layout.SUMS: flipped(good, at, at % 8)}
        findings = check(files, signed, chosen=[LAYOUT.sbom]).findings
        assert findings[0].file == layout.SIGNATURE


STRUCTURE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[:-1],
    "halved": lambda content: content[: len(content) // 2],
    "emptied": lambda content: b"",
    "appended": lambda content: content + b"\n",
    "a zero appended": lambda content: content + b"\0",
    "doubled": lambda content: content * 2,
    "lines turned": lambda content: b"".join(reversed(content.splitlines(keepends=True))),
}


@pytest.mark.parametrize("change", STRUCTURE)
def test_any_changed_structure_is_found(change: str, released: Released) -> None:
    for name in LAYOUT.summed:
        files = {**released.files, name: STRUCTURE[change](released.files[name])}
        assert said(files, chosen=[name])[0].startswith(f"{name}: got sha256 ")
    changed = STRUCTURE[change](released.files[layout.SUMS])
    assert any(line.startswith("SHA256SUMS") for line in said({**released.files, layout.SUMS: changed}))


def test_swapped_missing_and_added_files_are_found(released: Released) -> None:
    one, two = LAYOUT.sdist, LAYOUT.patches
    swapped = {**released.files, one: released.files[two], two: released.files[one]}
    assert {line.partition(":")[0] for line in said(swapped)} == {one, two}
    missing = {name: content for name, content in released.files.items() if name != LAYOUT.sbom}
    assert said(missing) == [f"{LAYOUT.sbom}: is missing, expected it as SHA256SUMS lists it"]
    added = {**released.files, "extra.whl": b""}
    assert said(added) == ["extra.whl: is not listed in SHA256SUMS, expected no such file"]
    assert said(missing, chosen=[one]) == []
    assert said(added, chosen=["extra.whl"]) == ["extra.whl: is not listed in SHA256SUMS, expected no such file"]


@pytest.mark.parametrize("name", [layout.SUMS, layout.SIGNATURE])
def test_a_missing_signature_or_sums_is_a_finding(name: str, released: Released) -> None:
    files = {other: content for other, content in released.files.items() if other != name}
    for options in ({}, {"allow_unsigned": True}, {"chosen": [LAYOUT.wheel]}):
        assert [finding.file for finding in check_as_signed(files, **options).findings] == [name]


OTHER_FORMS = (
    *("", "x", "{0}  a b\n", "{0} *x\n", "{0}  ../x\n", "{0}  /x\n", "{0}  x\r\n", "{0}  x", "{0}  x\n\n"),
    *("{0}  x\n{0}  x\n", "{0}  y\n{0}  x\n", "#\n{0}  x\n", "{0}  -x\n"),
)


@pytest.mark.parametrize("text", OTHER_FORMS)
def test_sums_in_another_form_are_a_finding(text: str, released: Released) -> None:
    files = {**released.files, layout.SUMS: text.format("0" * 64).encode()}
    assert said(files)[0].startswith("SHA256SUMS")


def test_a_release_under_the_names_of_another_version_is_found(released: Released) -> None:
    other = layout.Layout("9.9.9")
    names = dict(zip(LAYOUT.summed, other.summed, strict=True))
    renamed = {names.get(name, name): content for name, content in released.files.items()}
    assert len(said(renamed)) == 10  # each name is missing, and each new one is not listed
    listed = {name: sums.digest(renamed[name]) for name in other.summed}
    dishonest = said({**renamed, layout.SUMS: sums.write_sums(listed)})
    for name in (other.patches, other.provenance, other.sbom, other.wheel):
        assert any(line.startswith((name, f"{other.root}/")) for line in dishonest), dishonest


def rebuilt(released: Released, change: Callable[[dict[str, bytes]], None], *, honest: bool = False) -> Files:
    """The release with another tarball of patches, sums made anew; ``honest``: its manifest too."""
    inside = archive.unpack(released.files[LAYOUT.patches], source="x")
    change(inside)
    name = f"{LAYOUT.root}/{manifest.FILE}"
    if honest:
        described = manifest.decode(inside[name])
        others = {n.removeprefix(f"{LAYOUT.root}/"): c for n, c in inside.items() if n != name}
        inside[name] = form.encode(msgspec.structs.replace(described, files=manifest.entries(others)))
    tarball = archive.pack(inside, mtime=0, executable=[f"{LAYOUT.root}/apply.py"])
    return sealed({**released.files, LAYOUT.patches: tarball})


def test_a_tarball_that_is_not_what_its_manifest_says_is_found(released: Released) -> None:
    root = LAYOUT.root
    cases: dict[str, Callable[[dict[str, bytes]], object]] = {
        f"{root}/apply.py: got sha256": lambda inside: inside.update({f"{root}/apply.py": b"print()\n"}),
        f"{root}/LICENSE: is missing": lambda inside: inside.pop(f"{root}/LICENSE"),
        f"{root}/new: is not in the manifest": lambda inside: inside.update({f"{root}/new": b""}),
        f"{LAYOUT.patches}: got 'new' outside": lambda inside: inside.update({"new": b""}),
        f"{LAYOUT.patches}: got no {root}/MANIFEST": lambda inside: inside.pop(f"{root}/{manifest.FILE}"),
        f"{root}/MANIFEST.json: got what is no manifest": lambda i: i.update({f"{root}/{manifest.FILE}": b"{}"}),
    }
    for expected, change in cases.items():
        findings = said(rebuilt(released, change), chosen=[LAYOUT.patches])  # type: ignore[arg-type]
        assert any(line.startswith(expected) for line in findings), (expected, findings)


def test_a_manifest_of_another_version_is_found(released: Released) -> None:
    name = f"{LAYOUT.root}/{manifest.FILE}"

    def older(inside: dict[str, bytes]) -> None:
        described = manifest.decode(inside[name])
        inside[name] = form.encode(msgspec.structs.replace(described, version="0.0.1"))

    (finding,) = said(rebuilt(released, older), chosen=[LAYOUT.patches])
    assert finding.startswith(f"{name}: says version 0.0.1, expected {LAYOUT.version}")


def test_patches_that_differ_between_tarball_and_wheel_are_found(released: Released) -> None:
    name = next(n for n in archive.unpack(released.files[LAYOUT.patches], source="x") if n.endswith(".patch"))
    files = rebuilt(released, lambda inside: inside.update({name: b"other\n"}), honest=True)
    findings = said(files, chosen=[LAYOUT.patches, LAYOUT.wheel, LAYOUT.sdist])
    assert [line.partition(": ")[0] for line in findings] == [LAYOUT.sdist, LAYOUT.wheel]
    assert all(name.partition("/patches/")[2] in line for line in findings)


def test_provenance_and_bill_of_materials_of_other_files_are_found(released: Released) -> None:
    files = rebuilt(released, lambda inside: inside.update({f"{LAYOUT.root}/NOTICE": b""}), honest=True)
    digest = sums.digest(files[LAYOUT.patches])
    findings = said(files)
    for name in (LAYOUT.provenance, LAYOUT.sbom):
        assert any(line.startswith(f"{name}: says ") and digest in line for line in findings)


@pytest.mark.parametrize("field", ["version", "commit", "_type", "predicateType", "subject"])
def test_a_provenance_that_says_something_else_is_found(field: str, released: Released) -> None:
    text = json.loads(released.files[LAYOUT.provenance])
    definition = text["predicate"]["buildDefinition"]
    if field == "version":
        definition["externalParameters"]["version"] = "9.9.9"
    elif field == "commit":
        definition["resolvedDependencies"][0]["digest"]["gitCommit"] = "0" * 40
    elif field == "subject":
        text["subject"].pop()
    else:
        text[field] = "https://example.invalid"
    content = json.dumps(text, indent=1, ensure_ascii=False).encode() + b"\n"
    findings = said(sealed({**released.files, LAYOUT.provenance: content}))
    assert [line.partition(": ")[0] for line in findings] == [LAYOUT.provenance]


def test_a_release_without_a_key_says_so_and_counts_only_where_that_is_allowed(released: Released) -> None:
    files = {**released.files, layout.SIGNATURE: signature.UNSIGNED}

    def never(text: bytes, sidecar: bytes) -> str:
        raise AssertionError("there is nothing to check")

    for signed in (None, never):
        assert [str(f) for f in check(files, signed).findings] == [
            f"{layout.SIGNATURE}: UNSIGNED: nobody has signed this release"
        ]
        report = check(files, signed, allow_unsigned=True)
        assert (report.findings, report.unsigned, report.signer) == ([], True, "")


def test_a_missing_key_is_a_finding_unless_that_is_allowed(released: Released) -> None:
    (finding,) = check(released.files, None).findings
    assert finding.file == layout.SIGNATURE
    assert "no key was given" in finding.message
    assert check(released.files, None, allow_unsigned=True).findings == []


def test_sums_written_anew_by_somebody_else_are_found(released: Released, tmp_path: Path) -> None:
    name = LAYOUT.sbom
    forged = sealed({**released.files, name: released.files[name] + b"\n"})
    forged[layout.SIGNATURE] = signature.sign(forged[layout.SUMS], make_key(tmp_path, "another"))
    report = check(forged, lambda text, sidecar: signature.verify(text, sidecar, released.public), chosen=[name])
    assert {finding.file for finding in report.findings} == {layout.SIGNATURE}
