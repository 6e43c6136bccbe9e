"""Is a file one of torch_xla's, or a log that holds what torch_xla prints? By a few lines that nothing else writes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from isal import isal_zlib

from stepscope.files import open_regular
from stepscope.read.xla.walk import files_in

LOOKED_AT = 2**18  # bytes of the beginning, and of the end: a script prints its report last
PACKED_LOOKED_AT = 2**20  # of a packed file, whose end cannot be had without the rest
UNPACKED_LOOKED_AT = 2**23

_MARKS = (
    b"[MetricsData; step=",
    b"Compilation Analysis: ",
    b"Execution Analysis: ",
    b"pt-xla-profiler:",
    b"Unlowered Op usage summary (",
)
_METRIC = re.compile(rb"Metric: [\w:.]{1,200}[ \t]*[\r\n]{1,2}[^\r\n]{0,100}?TotalSamples: \d")
_COUNTER = re.compile(
    rb"Counter: (?:aten::|xla::|MarkStep|UncachedCompile|CachedCompile|CreateCompileHandles|CreateXlaTensor)\w{0,100}"
    rb"[ \t]*[\r\n]{1,2}[^\r\n]{0,100}?Value: \d"
)


def is_xla_file(path: Path) -> bool:
    """Whether `path` is a file that holds a report or a debug log of torch_xla, packed or not. Raises OSError."""
    if not path.is_file():
        return False
    return any(_is_ours(part) for part in _parts(path))


def holds_xla(folders: Sequence[Path]) -> bool:
    """Whether there is such a file in one of the folders; looks no further than to the first."""
    return any(_is_ours_quietly(file) for folder in folders for file in files_in(folder))


def _is_ours_quietly(file: Path) -> bool:
    try:
        return is_xla_file(file)
    except OSError:
        return False


def _parts(path: Path) -> list[bytes]:
    """The beginning and the end of a file."""
    with open_regular(path, follow=True) as file:
        head = file.read(LOOKED_AT)
        if head.startswith(b"\x1f\x8b"):
            return [_unpacked(head + file.read(PACKED_LOOKED_AT - len(head)))]
        if len(head) < LOOKED_AT:
            return [head]
        size = path.stat().st_size
        file.seek(max(LOOKED_AT, size - LOOKED_AT))
        return [head, file.read(LOOKED_AT)]


def _unpacked(packed: bytes) -> bytes:
    try:
        part: bytes = isal_zlib.decompressobj(wbits=31).decompress(packed, UNPACKED_LOOKED_AT)
    except isal_zlib.error:  # type: ignore[misc]  # its stub calls the class an instance
        return b""
    return part


def _is_ours(text: bytes) -> bool:
    if b"\0" in text[:4096]:
        return False
    if any(_stands_in(text, mark) for mark in _MARKS):
        return True
    return any(_is_no_quote(text, match.start()) for mark in (_METRIC, _COUNTER) for match in mark.finditer(text))


def _stands_in(text: bytes, mark: bytes) -> bool:
    at = text.find(mark)
    while at >= 0:
        if _is_no_quote(text, at):
            return True
        at = text.find(mark, at + 1)
    return False


def _is_no_quote(text: bytes, at: int) -> bool:
    """Whether no quotation mark stands before in the line: JSON and code that hold such a line are not the log."""
    start = max(text.rfind(b"\n", max(0, at - 400), at), text.rfind(b"\r", max(0, at - 400), at)) + 1
    return at - start <= 300 and not any(mark in text[start:at] for mark in (b'"', b"'", b"`"))
