"""Plain and gzip files as pieces or lines of bounded size, whole small ones, JSON lines, and the files of a folder.

What can be unpacked of a cut-off or damaged file is handed out, with the damage beside it. A file that unpacks to more
than the limits allow stops there: a few megabytes of gzip can hold terabytes. Of JSON lines, whose writer may be killed
at any moment, a last line without its newline that does not parse is torn: dropped and counted. Any other line that
does not parse is bad: skipped and counted.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from isal import isal_zlib
from msgspec import Struct

from stepscope.errors import UnreadableInputError, readable
from stepscope.files import open_regular
from stepscope.read.raw import Losses, Progress, Row
from stepscope.read.text import clean_value

HEAD_BYTES = 65_536
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
MAX_WHOLE_BYTES = 2**30
MAX_DEPTH = 8  # of folders below the given one
PIECE_BYTES = 2**19  # what it decodes to fits the processor's cache; with less, what is done once a piece shows
_PACKED_BYTES = 2**16
_UNPACKED_BYTES = 2**17
GZIP = b"\x1f\x8b"
_WINDOW_BITS = 31  # zlib's way to say: a gzip header is expected
_ENDINGS = (".gz", ".json", ".raw", ".pickle", ".pkl", ".html")


class Limits(Struct, frozen=True):
    """Bounds for one file. Real traces pack to a twentieth or thirtieth; gzip can pack to a thousandth."""

    unpacked_bytes: int = 20 * 2**30
    ratio: float = 200.0  # unpacked over packed, once `ratio_from_bytes` are unpacked
    ratio_from_bytes: int = 32 * 2**20
    barren_bytes: int = 64 * 2**20  # a file without an event in its first bytes is none of ours
    event_bytes: int = 16 * 2**20  # a longer one is lost
    metadata_bytes: int = 16 * 2**20  # of what stands before, and of what stands after the events
    piece_bytes: int = PIECE_BYTES


class ByteStream:
    """The unpacked bytes of `path`. `problem` says why they are not all of the file's, else None.

    Opening and iterating may raise OSError.
    """

    def __init__(self, path: Path, limits: Limits, progress: Progress | None = None) -> None:
        self.problem: str | None = None
        self._path = path
        self._limits = limits
        self._progress = progress
        self._consumed = 0
        self._size = path.stat().st_size

    def __iter__(self) -> Iterator[bytes]:
        with open_regular(self._path, follow=True) as file:
            packed = file.read(2) == GZIP
            file.seek(0)
            unpacked = 0
            plain = iter(partial(self._read, file, self._limits.piece_bytes), b"")
            for piece in self._inflate(file) if packed else plain:
                unpacked += len(piece)
                if unpacked > self._limits.unpacked_bytes:
                    keep = len(piece) - (unpacked - self._limits.unpacked_bytes)
                    self.problem = f"it holds more than {_size(self._limits.unpacked_bytes)}; the rest was left unread"
                    yield piece[:keep]
                    return
                if unpacked > self._limits.ratio_from_bytes and unpacked > self._limits.ratio * self._consumed:
                    self.problem = (
                        f"it unpacks to more than {self._limits.ratio:.0f} times its size; what lies behind the first "
                        f"{_size(unpacked)} was left unread"
                    )
                    return
                yield piece

    def _read(self, file: BinaryIO, size: int) -> bytes:
        data = file.read(size)
        self._consumed += len(data)
        if self._progress is not None:
            self._progress(self._consumed, self._size)
        return data

    def _inflate(self, file: BinaryIO) -> Iterator[bytes]:
        """Small pieces, as damage costs all of the call that meets it."""
        unpacked_bytes = min(_UNPACKED_BYTES, self._limits.piece_bytes)
        stream = isal_zlib.decompressobj(wbits=_WINDOW_BITS)
        packed = b""
        while True:
            packed = packed or self._read(file, _PACKED_BYTES)
            if not packed:
                if not stream.eof:
                    self.problem = "the compressed file ends too early"
                return
            try:
                part = stream.decompress(packed, unpacked_bytes)
            except isal_zlib.error:  # type: ignore[misc]  # its stub calls the class an instance
                self.problem = "the compressed data is damaged"
                return
            if part:
                yield part
            packed = stream.unconsumed_tail
            if stream.eof:  # another gzip member may follow
                packed = stream.unused_data or self._read(file, _PACKED_BYTES)
                if not packed.startswith(GZIP):
                    return
                stream = isal_zlib.decompressobj(wbits=_WINDOW_BITS)


def _size(count: int) -> str:
    return f"{count / 2**30:.0f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def read_head(path: Path, size: int = HEAD_BYTES) -> bytes:
    """The first bytes of a file after unpacking; raises OSError."""
    with open_regular(path, follow=True) as file:
        data = file.read(size)
    return unpacked(data, size) if data.startswith(GZIP) else data


def unpacked(data: bytes, size: int) -> bytes:
    """At most `size` bytes of what the beginning of a gzip file holds; nothing where it is damaged."""
    try:
        head: bytes = isal_zlib.decompressobj(wbits=_WINDOW_BITS).decompress(data, size)
    except isal_zlib.error:  # type: ignore[misc]  # its stub calls the class an instance
        return b""
    return head


def read_whole(path: Path) -> bytes:
    """The unpacked bytes of a file; raises UnreadableInputError where they cannot be had or are too many."""
    pieces: list[bytes] = []
    left = MAX_WHOLE_BYTES
    too_large = f"{path}: it holds more than {MAX_WHOLE_BYTES >> 20} MiB; record a shorter time"
    with readable(path):
        if path.stat().st_size > MAX_WHOLE_BYTES:
            raise UnreadableInputError(too_large)
        stream = ByteStream(path, Limits())
        for piece in stream:
            left -= len(piece)
            if left < 0:
                raise UnreadableInputError(too_large)
            pieces.append(piece)
    if stream.problem is not None:
        raise UnreadableInputError(f"{path}: {stream.problem}; record it again or copy it anew")
    return b"".join(pieces)


class LineRules(Struct, frozen=True):
    """How a format's lines are read: bounds, what a line over `longest` bytes counts as, and what ends a line."""

    limits: Limits
    longest: int
    loss: str
    carriage_returns: bool = False  # progress bars end lines with these


