"""The files of a segment of sampled stacks: `stacks-K.raw` in py-spy's raw grammar, `stacks-K.times.json` beside it.

Each is put in place in one step, the times first: where the stacks are, their times are complete.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepscope.record.host.pyspy_counts import Counted

TIMES_SCHEMA = "stepscope.times/1"
MOST_STRETCHES = 20_000  # some 400 KB; a segment at the default rate has a few hundred


@dataclass(frozen=True)
class SpyPart:
    """What one py-spy has seen: `prefix` names its process, `start_ns` is when it started, on the run's clock."""

    prefix: str
    start_ns: int
    counted: Counted


def write_segment(path: Path, parts: Sequence[SpyPart]) -> tuple[bool, str | None]:
    """Write the stacks of all parts to `path`; returns whether they are there, and the name of the file of times.

    There are no times (None) where they would be too many or cannot be written. Never raises `OSError`.
    """
    times = path.with_name(path.name.removesuffix(".raw") + ".times.json")
    timed = _replace(times, times_text(parts))
    if not _replace(path, _raw_text(parts)):
        _remove(times)
        return False, None
    return True, times.name if timed else None


def times_text(parts: Sequence[SpyPart]) -> str | None:
    """The file of times: a stretch's `record` is the position of its record in the raw file, counted from 0."""
    if not 0 < sum(len(part.counted.stretches) for part in parts) <= MOST_STRETCHES:
        return None
    start_ns = min(part.start_ns for part in parts)
    rows = []
    first = 0
    for part in parts:
        shift = round((part.start_ns - start_ns) / 1000)
        rows += [(first + record, start + shift, end + shift) for record, start, end in part.counted.stretches]
        first += len(part.counted.records)
    rows.sort(key=lambda row: row[1])
    record, start_us, end_us = zip(*rows, strict=True)
    stretches = {"record": record, "start_us": start_us, "end_us": end_us}
    value = {"schema": TIMES_SCHEMA, "start_ns": start_ns, "stretches": stretches}
    return json.dumps(value, separators=(",", ":")) + "\n"


def _raw_text(parts: Sequence[SpyPart]) -> str:
    return "".join(
        f"{part.prefix}{_one_record(record)} {number}\n"
        for part in parts
        for record, number in zip(part.counted.records, part.counted.counts, strict=True)
    )


def _one_record(text: str) -> str:
    """A name may hold line breaks, and py-spy writes them; only what would read as the next record is moved aside."""
    return text.replace("\nprocess ", "\n process ") if "\n" in text else text


def _replace(path: Path, text: str | None) -> bool:
    if text is None:
        return False
    temporary = Path(f"{path}.part")
    try:
        with temporary.open("w", encoding="utf-8", errors="backslashreplace", newline="\n") as sink:
            sink.write(text)
        os.replace(temporary, path)
    except OSError:
        _remove(temporary)
        return False
    return True


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
