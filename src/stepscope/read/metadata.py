"""The top-level metadata of a trace, an allow-list of it: real traces carry dumps of the environment with tokens.

Everything that is not named here is skipped by the decoder and never becomes an object. What is kept is bounded in
number and length.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from stepscope.read.lenient import first_value
from stepscope.read.text import clean, integer, number

METADATA_KEYS = (
    "schemaVersion",
    "baseTimeNanoseconds",
    "displayTimeUnit",
    "deviceProperties",
    "distributedInfo",
    "with_stack",
    "with_modules",
    "with_flops",
    "record_shapes",
    "profile_memory",
    "cuda_runtime_version",
    "cuda_driver_version",
    "cupti_version",
    "hip_runtime_version",
    "hip_driver_version",
    "roctracer_version",
)
_NESTED = {"deviceProperties", "distributedInfo"}
_MAX_DEVICES = 64
_MAX_RAW_BYTES = 2**22  # before nested parts are cut; the groups of thousands of ranks are long
_MAX_GROUPS_BYTES = 2**16
_MAX_TEXT_CHARS = 256
_DISTRIBUTED_KEYS = ("backend", "rank", "world_size", "pg_count", "pg_config", "nccl_version")

_Metadata = msgspec.defstruct("_Metadata", [(key, msgspec.Raw, msgspec.Raw()) for key in METADATA_KEYS])
_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Metadata)
_KEY = re.compile(rb'"(' + "|".join(METADATA_KEYS).encode() + rb')"\s*:\s*')


def read_metadata(head: bytes, tail: bytes) -> dict[str, Any]:
    """Allow-listed values of the text before the event list's bracket and of the text behind the closing one."""
    result: dict[str, Any] = {}
    for text, whole in ((head, head + b"[]}"), (tail, b'{"":[]' + tail)):
        if not text.strip():
            continue
        try:
            found = _DECODER.decode(whole)
            raws = {key: getattr(found, key) for key in METADATA_KEYS}
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raws = _search(text)
        for key, raw in raws.items():
            value = _value(key, raw) if raw else None
            if value is not None:
                result.setdefault(key, value)
    return result


def _search(text: bytes) -> dict[str, Any]:
    """The raw values of the keys in text that is no valid JSON."""
    found: dict[str, Any] = {}
    seen: set[str] = set()
    for match in _KEY.finditer(text):
        key = match[1].decode()
        if key in seen:
            continue
        seen.add(key)
        value = first_value(text[match.end() : match.end() + _MAX_RAW_BYTES])
        if value is not None:
            found[key] = msgspec.json.encode(value)
    return found


def _value(key: str, raw: Any) -> Any:
    if len(bytes(raw)) > _MAX_RAW_BYTES:
        return None
    value = first_value(bytes(raw))
    if key not in _NESTED:
        return clean(value)[:_MAX_TEXT_CHARS] if isinstance(value, str) else value if _is_figure(value) else None
    if key == "deviceProperties":
        devices = value if isinstance(value, list) else [value]
        return [_flat(device) for device in devices[:_MAX_DEVICES] if isinstance(device, dict)]
    if not isinstance(value, dict):
        return None
    return {name: value[name] for name in _DISTRIBUTED_KEYS if name in value and _bounded(name, value[name])}


def _bounded(name: str, value: Any) -> bool:
    """Whether a value of `distributedInfo` is of a size that everything downstream can carry."""
    if isinstance(value, list | dict):
        return name == "pg_config" and len(msgspec.json.encode(value)) <= _MAX_GROUPS_BYTES
    return not isinstance(value, str) or len(value) <= _MAX_GROUPS_BYTES


def _is_figure(value: Any) -> bool:
    """Whether it is a number that a column can hold, or a truth."""
    return isinstance(value, bool) or number(value) is not None


def _flat(device: dict[str, Any]) -> dict[str, Any]:
    """Numbers and short text of a device; nothing nested."""
    return {
        clean(name)[:_MAX_TEXT_CHARS]: clean(value)[:_MAX_TEXT_CHARS] if isinstance(value, str) else value
        for name, value in device.items()
        if isinstance(value, str) or _is_figure(value)
    }


def whole(value: Any) -> int | None:
    """An integer, also where a writer put it into text."""
    if type(value) is str and value.strip().removeprefix("-").isdecimal() and len(value) < 20:
        return integer(int(value))
    if type(value) is float and value.is_integer():
        return integer(int(value))
    return integer(value)


def rank_and_size(metadata: dict[str, Any]) -> tuple[int | None, int | None]:
    """The rank and the world size that `distributedInfo` gives."""
    info = metadata.get("distributedInfo") or {}
    rank, size = whole(info.get("rank")), whole(info.get("world_size"))
    return rank if rank is not None and 0 <= rank < 2**31 else None, size if size is not None and size > 0 else None
