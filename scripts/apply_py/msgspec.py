# SPDX-License-Identifier: Apache-2.0
"""Stands in for msgspec, which is compiled: as much of it as the journal, the matrix and the fingerprints use.

Structs are frozen dataclasses. Decoding is as strict as msgspec's: no value of another type, no missing field, no
unknown one where the struct forbids it, patterns and lengths as annotated. Encoding writes the same bytes. Not handled:
every other type; asking for one is an error.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import sys
import types
import typing
from json import JSONDecodeError, dumps, loads


class MsgspecError(Exception):
    """Base of the errors."""


class DecodeError(MsgspecError):
    """The text is no JSON."""


class ValidationError(DecodeError):
    """The text is JSON of another form."""


@dataclasses.dataclass(frozen=True)
class Meta:
    """What an annotation demands of a value."""

    pattern: str | None = None
    min_length: int = 0


class Struct:
    """Base of structs; the keywords of a subclass are msgspec's."""

    __forbid__ = False
    __omit__ = False

    def __init_subclass__(
        cls, *, frozen: bool = False, order: bool = False, forbid_unknown_fields: bool = False,
        kw_only: bool = False, omit_defaults: bool = False,
    ) -> None:  # fmt: skip
        """Make a dataclass of it; an empty dict as default is a new one each time."""
        for name in inspect.get_annotations(cls):
            if cls.__dict__.get(name) == {}:
                setattr(cls, name, dataclasses.field(default_factory=dict))
        dataclasses.dataclass(frozen=frozen, order=order, kw_only=kw_only)(cls)
        cls.__forbid__, cls.__omit__ = forbid_unknown_fields, omit_defaults


def _plain(value: object) -> object:
    if isinstance(value, Struct):
        fields = dataclasses.fields(value)  # type: ignore[arg-type]
        found = {field.name: getattr(value, field.name) for field in fields}
        if value.__omit__:
            found = {f.name: found[f.name] for f in fields if found[f.name] != f.default}
        return {name: _plain(item) for name, item in found.items()}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


@functools.cache
def _fields(cls: type) -> dict[str, tuple[object, bool]]:
    """A struct's fields: type, and whether it is required."""
    hints = typing.get_type_hints(cls, vars(sys.modules[cls.__module__]), include_extras=True)
    missing = dataclasses.MISSING
    return {
        field.name: (hints[field.name], field.default is missing and field.default_factory is missing)
        for field in dataclasses.fields(cls)
    }


def _name(value: object) -> str:
    names = {dict: "object", list: "array", type(None): "null"}
    return names.get(type(value), type(value).__name__)  # type: ignore[arg-type]


def _expect(good: bool, expected: str, value: object, path: str) -> None:
    if not good:
        raise ValidationError(f"Expected `{expected}`, got `{_name(value)}`" + (f" - at `${path}`" if path else ""))


def _convert(value: object, kind: object, path: str) -> object:
    origin = typing.get_origin(kind)
    if kind in (str, int, bool):
        _expect(type(value) is kind, kind.__name__, value, path)  # type: ignore[attr-defined]
        return value
    if isinstance(kind, type) and issubclass(kind, Struct):
        return _struct(value, kind, path)
    if origin is typing.Annotated:
        inner, meta = typing.get_args(kind)[:2]
        return _constrained(_convert(value, inner, path), meta, path)
    if origin is typing.Literal:
        choices = typing.get_args(kind)
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise ValidationError(f"Invalid value {value!r} - at `${path}`")
        return value
    if origin in (typing.Union, types.UnionType):
        inner = [part for part in typing.get_args(kind) if part is not type(None)]
        return None if value is None else _convert(value, inner[0], path)
    if origin is tuple:
        _expect(type(value) is list, "array", value, path)
        item = typing.get_args(kind)[0]
        if item is str and all(type(part) is str for part in value):  # type: ignore[attr-defined]
            return tuple(value)  # type: ignore[arg-type]
        return tuple(_convert(part, item, f"{path}[{at}]") for at, part in enumerate(value))  # type: ignore[arg-type]
    if origin is dict:
        _expect(type(value) is dict, "object", value, path)
        item = typing.get_args(kind)[1]
        return {key: _convert(part, item, f"{path}[...]") for key, part in value.items()}  # type: ignore[attr-defined]
    raise TypeError(f"got {kind!r}, which this stand-in for msgspec does not know")


def _constrained(value: object, meta: Meta, path: str) -> object:
    if meta.pattern is not None and not re.search(meta.pattern, value):  # type: ignore[call-overload]
        raise ValidationError(f"Expected `str` matching regex {meta.pattern!r} - at `${path}`")
    if len(value) < meta.min_length:  # type: ignore[arg-type]
        raise ValidationError(f"Expected at least {meta.min_length} - at `${path}`")
    return value


def _struct(value: object, kind: type[Struct], path: str) -> Struct:
    _expect(type(value) is dict, "object", value, path)
    fields = _fields(kind)
    found = {}
    for key, part in value.items():  # type: ignore[attr-defined]
        if key in fields:
            found[key] = _convert(part, fields[key][0], f"{path}.{key}")
        elif kind.__forbid__:
            raise ValidationError(f"Object contains unknown field `{key}`" + (f" - at `${path}`" if path else ""))
    for name, (_, required) in fields.items():
        if required and name not in found:
            raise ValidationError(f"Object missing required field `{name}`" + (f" - at `${path}`" if path else ""))
    return kind(**found)


def _no_constant(text: str) -> object:
    raise DecodeError(f"JSON is malformed: {text} is no value")


class json:
    """msgspec.json."""

    @staticmethod
    def decode(data: bytes, *, type: type[Struct]) -> Struct:
        """Read a struct from JSON."""
        try:
            return _struct(loads(data.decode("utf-8"), parse_constant=_no_constant), type, "")
        except (JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DecodeError(f"JSON is malformed: {error}") from None

    @staticmethod
    def encode(value: Struct) -> bytes:
        """Write a struct as JSON."""
        return dumps(_plain(value), ensure_ascii=False, separators=(",", ":")).encode("utf-8")

    @staticmethod
    def format(data: bytes, *, indent: int) -> bytes:
        """Indent JSON."""
        return dumps(loads(data), ensure_ascii=False, indent=indent).encode("utf-8")


class structs:
    """msgspec.structs."""

    replace = staticmethod(dataclasses.replace)
