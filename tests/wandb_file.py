"""Reads the records of an offline run of W&B: blocks of 32 KiB as LevelDB's log has them, a protobuf in each record."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32_768, struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def records(folder: Path) -> Iterator[Any]:
    """The records of the only run in `folder` or below."""
    from wandb.proto import wandb_internal_pb2

    (path,) = {found.resolve() for found in folder.glob("**/*.wandb")}
    data, at, parts = path.read_bytes(), 7, []
    while at + _HEADER.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEADER.size:
            at += left
            continue
        _, length, kind = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        parts = [*parts, data[at : at + length]] if kind in (_MIDDLE, _LAST) else [data[at : at + length]]
        at += length
        if kind in (_WHOLE, _LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(b"".join(parts))
            yield record
