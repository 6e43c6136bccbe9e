"""Text from runs and traces, made harmless before it reaches a screen or a page.

Names in a run folder are untrusted: a file name may hold an escape sequence that clears the terminal, or a
right-to-left mark that shows one line and means another. Everything a renderer prints passes `plain`; it shows such
characters as escapes instead of obeying them. Rich markup is harmless because renderers build `rich.text.Text`, which
reads none; HTML is escaped on top by `markup`.

Records of the analysis as JSON can carry them: dictionaries, lists, strings, numbers, booleans and None.

Non-finite numbers become null, lone surrogates escapes, long texts are cut: nothing here raises on odd content.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
from msgspec import Struct

# C0 and C1 controls, soft hyphen, zero-width and directional characters, line and paragraph separators, byte-order
# mark, interlinear annotations, tag characters, and lone surrogates (which no encoder accepts)
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f\ud800-\udfff]"
)
LONGEST = 400  # characters of one name or sentence; longer ones are cut in the middle of nowhere useful


def _visible(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def visible(text: str) -> str:
    """`text` with control and directional characters shown as escapes."""
    return _UNSAFE.sub(_visible, text)


def plain(text: object, limit: int = LONGEST) -> str:
    """`text` on one line, control and directional characters shown as escapes, cut to `limit` characters."""
    value = str(text)
    if len(value) > limit:
        value = value[: limit - 1] + "…"
    elif value.isascii() and value.isprintable():  # nearly all of the thousands that a page has
        return value
    return visible(value.replace("\t", "    "))


def one_line(text: object, limit: int = 2000) -> str:
    """Like `plain`, but line breaks become spaces: for sentences that we wrote ourselves."""
    return plain(" ".join(str(text).split()), limit)


def harmless_json(data: bytes) -> bytes:
    """The same JSON, with such characters as escapes of its own; the encoder leaves those above ASCII as they are."""
    if data.isascii():
        return data
    text = data.decode("utf-8")
    return _UNSAFE.sub(lambda found: found[0] if found[0] < " " else json.dumps(found[0])[1:-1], text).encode("utf-8")


def markup(text: object, limit: int = LONGEST) -> str:
    """`text` ready for an HTML element or a quoted attribute."""
    return html.escape(plain(text, limit), quote=True)


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
