"""The second pass over a trace that is not valid JSON: find its events one by one and keep those that decode.

Causes seen in the field: a writer killed in the middle, unescaped quotes and backslashes in names, bytes of freed
memory, `NaN` and `inf`. Each candidate ends where the next begins, so one bad event costs itself alone.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple, TypeVar

import msgspec

from stepscope.read.text import clean_value

T = TypeVar("T")

_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_EVENT_START = re.compile(rb'[\[,]\s*(?=\{\s*")')
_NOT_A_NUMBER = re.compile(rb"(:\s*|[\[,]\s*)-?(?:inf|Infinity|nan|NaN|N/A)(?=\s*[,}\]])")
_STRAY_BACKSLASH = re.compile(rb'\\(?!["\\/bfnrtu])|\\u(?![0-9A-Fa-f]{4})')
MAX_EVENT_BYTES = 16 * 2**20


class Salvaged(NamedTuple):
    """The events that decoded, and how many candidates did not."""

    events: list[Any]
    lost: int


def events(data: bytes, event_type: type[T]) -> Salvaged:
    """All events of `data` that decode as `event_type`."""
    key = _EVENTS_KEY.search(data)
    # The match that finds the first event begins at the array's own bracket.
    position = key.end() - 1 if key else (len(data) - len(data.lstrip()))
    if not key and data[position : position + 1] != b"[":
        return Salvaged([], 0)
    starts = [match.end() for match in _EVENT_START.finditer(data, position)]
    decoder = msgspec.json.Decoder(event_type)
    found: list[Any] = []
    lost = 0
    index = 0
    while index < len(starts):
        end = starts[index + 1] if index + 1 < len(starts) else len(data)
        event = _decode(data[starts[index] : end], decoder)
        if event is None and index + 1 < len(starts):
            # The start between the two may have stood inside a text.
            after = starts[index + 2] if index + 2 < len(starts) else len(data)
            event = _decode_strict(data[starts[index] : after], decoder)
            index += event is not None
        if event is not None:
            found.append(event)
        elif b'"ph"' in data[starts[index] : end]:
            lost += 1
        index += 1
    return Salvaged(found, lost)


def metadata(data: bytes, keys: tuple[str, ...]) -> dict[str, Any]:
    """The values of the top-level `keys` that stand before or after the events of a damaged file."""
    result: dict[str, Any] = {}
    events_key = _EVENTS_KEY.search(data)
    head = data[: events_key.start()] if events_key else data[:0]
    for part in (head, data[max(len(head), len(data) - 2**20) :]):
        for key in keys:
            match = re.search(rb'"' + key.encode() + rb'"\s*:\s*', part)
            if match and key not in result:
                value = _first_value(part[match.end() : match.end() + 2**20])
                if value is not None:
                    result[key] = value
    return result


def _decode(chunk: bytes, decoder: Any) -> Any:
    if len(chunk) > MAX_EVENT_BYTES:
        return None
    event = _decode_strict(chunk, decoder)
    if event is not None:
        return event
    repaired = _STRAY_BACKSLASH.sub(rb"\\\g<0>", _NOT_A_NUMBER.sub(rb"\1null", chunk))
    value = _first_value(repaired)
    if not isinstance(value, dict):
        return None
    # Encoded again rather than converted: fields of raw JSON exist only in the decoder.
    return _decode_strict(msgspec.json.encode(value), decoder)


def _decode_strict(chunk: bytes, decoder: Any) -> Any:
    try:
        return decoder.decode(chunk.rstrip().removesuffix(b",").rstrip())
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _first_value(chunk: bytes) -> Any:
    """The JSON value `chunk` begins with, whatever follows it; None when there is none."""
    try:
        value, _ = json.JSONDecoder(strict=False, parse_constant=lambda _: None).raw_decode(
            chunk.decode("utf-8", "surrogateescape")
        )
        return clean_value(value)
    except (ValueError, RecursionError):
        return None
