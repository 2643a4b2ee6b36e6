# SPDX-License-Identifier: Apache-2.0
"""Where the distribution's own files are: beside the package in a checkout, inside it in a wheel.

Not handled: zipped installs; the patches must be real files so that plain ``git apply`` can be pointed at them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from megatron_fixes.errors import DataError

_PACKAGE = Path(__file__).resolve().parent.parent


def data_root() -> Path:
    """The folder that holds ``patches/`` and ``compat_matrix.yaml``.

    Raises:
        DataError: Neither a wheel's ``_data`` nor a checkout was found.
    """
    for root in (_PACKAGE / "_data", _PACKAGE.parent):
        if (root / "compat_matrix.yaml").is_file() and (root / "patches").is_dir():
            return root
    raise DataError(
        "found neither patches/ nor compat_matrix.yaml, expected them in the wheel or in the checkout",
        context=str(_PACKAGE),
        hint="Reinstall megatron-fixes.",
    )


def with_this_package(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables by which a child process finds this very package: a checkout goes first, an installed one is found."""
    variables, checkout = dict(environ), _PACKAGE.parent
    if (checkout / "compat_matrix.yaml").is_file():
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(checkout), environ.get("PYTHONPATH", ""))))
    return variables


def patches_root() -> Path:
    """The folder with one folder a line."""
    return data_root() / "patches"


def matrix_path() -> Path:
    """The one file where ranges of releases are written."""
    return data_root() / "compat_matrix.yaml"


def fingerprints_path() -> Path:
    """The generated table of known functions."""
    return _PACKAGE / "catalog" / "fingerprints.json"


def compiled_matrix_path() -> Path:
    """The same matrix as generated JSON, for where a YAML parser would cost too much."""
    return _PACKAGE / "catalog" / "matrix.json"
