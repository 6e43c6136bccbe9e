"""One entry of a trace: decoded for judging, and written again so that every viewer can take it.

Arguments pass through as text, so no number in them changes. Times are whole nanoseconds inside and microseconds with
three decimals outside. Names lose what viewers choke on: control and directional characters become visible escapes, and
a name of more than `MAX_NAME_CHARS` is cut.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal, InvalidOperation
from typing import Any

import msgspec

from stepscope.read.text import LATEST_NS, LONGEST_NS, clean

MAX_NAME_CHARS = 16_384  # the longest names of real kernels have six thousand
MAX_ARGUMENT_CHARS = 16_384
FLOWS = ("s", "t", "f")
_TIMED = frozenset(("X", "i", "I", "C", *FLOWS))
_SCOPES = ("g", "p", "t")
_US = 1000
# C0 and C1 controls, soft hyphen, zero-width and directional characters, line separators, byte-order mark
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]")
_ESCAPE = b"\\u"

DECODING_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class Entry(msgspec.Struct, gc=False):
    """An entry of traceEvents as it stands in the file; what may be of any type stays JSON text."""

    ph: Any = None
    cat: Any = None
    name: Any = None
    pid: msgspec.Raw = msgspec.Raw()
    tid: msgspec.Raw = msgspec.Raw()
    ts: msgspec.Raw = msgspec.Raw()
    dur: msgspec.Raw = msgspec.Raw()
    id: msgspec.Raw = msgspec.Raw()
    bp: Any = None
    s: Any = None
    args: msgspec.Raw = msgspec.Raw()

    @property
    def track(self) -> Track:
        """Process and thread as JSON text without quotes: writers of 2021 put the same thread as 7 and as "7"."""
        return bytes(self.pid).strip(b'"'), bytes(self.tid).strip(b'"')


Timed = tuple[Entry, int, int]
Track = tuple[bytes, bytes]
_DECODE: Callable[[bytes | msgspec.Raw], Entry] = msgspec.json.Decoder(Entry).decode
_ARGUMENTS: Callable[[bytes | msgspec.Raw], dict[str, msgspec.Raw]] = msgspec.json.Decoder(
    dict[str, msgspec.Raw]
).decode


def timed(raw: Iterable[bytes | msgspec.Raw], counts: Counter[str]) -> Iterator[Timed]:
    """Entry, start and duration (ns, as the file counts them) of all that can be exported, in file order.

    What has no usable name or time is counted as `lost`; other kinds of entries are passed over.
    """
    for data in raw:
        try:
            entry = _DECODE(data)
        except DECODING_ERRORS:
            counts["lost"] += 1
            continue
        phase = entry.ph
        if phase == "M":
            yield entry, 0, 0
        elif isinstance(phase, str) and phase in _TIMED:
            start = nanoseconds(bytes(entry.ts))
            duration = nanoseconds(bytes(entry.dur)) if phase == "X" else 0
            usable = start is not None and duration is not None and isinstance(entry.name, str)
            if usable and start <= LATEST_NS and duration <= LONGEST_NS:  # type: ignore[operator]
                yield entry, start, duration  # type: ignore[misc]
            else:
                counts["lost"] += 1


def nanoseconds(text: bytes) -> int | None:
    """Microseconds as JSON text, a number or a text of one, to nanoseconds without a float; None if it is none."""
    whole, _, decimals = text.partition(b".")
    if whole.isdigit() and len(whole) < 18:
        if not decimals:
            return int(whole) * _US
        if decimals.isdigit() and len(decimals) <= 3:
            return int(whole) * _US + int(decimals.ljust(3, b"0"))
    try:
        number = Decimal(text.decode().strip('"'))
    except (InvalidOperation, UnicodeDecodeError):
        return None
    if not number.is_finite() or number.adjusted() >= 20:
        return None
    result = int((number * _US).to_integral_value())
    return result if result >= 0 else None


def safe(text: str, limit: int = MAX_NAME_CHARS) -> str:
    """`text` as viewers can show it: at most `limit` characters, controls spelled out."""
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    return clean(
        _UNSAFE.sub(lambda one: f"\\x{ord(one[0]):02x}" if ord(one[0]) < 256 else f"\\u{ord(one[0]):04x}", text)
    )


def encoded(
    timed: Timed, base_ns: int, place: tuple[int, int], identifier: bytes, args: bytes, text: Callable[[str], bytes]
) -> bytes:
    """`timed` as JSON with its start relative to `base_ns`, in a process and thread.

    `identifier` is an arrow's id, `args` may be empty, `text` is `as_json`, which may remember: few texts are distinct.
    """
    entry, start, duration = timed
    parts = [
        b'{"ph":"%b"' % entry.ph.encode(),
        b',"cat":' + text(entry.cat) if isinstance(entry.cat, str) else b"",
        b',"name":' + text(entry.name),
        b',"pid":%d,"tid":%d,"ts":%d.%03d' % (*place, *divmod(start - base_ns, _US)),
    ]
    if entry.ph == "X":
        parts.append(b',"dur":%d.%03d' % divmod(duration, _US))
    elif entry.ph in FLOWS:
        parts.append(b',"id":' + identifier)
        if entry.bp == "e":
            parts.append(b',"bp":"e"')
    elif entry.s in _SCOPES:
        parts.append(b',"s":"%b"' % entry.s.encode())
    if args:
        parts.append(b',"args":' + args)
    return b"".join(parts) + b"}"


def as_json(text: str) -> bytes:
    """`text`, made safe, as JSON."""
    return msgspec.json.encode(safe(text))


def arguments(entry: Entry) -> bytes:
    """The arguments as compact JSON, empty where there are none to keep."""
    text = bytes(entry.args)
    if len(text) < 3:  # {}
        return b""
    try:
        if _ESCAPE in text or len(text) > MAX_ARGUMENT_CHARS:  # numbers beyond 64 bits become text
            return msgspec.json.encode(safe_value(msgspec.json.decode(text)))
        text = msgspec.json.format(text, indent=-1)
    except DECODING_ERRORS:
        return b""
    return text if text.startswith(b"{") and len(text) > 2 else b""


def renumbered_arguments(entry: Entry, keys: frozenset[str], number: Callable[[bytes], bytes]) -> bytes:
    """Like `arguments`, with the values under `keys` replaced by what `number` makes of them."""
    text = bytes(entry.args)
    try:
        values = _ARGUMENTS(text)
    except DECODING_ERRORS:
        return b""
    found = keys.intersection(values)
    if found:
        for key in found:
            values[key] = msgspec.Raw(number(bytes(values[key])))
        entry.args = msgspec.Raw(msgspec.json.encode(values))
    return arguments(entry)


def safe_value(value: Any) -> Any:
    """A decoded JSON value that can be encoded again and that viewers can show."""
    if isinstance(value, str):
        return safe(value, MAX_ARGUMENT_CHARS)
    if isinstance(value, list):
        return [safe_value(item) for item in value]
    if isinstance(value, dict):
        return {safe(key): safe_value(item) for key, item in value.items()}
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return str(value)
    return value
