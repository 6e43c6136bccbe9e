"""The event list of a trace, cut into stretches of whole events while the bytes come in.

A stretch ends at the last `},{` of the buffer. Braces also occur in texts and nested arguments, so the decoder decides:
where it finds the text cut short, the cut was wrong and an earlier one or more bytes are taken; where it finds
something behind a closing bracket, the list ended there; anything else is damage and goes to `salvage`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import msgspec

from stepscope.read.streams import BYTE_ORDER_MARK, Limits
from stepscope.read.text import clean_value

CUT_OFF = "it is cut off, or the end of its event list is damaged"
DAMAGED = "it is not valid JSON; damaged events were read one by one"
OUTSIDE = "events stand outside the event list"
HEADLESS = "the beginning of its event list is missing"

_LIST = re.compile(rb'"traceEvents"\s*:\s*(?=[\[{])\[?')
_ROOT_LIST = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[")
_EVENT = re.compile(rb'\{\s*"(?:ph|[^"\\]{1,20}"\s*:\s*[^{}\[\]"]{0,200},\s*"ph)"\s*:\s*"')
_CLOSED = re.compile(rb"[\s,]*\]")
_FIRST_KEY = re.compile(rb'\s*(\{\s*"[^"\\]{1,40}")')
_ANY_CUT = re.compile(rb"\}\s*(,)\s*\{")
_TRIES = 3  # cuts that are tried before more bytes are read
_NEAR_BYTES = (2**12, 2**16)  # of the end of a buffer: a dozen events, and a few hundred
_MAX_LOOKS = 2000  # places that look like the beginning of an event, and are looked at for a cut

Stretch = Generator[list[Any], None, bytes]  # yields decoded events, returns what is left of the buffer


class Frames:
    """Decoded stretches of one trace; take all of `batches()`, then the rest is known.

    `head` is the text before the events, with the list's bracket; `tail` what follows the closing bracket.
    """

    def __init__(self, pieces: Iterable[bytes], decode: Decode, limits: Limits) -> None:
        self.head = b""
        self.tail = b""
        self.repaired = 0
        self.lost = 0
        self.problems: list[str] = []
        self.complete = False  # the list's closing bracket was seen
        self._pieces = iter(pieces)
        self._decode = decode
        self._limits = limits
        self._first_key = b""

    def batches(self) -> Iterator[list[Any]]:
        """Events of the list in order, a stretch at a time."""
        buffer = self._find_list()
        while buffer is not None:
            yield from self._list(buffer)
            buffer = self._after_list() if self.complete else None
        if not self.complete and self.head:
            self._say(CUT_OFF)

    def _say(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    def _find_list(self) -> bytes | None:
        buffer = b""
        for piece in self._pieces:
            buffer += piece
            match = _ROOT_LIST.match(buffer) or _LIST.search(buffer)
            if match:
                self.head = buffer[: match.end()]
                return buffer[match.end() :]
            begin = buffer.removeprefix(BYTE_ORDER_MARK).lstrip()[:1]
            if len(buffer) > self._limits.metadata_bytes or (len(buffer) > 4096 and begin not in (b"{", b"[", b"")):
                break
        match = _EVENT.search(buffer)
        if match is None:
            return None
        self._say(HEADLESS)
        self.head = buffer[: match.start()] + b"["
        return buffer[match.start() :]

    def _after_list(self) -> bytes | None:
        """Read the metadata behind the list; returns text that begins with an event if there is one after all."""
        buffer = self.tail
        self.tail = b""
        searched = 0
        while True:
            match = _EVENT.search(buffer, searched)
            if match:
                self._say(OUTSIDE)
                self.complete = False
                self.tail = buffer[: match.start()]
                return buffer[match.start() :]
            searched = max(0, len(buffer) - 400)
            piece = next(self._pieces, b"")
            if not piece or len(buffer) > self._limits.metadata_bytes:
                self.tail = buffer
                return None
            buffer += piece

    def _list(self, buffer: bytes) -> Iterator[list[Any]]:
        wanted = self._limits.piece_bytes
        while not self.complete:
            buffer, more = self._filled(buffer, wanted)
            if not more:
                yield from self._last(buffer)
                return
            rest = yield from self._stretch(buffer)
            # Where nothing could be taken, wait for twice as much: tries must not grow with the square.
            wanted = len(rest) + self._limits.piece_bytes if len(rest) < len(buffer) else 2 * len(buffer)
            buffer = rest
            if len(buffer) > self._limits.event_bytes:
                buffer = yield from self._give_up(buffer)
                wanted = self._limits.piece_bytes

    def _filled(self, buffer: bytes, wanted: int) -> tuple[bytes, bool]:
        parts = [buffer]
        size = len(buffer)
        while size < wanted:
            piece = next(self._pieces, b"")
            if not piece:
                return b"".join(parts), False
            parts.append(piece)
            size += len(piece)
        return b"".join(parts), True

    def _stretch(self, buffer: bytes) -> Stretch:
        for cut in self._cuts(buffer):
            try:
                events = self._decode(b"".join((b"[", memoryview(buffer)[:cut], b"]")))  # one copy instead of two
            except DAMAGE as error:
                if TRUNCATED in str(error):
                    continue
                offset = trailing_offset(error)
                if offset is not None:
                    return (yield from self._close(buffer, offset - 1))
                return (yield from self._salvage(buffer[:cut], buffer[cut + 1 :]))
            yield events
            return buffer[cut + 1 :]
        return buffer

    def _cuts(self, buffer: bytes) -> Iterator[int]:
        if not self._first_key:
            self._learn(buffer)
        found = 0
        position = len(buffer)
        near = max(0, len(buffer) - _NEAR_BYTES[-1])
        for _ in range(_MAX_LOOKS):
            position = buffer.rfind(self._first_key, near, position)
            if position <= 0 or found == _TRIES:
                break
            before = buffer[max(0, position - 64) : position].rstrip()
            if before.endswith(b",") and before[:-1].rstrip().endswith(b"}"):
                found += 1
                yield max(0, position - 64) + len(before) - 1
        if found:
            return
        # What looks like the border of two events near the end, where events begin in many ways.
        borders: list[re.Match[bytes]] = []
        for size in (*_NEAR_BYTES, self._limits.piece_bytes):
            borders = list(_ANY_CUT.finditer(buffer, max(0, len(buffer) - size)))
            if len(borders) >= _TRIES:
                break
        for match in borders[: -_TRIES - 1 : -1]:
            self._learn(buffer[match.end() - 1 : match.end() + 64])
            yield match.start(1)

    def _learn(self, buffer: bytes) -> None:
        """How this writer begins an event: the next ones mostly begin alike, which is what is looked for."""
        match = _FIRST_KEY.match(buffer)
        self._first_key = match[1] if match else b"{"

    def _close(self, buffer: bytes, offset: int) -> Stretch:
        """The decoder took a whole list and found more at `offset` of `buffer`: there the list ends."""
        bracket = buffer.rfind(b"]", 0, offset)
        try:
            events = self._decode(b"[" + buffer[:bracket] + b"]")
        except DAMAGE:
            return (yield from self._salvage(buffer, b""))
        self._end(buffer[bracket + 1 :])
        yield events
        return b""

    def _end(self, tail: bytes) -> None:
        self.complete = True
        self.tail = tail

    def _salvage(self, text: bytes, rest: bytes, *, last: bool = False) -> Stretch:
        found = _Salvage(text, self._decode, self._limits.event_bytes)
        self.repaired += found.repaired
        self.lost += found.lost
        if not last or found.repaired or found.lost > 1 or found.end is not None:
            self._say(DAMAGED)
        yield from found.stretches
        if found.end is None:
            return rest
        self._end(text[found.end :] + (b"," + rest if rest else b""))
        return b""

    def _give_up(self, buffer: bytes) -> Stretch:
        """Too much without a cut: take what decodes and drop the rest, of which one event at least is lost."""
        if not buffer.strip():
            return b""
        lost = self.lost
        yield from self._salvage(buffer, b"")
        self.lost = max(self.lost, lost + (not self.complete))
        return b""

    def _last(self, buffer: bytes) -> Iterator[list[Any]]:
        """The bytes ended in the list: its last events, its end and the metadata, or the place where it was cut."""
        if _CLOSED.match(buffer):
            self._end(buffer[buffer.index(b"]") + 1 :])
            return
        if not buffer.strip():
            return
        try:
            events = self._decode(b"[" + buffer + b"]")
        except DAMAGE as error:
            offset = trailing_offset(error)
            if offset is not None:
                yield from self._close(buffer, offset - 1)
                return
        else:
            yield events
            return
        yield from self._salvage(buffer, b"", last=True)
        if not self.complete:  # a damaged last event hides the end of the list, but the metadata may be behind it
            if not self._first_key:
                self._learn(buffer)
            self.tail = buffer[max(0, buffer.rfind(self._first_key)) :]


Decode = Callable[[bytes], list[Any]]

DAMAGE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
TRUNCATED = "truncated"

_START = re.compile(rb"(?:\A|[\[,}])\s*(?=\{)")
_PHASE = re.compile(rb'"ph"\s*:')
_REMAINS = re.compile(rb'"ph|ph"\s*:|"ts"\s*:')  # of an event whose phase may be what was damaged
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")
_MAX_BATCH = 4096
_MAX_REPAIRED_BYTES = 2**18  # the repair is a few passes of Python over each quote
_MORE_JOINED = 4  # of them that a repair looks at behind the place where the damage showed
_MAX_JOINED = 16  # candidate starts that one event may hold in its texts or nested arguments


def trailing_offset(error: Exception) -> int | None:
    """Where the decoder found text behind a whole value, or None if that was not its complaint."""
    match = _TRAILING.search(str(error))
    return int(match[1]) - 1 if match else None  # it counts the byte that it had just taken


class _Salvage:
    """What can be decoded of `text`, events separated by commas: `stretches` of one type each, in file order.

    `repaired` events needed a repair, `lost` ones went. `end` is behind the list's closing bracket, None where it goes
    on.
    """

    def __init__(self, text: bytes, decode: Decode, max_event_bytes: int) -> None:
        self.text = text
        self.decode = decode
        self.max_event_bytes = max_event_bytes
        self.starts = [match.end() for match in _START.finditer(text)]
        self.stretches: list[list[Any]] = []
        self.repaired = 0
        self.lost = len(_PHASE.findall(text, 0, self.starts[0] if self.starts else len(text)))
        self.end: int | None = None
        index = 0
        size = 256
        while index < len(self.starts) and self.end is None:
            if size == 1:
                index = self._single(index)
                size = 2
                continue
            count = min(size, len(self.starts) - index)
            if self._decoded(self._slice(index, count)):
                index += count
                size = min(size * 2, _MAX_BATCH)
            else:
                size = max(1, count // 4)

    def _decoded(self, text: bytes) -> bool:
        try:
            events = self.decode(b"[" + text + b"]")
        except DAMAGE:
            return False
        self._take(events)
        return True

    def _take(self, events: list[Any]) -> None:
        if events and self.stretches and type(self.stretches[-1][0]) is type(events[0]):
            self.stretches[-1] += events
        elif events:
            self.stretches.append(events)

    def _slice(self, index: int, count: int) -> bytes:
        stop = self.starts[index + count] if index + count < len(self.starts) else len(self.text)
        return self.text[self.starts[index] : stop].rstrip().removesuffix(b",")

    def _single(self, index: int) -> int:
        """Take the event that begins at candidate `index`; returns the next candidate."""
        count = 1
        for count in range(1, min(_MAX_JOINED, len(self.starts) - index) + 1):
            text = self._slice(index, count)
            if len(text) > self.max_event_bytes:
                break
            try:
                events = self.decode(b"[" + text + b"]")
                # A start inside a lost event's nested arguments decodes too, but is no event.
                self._take(events if _PHASE.search(text) else [])
                return index + count
            except DAMAGE as error:
                if TRUNCATED in str(error):
                    continue
                if self._with_rest(index, text):
                    return index + count
                break
        text = self._slice(index, 1)
        if text.count(b"{") > text.count(b"}"):  # it seems to go on behind a nested object
            for joined in range(count, min(count + _MORE_JOINED, len(self.starts) - index + 1)):
                if self._take_mended(self._slice(index, joined), close=False):
                    return index + joined
        if not self._take_mended(text, close=True):
            self.lost += _REMAINS.search(text) is not None
        return index + 1

    def _with_rest(self, index: int, text: bytes) -> bool:
        """Take a whole event that something else follows: the end of the list, or leavings of a damaged one."""
        try:
            msgspec.json.decode(text)
            return False
        except DAMAGE as error:
            offset = trailing_offset(error)
        if offset is None:
            return False
        if not self._decoded(text[:offset]):
            return False
        rest = text[offset:].lstrip(b", \t\r\n")
        if rest.startswith(b"]"):
            self.end = self.starts[index] + len(text) - len(rest) + 1
        else:
            self.lost += len(_PHASE.findall(rest))
        return True

    def _take_mended(self, text: bytes, *, close: bool) -> bool:
        fixed = _mended(text, close=close) if len(text) <= _MAX_REPAIRED_BYTES else None
        done = fixed is not None and _PHASE.search(fixed) is not None and self._decoded(fixed)
        self.repaired += done
        return done


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


def _mended(text: bytes, *, close: bool) -> bytes | None:
    """`text`, an object, as valid JSON by the least change; no bracket is made up without `close`. None when nothing
    helps.
    """
    for candidate in _candidates(_STRAY_BACKSLASH.sub(rb"\\\g<0>", text), close=close):
        value = first_value(candidate)
        if isinstance(value, dict) and value:
            try:
                return msgspec.json.encode(value)
            except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
                continue
    return None


def _candidates(text: bytes, *, close: bool) -> Iterator[bytes]:
    numbers = _NUMBER_WORD.sub(rb"\1null", text)
    yield numbers
    yield _BARE_WORD.sub(rb"\1null", text)
    quoted = _escape_quotes(text)
    yield quoted
    yield _BARE_WORD.sub(rb"\1null", quoted)
    for closing in (b"}", b"}}", b"]}", b"]}}") if close else ():
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
