"""The times of sampled stacks, `stacks-K.times.json` beside `stacks-K.raw`: when a thread stood in which record."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import overload

import msgspec

from stepscope.files import read_small
from stepscope.read.raw import Losses, RawStretch
from stepscope.read.text import LONGEST_NS, moment_ns

SCHEMA = "stepscope.times/1"
MAX_BYTES = 64 * 2**20  # of a segment of some seconds
MAX_RECORD = 2**31
_LONGEST_US = LONGEST_NS // 1000


class _Stretches(msgspec.Struct):
    record: list[int]
    start_us: list[int]
    end_us: list[int]


class _Times(msgspec.Struct):
    schema: str
    start_ns: int
    stretches: _Stretches


class Stretches(Sequence[RawStretch]):
    """Stretches as columns: a day of sampling has millions of them."""

    def __init__(self) -> None:
        self.record, self.start_ns, self.end_ns = array("q"), array("q"), array("q")

    def append(self, record: int, start_ns: int, end_ns: int) -> None:
        """Add a stretch."""
        self.record.append(record)
        self.start_ns.append(start_ns)
        self.end_ns.append(end_ns)

    def __len__(self) -> int:
        return len(self.record)

    @overload
    def __getitem__(self, index: int) -> RawStretch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RawStretch]: ...
    def __getitem__(self, index: int | slice) -> RawStretch | Sequence[RawStretch]:
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        return RawStretch(self.record[index], self.start_ns[index], self.end_ns[index])


def read_times(path: Path, losses: Losses, label: str) -> Sequence[RawStretch]:
    """The stretches of a segment, empty where there is no such file or it is none.

    Counts `unreadable_files`, and `bad_stretches` for single ones that end before they begin or lie nowhere.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            losses.add("oversized_files", label)
            return ()
        times = msgspec.json.decode(read_small(path, MAX_BYTES), type=_Times)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, RecursionError):  # a msgspec error is a ValueError
        losses.add("unreadable_files", label)
        return ()
    start_ns = moment_ns(times.start_ns)
    columns = times.stretches
    if times.schema != SCHEMA or start_ns is None:
        losses.add("unreadable_files", label)
        return ()
    stretches = Stretches()
    for record, start_us, end_us in zip(columns.record, columns.start_us, columns.end_us, strict=False):
        if 0 <= record < MAX_RECORD and 0 <= start_us <= end_us <= _LONGEST_US:
            stretches.append(record, start_ns + start_us * 1000, start_ns + end_us * 1000)
    longest = max(len(columns.record), len(columns.start_us), len(columns.end_us))
    losses.add("bad_stretches", label, longest - len(stretches))
    return stretches
