"""A large trace made of a real one: `python benchmarks/generate_trace.py BASE OUT [--size-mb 1000]`.

The events of BASE are repeated, one repetition after the other in time. Correlations, flow ids, External ids, Python
ids, sequence numbers and `ProfilerStep#N` are other ones in each repetition, so that every repetition is linked within
itself. The text of an event stays as its writer wrote it, whitespace included. The same BASE and size always give the
same bytes; memory does not grow with the size.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from isal import igzip

BLOCK_EVENTS = 10_000
# Of the rest of the file only this is kept: real traces carry dumps of the environment.
METADATA_KEYS = (
    "schemaVersion",
    "deviceProperties",
    "distributedInfo",
    "baseTimeNanoseconds",
    "displayTimeUnit",
    "with_stack",
    "with_modules",
    "record_shapes",
    "profile_memory",
)
# Fields that number the same things are moved together: the id of an arrow is the correlation of its launch.
SHARED = {b"id": b"correlation", b"external id": b"External id", b"Python parent id": b"Python id"}
_NUMBER = re.compile(
    rb'(?:"(ts|id|correlation|External id|external id|Python id|Python parent id|Sequence number|Ev Idx)"\s*:\s*"?'
    rb'|"name"\s*:\s*"(ProfilerStep)#)(-?\d+)(?=[\s,.}"\]])'
)
_ONCE = re.compile(r"Iteration Start|Record Window End|PyTorch Profiler")

Int64 = npt.NDArray[np.int64]


class Entry(msgspec.Struct):
    """What decides how an event is repeated."""

    ph: str | None = None
    name: Any = None
    ts: Any = None
    dur: Any = None


class Block:
    """A stretch of events as a template: `text` has one %d for each of `values`, which belong to `fields`."""

    def __init__(self, events: list[bytes]) -> None:
        fields: list[bytes] = []
        values: list[int] = []

        def blank(match: re.Match[bytes]) -> bytes:
            field = match[1] or match[2]
            fields.append(SHARED.get(field, field))
            values.append(int(match[3]))
            return match[0][: match.start(3) - match.start()] + b"%d"

        self.text = _NUMBER.sub(blank, b",\n".join(events).replace(b"%", b"%%"))
        self.fields = np.array(fields, dtype=object)
        self.values: Int64 = np.array(values, np.int64)
        self.shifts: Int64 = np.zeros(len(values), np.int64)

    def repetition(self, number: int) -> bytes:
        """The text of repetition `number`, the first being 0."""
        return self.text % tuple((self.values + number * self.shifts).tolist())


def generate(base: Path, out: Path, size_mb: float) -> int:
    """Write about `size_mb` MB (unpacked) to `out`, gzipped; return the number of entries written."""
    content = igzip.decompress(base.read_bytes()) if base.suffix == ".gz" else base.read_bytes()
    root = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    raw = [bytes(event) for event in msgspec.json.decode(root["traceEvents"], type=list[msgspec.Raw])]
    del content
    entries = [msgspec.json.decode(event, type=Entry) for event in raw]
    once = [entry.ph == "M" or bool(_ONCE.match(str(entry.name))) for entry in entries]
    head = [event for event, single in zip(raw, once, strict=True) if single]
    body = [event for event, single in zip(raw, once, strict=True) if not single]
    span = _span_us([entry for entry, single in zip(entries, once, strict=True) if not single])
    blocks = [Block(body[i : i + BLOCK_EVENTS]) for i in range(0, len(body), BLOCK_EVENTS)]
    _set_shifts(blocks, span)
    repetitions = max(1, round(size_mb * 1e6 / sum(len(event) + 2 for event in body)))
    metadata = {key: root[key] for key in METADATA_KEYS if key in root}
    unfinished = out.with_name(out.name + ".part")
    with (
        unfinished.open("wb") as file,
        igzip.IGzipFile(filename="", mode="wb", fileobj=file, compresslevel=1, mtime=0) as stream,
    ):
        stream.write(msgspec.json.encode(metadata)[:-1] + b',"traceEvents":[\n' + b",\n".join(head))
        separator = b",\n" if head else b""
        for text in _repetitions(blocks, repetitions):
            stream.write(separator + text)
            separator = b",\n"
        stream.write(b"\n]}\n")
    unfinished.replace(out)
    return len(raw) + (repetitions - 1) * len(body)


def _repetitions(blocks: list[Block], count: int) -> Iterator[bytes]:
    for number in range(count):
        for block in blocks:
            yield block.repetition(number)


def _span_us(entries: list[Entry]) -> int:
    """Whole microseconds from the first start to the last end, and a gap."""
    starts = np.array([float(entry.ts) for entry in entries])
    ends = starts + np.array([float(entry.dur or 0) for entry in entries])
    return int(ends.max() - starts.min()) + 1000


def _set_shifts(blocks: list[Block], span_us: int) -> None:
    """How far each number moves per repetition: by the range its field has; 0 and below mean 'none' and stay."""
    fields = np.concatenate([block.fields for block in blocks])
    values = np.concatenate([block.values for block in blocks])
    distance = {b"ts": span_us}
    for field in set(fields.tolist()) - {b"ts"}:
        used = values[(fields == field) & (values > 0)]
        distance[field] = int(used.max() - used.min()) + 1 if len(used) else 0
    for block in blocks:
        moved: Int64 = np.array([distance[field] for field in block.fields.tolist()], np.int64)
        numbered = (block.values > 0) | np.isin(block.fields, [b"ts", b"ProfilerStep"])
        block.shifts = np.where(numbered, moved, 0)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="repeat the events of a real trace")
    parser.add_argument("base", type=Path, help="a .json or .json.gz trace with an object at its root")
    parser.add_argument("out", type=Path, help="the .json.gz to write")
    parser.add_argument("--size-mb", type=float, default=1000, help="unpacked size, to whole repetitions")
    args = parser.parse_args()
    count = generate(args.base, args.out, args.size_mb)
    print(f"{args.out}: {count} entries, {args.out.stat().st_size / 1e6:.0f} MB packed")


if __name__ == "__main__":
    main()
