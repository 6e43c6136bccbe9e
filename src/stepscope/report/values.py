"""Records of the analysis as JSON can carry them: dictionaries, lists, strings, numbers, booleans and None.

Non-finite numbers become null, lone surrogates escapes, long texts are cut: nothing here raises on odd content.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
from msgspec import Struct

from stepscope.report.escape import harmless_json

MAX_TEXT = 4_000  # characters of one string


def json_bytes(document: Any) -> bytes:
    """Indented UTF-8 JSON that ends in a line break; a terminal that shows it obeys nothing in it."""
    return harmless_json(msgspec.json.format(msgspec.json.encode(document), indent=1)) + b"\n"


def plain_rows(records: Iterable[Any], limit: int) -> list[dict[str, Any]]:
    return [plain_mapping(record) for _, record in zip(range(limit), records, strict=False)]


def plain_mapping(record: Any) -> dict[str, Any]:
    """A record or mapping, field by field."""
    if isinstance(record, Mapping):
        return {_string(str(key)): plain_value(item) for key, item in record.items()}
    return {name: plain_value(getattr(record, name)) for name in field_names(record)}


def is_record(value: Any) -> bool:
    return isinstance(value, Struct) or is_dataclass(value)


def field_names(record: Any) -> tuple[str, ...]:
    """The fields of a struct, or of a dataclass: those whose subclasses make a field when it is asked for are."""
    return record.__struct_fields__ if isinstance(record, Struct) else tuple(item.name for item in fields(record))


def plain_value(value: Any) -> Any:
    kind = value.__class__  # most are told by it, where asking each of the types below takes most of the time
    if kind is str:
        return value if len(value) <= MAX_TEXT and value.isascii() else _string(value)
    if value is None or kind is bool or (kind is int and -(2**63) < value < 2**63):
        return value
    if kind is tuple or kind is list:
        return [plain_value(item) for item in value]
    if isinstance(value, Struct):
        return {name: plain_value(getattr(value, name)) for name in value.__struct_fields__}
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, int):
        return int(value) if abs(value) < 2**63 else float(value) if abs(value) < 2**1023 else None
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping) or is_record(value):
        return plain_mapping(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain_value(item) for item in value]
    return _string(str(value))


def _string(text: str) -> str:
    if text.isascii():
        return text[:MAX_TEXT]
    return text[:MAX_TEXT].encode("utf-8", errors="backslashreplace").decode("utf-8")
