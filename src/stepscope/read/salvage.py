"""The tolerant pass over a stretch of an event list that the decoder refused: one bad event costs itself alone.

Good events are taken in batches that shrink at trouble and grow again behind it, so that a stretch with one bad event
costs little more than a sound one, and a stretch of nothing but damage ends in time that is linear in its length.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from stepscope.read.lenient import mended, repaired

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


class Salvaged(NamedTuple):
    """Stretches of events in file order, each of one type; `repaired` events needed a repair, `lost` ones went.

    `end` is the offset behind the list's closing bracket, or None where the list goes on.
    """

    stretches: list[list[Any]]
    repaired: int
    lost: int
    end: int | None


def trailing_offset(error: Exception) -> int | None:
    """Where the decoder found text behind a whole value, or None if that was not its complaint."""
    match = _TRAILING.search(str(error))
    return int(match[1]) - 1 if match else None  # it counts the byte that it had just taken


def salvage(text: bytes, decode: Decode, max_event_bytes: int) -> Salvaged:
    """Decode what can be decoded of `text`, events separated by commas; `decode` takes a whole JSON array."""
    return _Salvage(text, decode, max_event_bytes).run()


class _Salvage:
    def __init__(self, text: bytes, decode: Decode, max_event_bytes: int) -> None:
        self.text = text
        self.decode = decode
        self.max_event_bytes = max_event_bytes
        self.starts = [match.end() for match in _START.finditer(text)]
        self.stretches: list[list[Any]] = []
        self.repaired = 0
        self.lost = 0
        self.end: int | None = None

    def run(self) -> Salvaged:
        index = 0
        size = 256
        first = self.starts[0] if self.starts else len(self.text)
        self.lost += len(_PHASE.findall(self.text, 0, first))
        while index < len(self.starts) and self.end is None:
            if size == 1:
                index = self._single(index)
                size = 2
                continue
            count = min(size, len(self.starts) - index)
            if self._batch(index, count):
                index += count
                size = min(size * 2, _MAX_BATCH)
            else:
                size = max(1, count // 4)
        return Salvaged(self.stretches, self.repaired, self.lost, self.end)

    def _take(self, events: list[Any]) -> None:
        if events and self.stretches and type(self.stretches[-1][0]) is type(events[0]):
            self.stretches[-1] += events
        elif events:
            self.stretches.append(events)

    def _slice(self, index: int, count: int) -> bytes:
        stop = self.starts[index + count] if index + count < len(self.starts) else len(self.text)
        return self.text[self.starts[index] : stop].rstrip().removesuffix(b",")

    def _batch(self, index: int, count: int) -> bool:
        try:
            self._take(self.decode(b"[" + self._slice(index, count) + b"]"))
        except DAMAGE:
            return False
        return True

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
                if self._take_fixed(mended, self._slice(index, joined)):
                    return index + joined
        if not self._take_fixed(repaired, text):
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
        try:
            self._take(self.decode(b"[" + text[:offset] + b"]"))
        except DAMAGE:
            return False
        rest = text[offset:].lstrip(b", \t\r\n")
        if rest.startswith(b"]"):
            self.end = self.starts[index] + len(text) - len(rest) + 1
        else:
            self.lost += len(_PHASE.findall(rest))
        return True

    def _take_fixed(self, fix: Callable[[bytes], bytes | None], text: bytes) -> bool:
        fixed = fix(text) if len(text) <= _MAX_REPAIRED_BYTES else None
        if fixed is None or not _PHASE.search(fixed):
            return False
        try:
            self._take(self.decode(b"[" + fixed + b"]"))
        except DAMAGE:
            return False
        self.repaired += 1
        return True
