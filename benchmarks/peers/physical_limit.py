"""How fast a reader could be at best: `python physical_limit.py gunzip|decode|decode_fast TRACE RESULT`.

gunzip   isal inflates the file, and the bytes are thrown away
decode   the same, and msgspec turns stretches of 4 MB, cut at the last place where the decoder accepts it, into typed
         objects with the fields our columns need, which are thrown away: no time is converted, no column built, nothing
         salvaged, nothing written
decode_fast   the same with stretches of 128 KB, whose objects stay in the processor's cache: the fastest we know of
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
from gauge import measure
from isal import igzip

DECODE_BYTES, FAST_BYTES = 2**22, 2**17
WINDOW_BYTES, OVERLAP_BYTES = 2**12, 64
_BETWEEN = re.compile(rb"\}\s*,\s*\{")
_BEGIN = re.compile(rb'"traceEvents"\s*:\s*\[')

Args = msgspec.defstruct(
    "Args",
    [
        (f"field_{index}", Any, msgspec.field(default=None, name=name))
        for index, name in enumerate((
            "External id", "external id", "correlation", "Sequence number", "Fwd thread id", "device", "stream",
            "bytes", "Python id", "Python parent id", "Python module id", "grid", "block", "registers per thread",
            "shared memory", "blocks per SM", "warps per SM", "est. achieved occupancy %", "Addr", "Bytes",
            "Total Allocated", "Total Reserved", "Device Type", "Device Id", "Collective name", "dtype",
            "In msg nelems", "Out msg nelems", "Group size", "Process Group Name", "Process Group Ranks", "name",
        ))
    ]
    + [
        (f"text_{index}", msgspec.Raw, msgspec.field(default=msgspec.Raw(), name=name))
        for index, name in enumerate(("Input Dims", "Input dims", "Input type"))
    ],
    gc=False,
)  # fmt: skip


class Event(msgspec.Struct, gc=False):
    """One entry of traceEvents."""

    ph: str | None = None
    cat: str | None = None
    name: Any = None
    pid: Any = None
    tid: Any = None
    ts: Any = None
    dur: Any = None
    id: Any = None
    args: Args | None = None  # type: ignore[valid-type]  # made above


class File(msgspec.Struct, gc=False):
    """A trace, or its rest."""

    traceEvents: list[Event]


def gunzip(path: str) -> dict[str, Any]:
    """Inflate a piece at a time."""
    return {"bytes": sum(len(piece) for piece in pieces(path, FAST_BYTES))}


def decode(path: str, piece_bytes: int) -> dict[str, Any]:
    """Inflate and decode a piece at a time."""
    part, rest = msgspec.json.Decoder(list[Event]), msgspec.json.Decoder(File)
    count, inside, tail = 0, False, b""
    for piece in pieces(path, piece_bytes):
        tail += piece
        if not inside and (begin := _BEGIN.search(tail)):
            inside, tail = True, tail[begin.end() :]
        if inside:
            done, tail = decoded_part(part, tail)
            count += done
    return {"events": count + len(rest.decode((b'{"traceEvents":[' if inside else b"") + tail).traceEvents)}


def decoded_part(decoder: msgspec.json.Decoder[list[Event]], data: bytes) -> tuple[int, bytes]:
    """Events before the last place where the decoder accepts a cut, and what is left."""
    for begin in range(max(0, len(data) - WINDOW_BYTES), -WINDOW_BYTES, -WINDOW_BYTES):
        for cut in reversed(list(_BETWEEN.finditer(data, max(0, begin), begin + WINDOW_BYTES + OVERLAP_BYTES))):
            try:
                events = decoder.decode(b"[" + data[: cut.start() + 1] + b"]")
            except msgspec.DecodeError:
                continue  # this brace is inside an event
            return len(events), data[cut.end() - 1 :]
    return 0, data


def pieces(path: str, size: int) -> Iterator[bytes]:
    """The unpacked file in pieces."""
    with igzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb") as stream:
        while piece := stream.read(size):
            yield piece


if __name__ == "__main__":
    work = {
        "gunzip": gunzip,
        "decode": lambda path: decode(path, DECODE_BYTES),
        "decode_fast": lambda path: decode(path, FAST_BYTES),
    }[sys.argv[1]]
    measure(lambda: work(sys.argv[2]), sys.argv[3])
