# SPDX-License-Identifier: Apache-2.0
"""Which modules patches touch, read from the catalogue's generated tables without the catalogue's machinery.

A training process that finds its decision in the cache needs no more than this; ``catalog`` and what it imports are
loaded only to decide anew.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass

from megatron_fixes import __version__
from megatron_fixes.config import ALL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_CATALOG = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "catalog")


@dataclass(frozen=True)
class Tables:
    """What is known before anything of the target is looked at.

    Attributes:
        paths: Dotted name of every touched module to its file below a root.
        touches: Fix to the files it touches.
        digest: Names this version with its tables.
    """

    paths: dict[str, str]
    touches: dict[str, tuple[str, ...]]
    digest: str


def load_tables() -> Tables:
    """Read them.

    Raises:
        OSError, ValueError, KeyError: The distribution is damaged.
    """
    contents = []
    for name in ("fingerprints.json", "matrix.json"):
        with open(os.path.join(_CATALOG, name), "rb") as file:
            contents.append(file.read())
    functions: dict[str, list[str]] = json.loads(contents[0])["touches"]
    touches = {fix: tuple(sorted({name.split("::")[0] for name in names})) for fix, names in functions.items()}
    paths = {module_name(path): path for files in touches.values() for path in files}
    digest = hashlib.sha256(b"".join(hashlib.sha256(content).digest() for content in contents)).hexdigest()
    return Tables(paths, touches, f"{__version__} {digest}")


def ids_of(asked: Sequence[str], tables: Tables) -> tuple[str, ...]:
    """What was asked for, with ids in place of slugs; a name that is no fix's stays.

    Raises:
        OSError, ValueError, KeyError: The distribution is damaged.
    """
    if all(word == ALL or word in tables.touches for word in asked):
        return tuple(asked)
    # Here and not above: a start that finds all in the cache loads nothing of this room.
    from megatron_fixes.patching.ids import id_of

    with open(os.path.join(_CATALOG, "matrix.json"), "rb") as file:
        slugs = {fix: row["slug"] for fix, row in json.load(file)["fixes"].items()}
    return tuple(dict.fromkeys(id_of(word, slugs) for word in asked))


def module_name(path: str) -> str:
    """The dotted name that a file below a root is imported by."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
