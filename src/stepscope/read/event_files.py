"""TensorBoard's event files: the scalars of each folder as metrics of a process.

A file is records (length, its checksum, an `Event` of protocol buffers, its checksum), as tensorflow/core/lib/io/
record_writer.h and tensorflow/core/util/event.proto have it. Scalars are `simple_value`, or a tensor of one number. A
record with scalars whose checksum is wrong is skipped and counted; behind a length that leads out of the file nothing
can be found, so the rest of that file is lost. Texts, histograms and pictures are none of ours.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from stepscope.files import open_regular
from stepscope.read.raw import Losses, RawRank, RawRun, RawSeries
from stepscope.read.streams import common_folder, known_files, name_below
from stepscope.read.text import LATEST_NS, clean

SOURCE = "event files"  # of the metrics that come from them
MAX_FILE_BYTES = 2**30
MAX_SCALARS_BYTES = 2**18  # of a record with scalars: some thousands of them
MAX_TAG = 1_000  # characters
MAX_STEP = 2**62
_VERSION, MAX_VERSION_BYTES = b"brain.Event:", 1_000
_HEAD = struct.Struct("<QI")
_SUM = struct.Struct("<I")
_FRAME = _HEAD.size + _SUM.size
_FIXED = {1: struct.Struct("<d"), 5: struct.Struct("<f")}  # by wire type
_FLOAT, _DOUBLE = 1, 2  # types of tensors
_SCHEMA = {"name": pl.String, "step": pl.Int64, "time_ns": pl.Int64, "value": pl.Float64}


def is_event_file(path: Path) -> bool:
    """Whether a file begins as an event file does; raises OSError."""
    if not path.is_file():
        return False
    with open_regular(path, follow=True) as file:
        head = file.read(_HEAD.size + 64)
    return len(head) > _HEAD.size and _HEAD.unpack_from(head)[0] < MAX_VERSION_BYTES and _VERSION in head


def read_event_files(paths: Sequence[Path]) -> RawRun:
    """The scalars of files and folders of them, a process for each folder that files lie in."""
    losses, folder = Losses(), common_folder(paths)
    by_folder: dict[str, list[pl.DataFrame]] = {}
    for file, label in known_files(paths, is_event_file, losses):
        by_folder.setdefault(name_below(folder, file.parent), []).append(read_scalars(file, losses, label))
    ranks = []
    for number, (name, parts) in enumerate(by_folder.items()):
        series = tuple(_series(pl.concat(parts).sort("time_ns", maintain_order=True)))
        ranks.append(RawRank(name=clean(folder.name if name == "." else name), rank=number, metrics=series))
    return RawRun(folder=folder, hosts=(), ranks=tuple(ranks), losses=losses)


def _series(found: pl.DataFrame) -> Iterator[RawSeries]:
    for (name,), part in found.group_by("name", maintain_order=True):
        times, values, steps = (part[column].to_numpy() for column in ("time_ns", "value", "step"))
        yield RawSeries(name=str(name), source=SOURCE, times_ns=times, values=values, steps=steps)


def read_scalars(path: Path, losses: Losses, label: str) -> pl.DataFrame:
    """name, step, time_ns and value of each scalar, in order; counts `bad_events` and `cut_off_event_files`."""
    try:
        with open_regular(path, follow=True) as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError:
        losses.add("unreadable_files", label)
        return pl.DataFrame(schema=_SCHEMA)
    if len(data) > MAX_FILE_BYTES:
        losses.add("oversized_files", label)
    places, found, odd = _places(data), [], 0
    for number, (start, length) in enumerate(places):
        try:
            scalars = _scalars(data[start : start + length])
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, struct.error):
            odd += 1
            continue
        if length <= MAX_SCALARS_BYTES:  # without scalars too: damage may have hidden them
            found.append((number, scalars))
        odd += bool(scalars) and length > MAX_SCALARS_BYTES
    right = _right(data, [places[number] for number, _ in found])
    losses.add("bad_events", label, odd + right.count(False))
    if (sum(places[-1]) + _SUM.size if places else 0) < min(len(data), MAX_FILE_BYTES):
        losses.add("cut_off_event_files", label)
    rows = [row for (_, scalars), is_right in zip(found, right, strict=True) if is_right for row in scalars]
    columns = zip(*rows, strict=True) if rows else [()] * len(_SCHEMA)
    return pl.DataFrame(dict(zip(_SCHEMA, columns, strict=True)), schema=_SCHEMA)


def _places(data: bytes) -> list[tuple[int, int]]:
    """(start, length) of the records one after another, up to where no whole one follows."""
    found, at, size = [], 0, len(data)
    while at + _FRAME <= size:
        length, _ = _HEAD.unpack_from(data, at)
        if at + _FRAME + length > size:
            break
        found.append((at + _HEAD.size, length))
        at += _FRAME + length
    return found


def _right(data: bytes, places: Sequence[tuple[int, int]]) -> list[bool]:
    """Of each record whether its sum is the one behind it."""
    raw, told = np.frombuffer(data, np.uint8), np.array(places, np.int64).reshape(-1, 2)
    order = np.argsort(-told[:, 1], kind="stable")
    starts, lengths = told[order, 0], told[order, 1]
    found = np.full(len(order), 0xFFFFFFFF, np.uint32)
    # byte by byte through all of them at once, those that are over left out: they stand behind
    for byte in range(int(lengths[0]) if len(lengths) else 0):
        own = slice(0, int(np.searchsorted(-lengths, -byte, side="left")))
        found[own] = _TABLE[(found[own] ^ raw[starts[own] + byte]) & np.uint32(0xFF)] ^ (found[own] >> np.uint32(8))
    found = ~found
    masked = ((found >> np.uint32(15)) | (found << np.uint32(17))) + np.uint32(0xA282EAD8)
    stored = np.zeros(len(order), np.uint32)
    for byte in range(_SUM.size):
        stored |= raw[starts + lengths + byte].astype(np.uint32) << np.uint32(8 * byte)
    right = np.empty(len(order), np.bool_)
    right[order] = masked == stored
    return list(map(bool, right))


def _crc_table() -> npt.NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & np.uint32(1), (table >> np.uint32(1)) ^ np.uint32(0x82F63B78), table >> np.uint32(1))
    return table


_TABLE = _crc_table()


# ---- protocol buffers ------------------------------------------------------------------------------------------------


def _scalars(event: bytes) -> list[tuple[str, int, int, float]]:
    """The scalars of an event; raises one of many errors for what is none."""
    wall, step, found = 0.0, 0, []
    for field, value in _fields(event):
        if field == 1 and isinstance(value, float):
            wall = value
        elif field == 2 and isinstance(value, int):
            step = value - 2**64 if value >= 2**63 else value
        elif field == 5 and isinstance(value, bytes):
            found += [scalar for inner, part in _fields(value) if inner == 1 and (scalar := _scalar(part)) is not None]
    if not found:
        return []
    time_ns = round(wall * 1e9) if math.isfinite(wall) else -1
    if not 0 <= time_ns <= LATEST_NS or abs(step) > MAX_STEP:
        raise ValueError("no moment")
    return [(name, step, time_ns, value) for name, value in found]


def _scalar(summary: Any) -> tuple[str, float] | None:
    """(tag, value) of a part of a summary; None where it is no scalar."""
    tag, value = "", None
    for field, found in _fields(summary):
        if field == 1:
            tag = found.decode()
        elif field == 2 and isinstance(found, float):
            value = found
        elif field == 8:
            value = _number(found)
    return (tag[:MAX_TAG], value) if tag and value is not None else None


def _number(tensor: bytes) -> float | None:
    """The one number of a tensor of floats."""
    kind, content, shape = 0, b"", b""
    for field, found in _fields(tensor):
        if field == 1:
            kind = found
        elif field == 2:
            shape = found
        elif field in (4, 5, 6):
            content = found if isinstance(found, bytes) else struct.pack("<d" if field == 6 else "<f", found)
    size = {_FLOAT: "<f", _DOUBLE: "<d"}.get(kind)
    if size is None or shape or len(content) != struct.calcsize(size):
        return None
    return float(struct.unpack(size, content)[0])


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a message."""
    at, size = 0, len(data)
    while at < size:
        key, at = (data[at], at + 1) if data[at] < 128 else _varint(data, at)
        wire = key & 7
        if wire == 2:
            length, at = (data[at], at + 1) if data[at] < 128 else _varint(data, at)
            if at + length > size:
                raise ValueError("cut off")
            yield key >> 3, data[at : at + length]
            at += length
        elif wire == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
        else:
            fixed = _FIXED[wire]
            yield key >> 3, fixed.unpack_from(data, at)[0]
            at += fixed.size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("no number")
