"""What the readers of sampled stacks share: what a file says of itself, its lines, and its frames by their text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from stepscope.read.inflate import ByteStream, Limits
from stepscope.read.raw import Frame, FrameNames, Losses, RawStack
from stepscope.read.text import clean

Progress = Callable[[int], None]

SAMPLES = "samples"
MICROSECONDS = "us"
BYTES = "bytes"
MAX_COUNT_DIGITS = 15
MAX_SAMPLES = 10**15  # of one stack; sums of thousands of these still fit 64 bits
MAX_FRAMES = 20_000  # of one stack
MAX_DISTINCT_FRAMES = 500_000  # the largest projects have some ten thousand lines that call
MAX_FRAME_CHARS = 64 * 2**20
MAX_LINE_BYTES = 16 * 2**20
# Stacks repeat themselves, deep ones pack to a hundredth, and files may be long. What packs better than any of ours is
# read as far as costs some seconds.
LIMITS = Limits(unpacked_bytes=256 * 2**30, ratio_from_bytes=2**27)
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Stands for every frame beyond these bounds: a file of nothing but different frames must not fill the memory.
MORE_FRAMES = Frame("(more different frames than are kept)", "", None)

_LINE = re.compile(r":(-?[0-9]{1,9})\Z")


class FileSource:
    """A `StackSource` with what the beginning of its file tells: who wrote it, and whether waiting was sampled.

    `label` names the file in the losses. `idle` is None where nothing tells it.
    """

    format = ""

    def __init__(self, path: Path, label: str | None = None, *, tool: str = "unknown") -> None:
        self.path = path
        self.label = label or path.name
        self.tool = tool
        self.idle: bool | None = None
        self.unit = SAMPLES
        self.rate_hz: float | None = None
        self.wall_ns: int | None = None
        self.hints: dict[int, str] = {}

    def read(self, names: FrameNames, losses: Losses, progress: Progress | None = None) -> Iterator[RawStack]:
        """The stacks; see `StackSource`."""
        raise NotImplementedError


def count_of(digits: str) -> int | None:
    """The count at the end of a record, None where it is none."""
    if digits.isdigit() and digits.isascii() and len(digits) <= MAX_COUNT_DIGITS:
        return int(digits)
    return None


# ------------------------------------------------------------------------------------------------------------- lines


def read_lines(path: Path, label: str, losses: Losses, progress: Progress | None = None) -> Iterator[list[str]]:
    """Blocks of lines without their newlines, one block in memory whatever the file; an absent file has none.

    Bytes that are no UTF-8 become lone surrogates, as `os.fsdecode` makes them; only a newline ends a line. Counts
    `unreadable_files`, `cut_off_files` (packed, and damaged) and, for lines that are too long, `skipped_records`.
    """

    def told(consumed: int, _size: int) -> None:
        if progress is not None:
            progress(consumed)

    try:
        stream = ByteStream(path, LIMITS, told)
        splitter = _Splitter()
        for number, piece in enumerate(stream):
            yield splitter.add(piece if number else piece.removeprefix(BYTE_ORDER_MARK))
        yield splitter.last()
        losses.add("skipped_records", label, splitter.too_long)
        if stream.problem is not None:
            losses.add("cut_off_files", label)
    except FileNotFoundError:
        return
    except OSError:
        losses.add("unreadable_files", label)


class _Splitter:
    """Pieces of bytes to lines; what comes after a piece's last newline waits for the next piece."""

    def __init__(self) -> None:
        self.too_long = 0
        self._rest: list[bytes] = []
        self._held = 0

    def add(self, piece: bytes) -> list[str]:
        """The lines that `piece` ends."""
        cut = piece.rfind(b"\n")
        if cut < 0:
            self._held += len(piece)
            if self._held > MAX_LINE_BYTES:
                self._rest.clear()
            else:
                self._rest.append(piece)
            return []
        lines = self._lines(piece[:cut])
        self._rest = [piece[cut + 1 :]]
        self._held = len(self._rest[0])
        return lines

    def last(self) -> list[str]:
        """The line that no newline ends."""
        return self._lines(b"") if self._held else []

    def _lines(self, piece: bytes) -> list[str]:
        too_long = self._held > MAX_LINE_BYTES
        lines = b"".join((*self._rest, piece)).decode("utf-8", "surrogateescape").split("\n")
        if too_long:
            self.too_long += 1
            del lines[0]
        return lines


# ------------------------------------------------------------------------------------------------------------ frames


class FrameTexts:
    """Numbers of frames by their text, which `frame_of` takes apart once.

    `known` holds frames that are one piece between two semicolons, and nothing else.
    """

    def __init__(self, names: FrameNames, frame_of: Callable[[str], Frame]) -> None:
        self.known: dict[str, int] = {}
        self._odd: dict[str, int] = {}  # without a closing parenthesis, or with a semicolon inside
        self._names = names
        self._frame_of = frame_of
        self._files: dict[str, str] = {}
        self._chars = 0

    def frames(self, pieces: Sequence[str]) -> tuple[int, ...]:
        """Frames of the pieces between semicolons; a piece that does not end in a parenthesis goes on in the next."""
        frames: list[int] = []
        pending: list[str] = []
        last = len(pieces) - 1
        for index, piece in enumerate(pieces):
            closed = piece.endswith(")")
            if closed and not pending:
                frames.append(self.number(piece))
                continue
            pending.append(piece)
            if closed or index == last:
                frames.append(self._number(";".join(pending), self._odd))
                pending.clear()
        return tuple(frames)

    def number(self, piece: str) -> int:
        """The number of the frame that is all of `piece`."""
        return self._number(piece, self.known)

    def _number(self, text: str, known: dict[str, int]) -> int:
        number = known.get(text)
        if number is None:
            self._chars += len(text)
            if len(self.known) + len(self._odd) >= MAX_DISTINCT_FRAMES or self._chars > MAX_FRAME_CHARS:
                return self._names.number(MORE_FRAMES)
            function, file, line = self._frame_of(text)
            number = known[text] = self._names.number(Frame(function, self._files.setdefault(file, file), line))
        return number


def pyspy_frame(text: str) -> Frame:
    """Split `NAME (FILE:LINE)`; names and files may both hold parentheses, colons and spaces."""
    opening = _opening(text) if text.endswith(")") else -1
    if opening < 0:
        return Frame(clean(text), "", None)
    inside = text[opening + 2 : -1]
    match = _LINE.search(inside)
    file, line = (inside[: match.start()], int(match[1])) if match else (inside, None)
    return Frame(clean(text[:opening]), clean(file), line)


def _opening(text: str) -> int:
    """Where the ` (` stands that the last character closes; the last one when parentheses do not pair up."""
    last = text.rfind(" (")
    if text.find(" (") == last:
        return last
    depth = 0
    for index in range(len(text) - 1, 0, -1):
        if text[index] == ")":
            depth += 1
        elif text[index] == "(":
            depth -= 1
            if depth == 0:
                return index - 1 if text[index - 1] == " " else last
    return last
