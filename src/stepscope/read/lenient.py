"""Repair of a single event that is no valid JSON, and the first value of a text whatever follows it.

Causes seen in the field: unescaped backslashes and quotes in file names, bytes of freed memory in names, control
characters, `NaN`, `inf` and `N/A` without quotes, and a bracket that a killed writer did not reach.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from stepscope.read.text import clean_value

_BARE_WORD = re.compile(rb"([:\[,]\s*)[-+]?(?!true\b|false\b|null\b)[A-Za-z][\w/.#-]*(?=\s*[,}\]])")
_NUMBER_WORD = re.compile(rb"([:\[,]\s*)[-+]?(?:inf|Infinity|nan|NaN|N/A|1\.#\w+)(?=\s*[,}\]])")
_STRAY_BACKSLASH = re.compile(rb'\\(?!["\\/bfnrtu])|\\u(?![0-9A-Fa-f]{4})')
_STRING_PART = re.compile(rb'(?:[^"\\]|\\.)*', re.DOTALL)
_AFTER_STRING = re.compile(rb"\s*(?:[:,}\]]|\Z)")
_DECODER = json.JSONDecoder(strict=False, parse_constant=lambda _: None)


def first_value(text: bytes) -> Any:
    """The JSON value `text` begins with, whatever follows it, with all text cleaned; None when there is none."""
    try:
        value, _ = _DECODER.raw_decode(text.decode("utf-8", "surrogateescape").lstrip())
        return clean_value(value)
    except (ValueError, RecursionError):
        return None


def repaired(text: bytes) -> bytes | None:
    """`text`, an object, as valid JSON with the least change that makes it so; None when nothing helps."""
    return mended(text) or _first_object(_closed(_STRAY_BACKSLASH.sub(rb"\\\g<0>", text)))


def mended(text: bytes) -> bytes | None:
    """Like `repaired`, but only where `text` holds all of the object: no missing bracket is made up."""
    return _first_object(_candidates(_STRAY_BACKSLASH.sub(rb"\\\g<0>", text)))


def _first_object(candidates: Iterator[bytes]) -> bytes | None:
    for candidate in candidates:
        value = first_value(candidate)
        if isinstance(value, dict) and value:
            try:
                return msgspec.json.encode(value)
            except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
                return None
    return None


def _candidates(text: bytes) -> Iterator[bytes]:
    numbers = _NUMBER_WORD.sub(rb"\1null", text)
    yield numbers
    words = _BARE_WORD.sub(rb"\1null", text)
    if words != numbers:
        yield words
    quoted = _escape_quotes(text)
    yield quoted
    yield _BARE_WORD.sub(rb"\1null", quoted)


def _closed(text: bytes) -> Iterator[bytes]:
    numbers = _NUMBER_WORD.sub(rb"\1null", text)
    for closing in (b"}", b"}}", b"]}", b"]}}"):
        yield numbers.rstrip().rstrip(b",") + closing


def _escape_quotes(text: bytes) -> bytes:
    """Escape quotes that cannot end their string because neither a colon, a comma nor a bracket follows."""
    parts: list[bytes] = []
    position = 0
    inside = False
    while True:
        quote = text.find(b'"', position)
        if inside:
            match = _STRING_PART.match(text, position)
            quote = match.end() if match else -1
        if quote < 0 or quote >= len(text):
            parts.append(text[position:])
            return b"".join(parts)
        stray = inside and not _AFTER_STRING.match(text, quote + 1)
        parts.append(text[position:quote] + (b'\\"' if stray else b'"'))
        inside = not inside or stray
        position = quote + 1