def read_lines(
    path: Path, label: str, losses: Losses, rules: LineRules, progress: Progress | None = None
) -> Iterator[list[str]]:
    """Blocks of lines without their ends, one block in memory whatever the file; an absent file has none.

    Bytes that are no UTF-8 become lone surrogates, as `os.fsdecode` makes them. Counts `unreadable_files`,
    `cut_off_files` (packed, and damaged) and lines that are too long.
    """
    begun: list[bytes] = []  # of the line that no newline has ended yet; forgotten once it is too long
    held = 0
    try:
        stream = ByteStream(path, rules.limits, progress)
        for number, piece in enumerate(stream):
            data = piece if number else piece.removeprefix(BYTE_ORDER_MARK)
            if rules.carriage_returns:
                data = data.replace(b"\r", b"\n")
            cut = data.rfind(b"\n")
            if cut >= 0:
                lines = b"".join((*begun, data[:cut])).decode("utf-8", "surrogateescape").split("\n")
                if held > rules.longest:
                    losses.add(rules.loss, label)
                    del lines[0]
                yield lines
                begun, held, data = [], 0, data[cut + 1 :]
            held += len(data)
            begun = [*begun, data] if held <= rules.longest else []
        if held > rules.longest:
            losses.add(rules.loss, label)
        elif held:
            yield b"".join(begun).decode("utf-8", "surrogateescape").split("\n")
        if stream.problem is not None:
            losses.add("cut_off_files", label)
    except FileNotFoundError:
        return
    except OSError:
        losses.add("unreadable_files", label)


def stem(path: Path) -> str:
    """The name of a file without the endings of its format."""
    name = path.name
    while name.endswith(_ENDINGS) and not name.startswith("."):
        name = name.rsplit(".", 1)[0]
    return name or path.name


