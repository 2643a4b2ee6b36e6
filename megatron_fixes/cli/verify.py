# SPDX-License-Identifier: Apache-2.0
"""``megatron-fixes verify``: whether files of a release are those that the holder of a key has signed. Reads only.

The key comes from whoever verifies and never from the release. Without one, or for a release that says UNSIGNED, the
answer is 1 unless ``--allow-unsigned`` asks for the rest of the checks, and then UNSIGNED is said again. Sums of which
no file was looked at are not good either: the answer is 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megatron_fixes.cli import output
from megatron_fixes.cli.options import json_option
from megatron_fixes.errors import UsageError
from megatron_fixes.patching.shell import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatron_fixes.release.verify import Report

_LABEL = 10


def _to_json(report: Report, names: Sequence[str]) -> dict[str, Any]:
    return {
        "version": report.version,
        "signer": report.signer or None,
        "unsigned": report.unsigned,
        "files": list(names),
        "checked": report.checked,
        "unchecked": report.unchecked,
        "findings": [{"file": finding.file, "message": finding.message} for finding in report.findings],
        "good": report.good,
    }


def _verdict(report: Report) -> str:
    if report.findings:
        return "do not use these files"
    if report.nothing:
        so_far = f"the sums of megatron-fixes {report.version} are {'' if report.signer else 'not known to be '}signed"
        return f"{so_far}, but no file of the release was checked: name its folder, or a file of it"
    if report.signer:
        return f"good: megatron-fixes {report.version}, signed"
    why = "UNSIGNED: nobody has signed this release" if report.unsigned else "the signature was not checked"
    return f"sums are right for megatron-fixes {report.version}, but {why}"


def _sure(report: Report) -> bool:
    return report.good and bool(report.signer)


def _print(report: Report) -> None:
    for sentence in report.checked:
        output.fact("right", sentence, _LABEL)
    for sentence in report.unchecked:
        output.fact("left out", sentence, _LABEL)
    for finding in report.findings:
        output.fact("WRONG", f"{shown(finding.file)}: {finding.message}", _LABEL)
    output.conclude(_verdict(report), "bold red" if report.findings else "bold" if _sure(report) else "bold yellow")


@click.command("verify")
@click.argument("paths", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--key", type=click.Path(path_type=Path), help="The signer's public key, or an allowed_signers file.")
@click.option("--identity", metavar="NAME", help="Who of an allowed_signers file signs (megatron-fixes-release).")
@click.option("--allow-unsigned", is_flag=True, help="Check all but the signature where there is none, or no key.")
@json_option
def verify_command(
    paths: tuple[Path, ...], key: Path | None, identity: str | None, allow_unsigned: bool, as_json: bool
) -> int:
    """Check files of a release: signature, sums, manifest, provenance.

    FILE is a folder with a whole release, or files beside their SHA256SUMS and SHA256SUMS.sig.
    """
    from megatron_fixes.release.folder import left_out, read_files, read_release
    from megatron_fixes.release.signature import verify
    from megatron_fixes.release.verify import check

    if identity == "" or (identity and key is None):
        message = "got --identity with no name or without --key, expected a name in an allowed_signers file"
        raise UsageError(message, hint="Name the file with --key.")
    folder = paths[0] if len(paths) == 1 and paths[0].is_dir() else None
    files = read_release(folder) if folder else read_files(paths)
    chosen = None if folder else {path.name for path in paths}
    signed = None if key is None else lambda sums, sidecar: verify(sums, sidecar, key, identity)
    report = check(files, signed, chosen=chosen, allow_unsigned=allow_unsigned)
    if folder:
        report.unchecked += [f"{shown(name)}: not part of the release" for name in left_out(folder)]
    if as_json:
        output.print_json(_to_json(report, sorted(files)))
    else:
        _print(report)
    return 0 if report.good else 1
