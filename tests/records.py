"""Records of the model, whether structs or dataclasses."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def replace(record: T, **changes: Any) -> T:
    """A copy of `record` in which `changes` are the values of those fields."""
    of_its_kind: Any = dataclasses.replace if dataclasses.is_dataclass(record) else msgspec.structs.replace
    changed: T = of_its_kind(record, **changes)
    return changed


def some(value: T | None) -> T:
    """A value that must be there."""
    assert value is not None
    return value


def blank(kind: type[T], /, **known: Any) -> T:
    """A record of which nothing but `known` is: its other fields are None."""
    return kind(**{**dict.fromkeys(annotated(kind)), **known})


def annotated(kind: type) -> dict[str, str]:
    """The fields of a record, and their types as they are written; none of another class."""
    if dataclasses.is_dataclass(kind):
        return {field.name: str(field.type) for field in dataclasses.fields(kind)}
    written = {
        name: str(text)
        for base in reversed(kind.__mro__)
        for name, text in vars(base).get("__annotations__", {}).items()
    }
    return {name: written[name] for name in getattr(kind, "__struct_fields__", ())}
