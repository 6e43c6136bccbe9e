"""The event list of a trace, cut into stretches of whole events while the bytes come in.

A stretch ends at the last `},{` of the buffer. Braces also occur in texts and nested arguments, so the decoder decides:
where it finds the text cut short, the cut was wrong and an earlier one or more bytes are taken; where it finds
something behind a closing bracket, the list ended there; anything else is damage and goes to `salvage`.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from stepscope.read.inflate import Limits
from stepscope.read.salvage import DAMAGE, TRUNCATED, Decode, salvage, trailing_offset

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

    # ------------------------------------------------------------------------------------------------ around the list

    def _find_list(self) -> bytes | None:
        """Read up to the list's beginning; returns what was read of the list itself, None if there is none."""
        buffer = b""
        for piece in self._pieces:
            buffer += piece
            match = _ROOT_LIST.match(buffer) or _LIST.search(buffer)
            if match:
                self.head = buffer[: match.end()]
                return buffer[match.end() :]
            if len(buffer) > self._limits.metadata_bytes or (len(buffer) > 4096 and not _looks_like_json(buffer)):
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

    # ------------------------------------------------------------------------------------------------------ the list

    def _list(self, buffer: bytes) -> Iterator[list[Any]]:
        """Cut and decode until the list is closed or the bytes end; then `tail` is what follows the bracket."""
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
        """`buffer` and what comes in until it is `wanted` long, and whether it became so."""
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
        """Decode the front of `buffer` up to a cut; returns what is left of it."""
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
        """Offsets of commas that may stand between two events, from the last backwards, a few."""
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
        if not found:
            for match in self._any_cuts(buffer)[: -_TRIES - 1 : -1]:
                self._learn(buffer[match.end() - 1 : match.end() + 64])
                yield match.start(1)

    def _any_cuts(self, buffer: bytes) -> list[re.Match[bytes]]:
        """What looks like the border of two events near the end of `buffer`, where events begin in many ways."""
        found: list[re.Match[bytes]] = []
        for size in (*_NEAR_BYTES, self._limits.piece_bytes):
            found = list(_ANY_CUT.finditer(buffer, max(0, len(buffer) - size)))
            if len(found) >= _TRIES:
                break
        return found

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
        found = salvage(text, self._decode, self._limits.event_bytes)
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


def _looks_like_json(buffer: bytes) -> bool:
    return buffer.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] in (b"{", b"[", b"")