def files_in(path: Path, most: int = 10_000, endings: str | tuple[str, ...] = "") -> Iterator[Path]:
    """`path` itself where it is no folder, else files below it whose names end so, in the order of their names.

    Hidden ones are left out, and what lies deeper than `MAX_DEPTH`; `most` bounds their number.
    """
    if not path.is_dir():
        yield path
        return
    for folder, folders, names in os.walk(path):
        depth = len(Path(folder).relative_to(path).parts)
        folders[:] = sorted((name for name in folders if name[:1] != "."), key=natural) if depth < MAX_DEPTH else []
        for name in sorted((name for name in names if name[:1] != "." and name.endswith(endings)), key=natural):
            most -= 1
            if most < 0:
                return
            yield Path(folder) / name


def known_files(paths: Sequence[Path], is_known: Callable[[Path], bool], losses: Losses) -> Iterator[tuple[Path, str]]:
    """The given files, and those of given folders that are known; each once, with its name below all of `paths`.

    Of folders counts `foreign_files` and `unreadable_files`.
    """
    root, seen = common_folder(paths), set()
    for path in paths:
        for file in files_in(path):
            name, real = name_below(root, file), os.path.realpath(file)
            try:
                kind = None if not path.is_dir() or is_known(file) else "foreign_files"
            except OSError:
                kind = "unreadable_files"
            if kind is not None:
                losses.add(kind, name)
            elif real not in seen:
                seen.add(real)
                yield file, name


def natural(text: str) -> list[tuple[int, str]]:
    """A key that sorts numbers inside of names by their value."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", text)]


def common_folder(paths: Sequence[Path]) -> Path:
    """The folder that holds all of `paths`, of which there is at least one."""
    return Path(os.path.commonpath([str((path if path.is_dir() else path.parent).absolute()) for path in paths]))


def name_below(folder: Path, path: Path) -> str:
    return Path(os.path.relpath(path.absolute(), folder)).as_posix()


MAX_LINE_BYTES = 8 * 2**20
MAX_FILE_BYTES = 2**30

_decoder = msgspec.json.Decoder()


def decode_json(text: bytes) -> Any:
    """The JSON value of `text`; raises ValueError when it is none.

    Lone surrogates and stray bytes, which a strict decoder refuses, are spelled out: command lines and paths hold them.
    """
    try:
        return _decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    try:
        return clean_value(json.loads(text.decode("utf-8", "surrogateescape"), parse_constant=lambda _: None))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_values(path: Path, losses: Losses, label: str) -> Iterator[Any]:
    """Yield the value of each line of `path`; an absent file has none. `label` names the file in `losses`."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    except OSError:
        losses.add("unreadable_files", label)
        return
    with file:
        left = MAX_FILE_BYTES
        while line := file.readline(MAX_LINE_BYTES):
            left -= len(line)
            if left < 0:
                losses.add("oversized_files", label)
                return
            ended = line.endswith(b"\n")
            if not ended and len(line) == MAX_LINE_BYTES:
                losses.add("bad_lines", label)
                while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                continue
            if not line.strip():
                continue
            try:
                yield decode_json(line)
            except ValueError:
                losses.add("bad_lines" if ended else "torn_lines", label)


def read_rows(path: Path, losses: Losses, label: str) -> list[Row]:
    """The objects of a JSON-lines file; a line that holds no object is bad."""
    rows: list[Row] = []
    for value in read_values(path, losses, label):
        if isinstance(value, dict):
            rows.append(value)
        else:
            losses.add("bad_lines", label)
    return rows


def read_object(path: Path, losses: Losses, label: str) -> Row | None:
    """The one object of a JSON file, or None when it is absent or cannot be read (counted)."""
    try:
        with open_regular(path) as file:
            value = decode_json(file.read(MAX_LINE_BYTES))
        if isinstance(value, dict):
            return value
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        pass
    losses.add("unreadable_files", label)
    return None
