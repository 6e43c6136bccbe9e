"""Files of sampled stacks: which format one is by its first bytes, whatever its name, and many of them as one run.

To add a format, write a file with a `StackSource`, and add a line with its detector here. What people give instead of
stacks stands in `REFUSALS`, with what to do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from stepscope.errors import UnreadableInputError, readable
from stepscope.read import speedscope
from stepscope.read.raw import FrameNames, Losses, RawHost, RawRun, RawSegment, StackSource
from stepscope.read.stack_lines import START_PROCESS, START_THREAD, Austin, Collapsed, PySpyRaw, Tachyon
from stepscope.read.streams import BYTE_ORDER_MARK, HEAD_BYTES, common_folder, known_files, read_head

Detect = Callable[[bytes], bool]
Open = Callable[[Path, str, bytes], StackSource]

_LOOKED_AT = 200  # lines that are enough to tell formats apart
_FRAME = re.compile(r".+ \(.*[.:/<?\\].*\)|.+ \(\?\)", re.DOTALL)  # "name (file)", not any words in brackets
_COUNTED = re.compile(r"(.*) \d{1,15}(?:\.\d{1,20})?\Z")
_TACHYON = re.compile(r"tid:(?:\d{1,20}|0x[0-9A-Fa-f]{1,16});")
_AUSTIN = re.compile(r"# austin: |P\d{1,18};T(?:\w{1,24}:)?\w{1,24}[; ]")


def open_stacks(path: Path, label: str | None = None) -> StackSource:
    """Open a file of stacks; nothing is read yet but its beginning. `label` names it in the losses.

    Raises UnreadableInputError, with what to do, where no format knows the file or it cannot be read.
    """
    with readable(path):
        if not path.is_file():
            what = "a folder" if path.is_dir() else "no such file"
            raise UnreadableInputError(f"{path}: {what}; give a file that a sampler wrote")
        head = read_head(path)
        empty = path.stat().st_size == 0
    opener = _opener(head)
    if opener is not None:
        return opener(path, label or path.name, head)
    what = _EMPTY if empty else next((reason for detect, reason in REFUSALS if detect(head)), _TEXT)
    raise UnreadableInputError(f"{path}: {what}")


def is_stack_file(path: Path) -> bool:
    """Whether `path` is a file that begins with sampled stacks in a format we know. Raises OSError."""
    return path.is_file() and _opener(read_head(path)) is not None


def _opener(head: bytes) -> Open | None:
    return next((opener for detect, opener in FORMATS if detect(head)), None)


def _lines(head: bytes) -> list[str]:
    """The first lines that are no blanks; the last is left out where the head ends within it."""
    if b"\0" in head:
        return []
    lines = head.removeprefix(BYTE_ORDER_MARK).decode("utf-8", "surrogateescape").split("\n")
    if len(head) >= HEAD_BYTES and len(lines) > 1:
        lines.pop()
    return [line.rstrip("\r ") for line in lines[:_LOOKED_AT] if line.strip()]


def _is_pyspy(head: bytes) -> bool:
    lines = _lines(head)
    if not lines or lines[0][0] in "{[":
        return False
    whole = [match[1] for line in lines if (match := _COUNTED.fullmatch(line))]
    for start in (START_PROCESS, START_THREAD):
        # Newlines in a command line break every record in two or more lines.
        if 5 * sum(1 for line in lines if start.match(line)) >= len(lines):
            return True
    if len(lines) == 1 and not whole and len(head) >= HEAD_BYTES:
        pieces = lines[0].split(";")[:-1]  # a line longer than what was looked at
        return len(pieces) > 1 and _written_as_pyspy(pieces)
    if 10 * len(whole) < 8 * len(lines):
        return False
    return _written_as_pyspy([piece for text in whole if text for piece in text.split(";")])


def _written_as_pyspy(pieces: list[str]) -> bool:
    """Whether most frames are `name (file)`; none at all is what remains of stacks without Python frames."""
    return 2 * sum(1 for piece in pieces if _FRAME.fullmatch(piece)) >= len(pieces)


def _is_tachyon(head: bytes) -> bool:
    lines = _lines(head)
    return bool(lines) and 2 * sum(1 for line in lines if _TACHYON.match(line)) >= len(lines)


def _is_collapsed(head: bytes) -> bool:
    """Strict: logs and tables hold lines that end in a number too."""
    lines = _lines(head)
    if not lines or lines[0].lstrip()[:1] in "{[<":
        return False
    whole = [match[1] for line in lines if (match := _COUNTED.fullmatch(line))]
    stacked = sum(1 for text in whole if ";" in text and "; " not in text)
    return 10 * len(whole) >= 9 * len(lines) and 2 * stacked >= len(whole)


# Tried in order; the first detector that says yes decides.
FORMATS: tuple[tuple[Detect, Open], ...] = (
    (speedscope.detect, speedscope.open_speedscope),
    (
        lambda head: any(_AUSTIN.match(line) for line in _lines(head)[:1]),
        lambda path, label, head: Austin(path, label, head=head[:4096].decode("utf-8", "replace")),
    ),
    (_is_tachyon, lambda path, label, _: Tachyon(path, label, tool="profiling.sampling")),
    (_is_pyspy, lambda path, label, _: PySpyRaw(path, label)),
    (_is_collapsed, lambda path, label, _: Collapsed(path, label)),
)


_EMPTY = "an empty file: what writes it was killed before, or still runs; py-spy writes when it ends (Ctrl-C)"
_TEXT = (
    "no sampled stacks in it; give py-spy's raw format (`py-spy record --format raw`), collapsed stacks or speedscope"
)
_NO_FILE = "no file of sampled stacks in it; give files of `py-spy record --format raw`, collapsed stacks or speedscope"
_ELSE = "give py-spy's raw format, collapsed stacks or a file of speedscope"
_EVENT = re.compile(rb'"ph"\s*:\s*"|"traceEvents"')


def _looks_like_json(head: bytes) -> bool:
    return head.removeprefix(BYTE_ORDER_MARK).lstrip()[:1] in (b"{", b"[") and b"\0" not in head


# What a file begins with, and what to say of it.
REFUSALS: tuple[tuple[Detect, str], ...] = (
    (
        lambda head: b"<svg" in head[:4096].lower(),
        "an SVG flame graph holds pictures, not stacks; record with --format raw",
    ),
    (
        lambda head: head[:512].lstrip().lower().startswith((b"<!doctype html", b"<html")),
        "an HTML page holds pictures, not stacks; have its tool write collapsed stacks or speedscope's format",
    ),
    (
        lambda head: head.startswith((b"PERFILE2", b"2ELIFREP")),
        "perf's own file; fold it first: `perf script -i FILE | stackcollapse-perf.pl > stacks.txt`",
    ),
    (
        lambda head: head.startswith(b"MOJ"),
        "Austin's binary format; make text of it first: `mojo2austin FILE stacks.austin`",
    ),
    (
        lambda head: head[:1] in (b"{", b"\xfb") and head[1:2] in (b"(", b")", b"\xa8", b"\xa9"),
        "a file of cProfile holds totals of functions, not stacks; record with `py-spy record --format raw`",
    ),
    (
        lambda head: _looks_like_json(head) and bool(_EVENT.search(head)),
        "a trace, and no sampled stacks; give it to `stepscope analyze`",
    ),
    (_looks_like_json, f"JSON without stacks; {_ELSE}"),
    (lambda head: b"\0" in head, f"a binary file, not stacks as text; {_ELSE}"),
    (lambda head: not head, "a packed file that cannot be unpacked; copy it anew"),
)


def read_stack_files(paths: Sequence[Path]) -> RawRun:
    """Files of stacks that others recorded, and folders of them, as a run without steps: one segment for each file.

    Nothing says which host or rank a file is of; the tables make processes of the chains of process ids. Counts
    `foreign_files` of folders. Raises UnreadableInputError for a given file that holds none, and when not one record of
    all files can be read.
    """
    losses = Losses()
    sources = [open_stacks(file, name) for file, name in known_files(paths, is_stack_file, losses)]
    # One record at least must be readable; of a file of lines only the beginning is looked at.
    if not any(True for source in sources for _ in open_stacks(source.path).read(FrameNames(), Losses())):
        nothing = "not one stack in it can be read; record again" if sources else _NO_FILE
        raise UnreadableInputError(f"{paths[0]}: {nothing}")
    segments = tuple(
        RawSegment(number=number, file=source.label, source=source.tool, idle=source.idle, status="ok", stacks=source)
        for number, source in enumerate(sources)
    )
    return RawRun(common_folder(paths), hosts=(RawHost(name="", segments=segments),), ranks=(), losses=losses)
