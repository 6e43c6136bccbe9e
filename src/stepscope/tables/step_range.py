"""Of a large trace, the slices around the steps that are asked for: the file is read twice instead of being held whole.

The first pass decodes only the annotations of steps. The second is the usual one, and lets go what is far from the
steps. What is kept is decided exactly by `trace_entry.load`, as for any trace.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct
from msgspec.structs import asdict, replace

from stepscope.files import open_regular
from stepscope.read.kineto import KinetoTrace
from stepscope.read.streams import GZIP
from stepscope.read.trace import Text, TraceChunk
from stepscope.tables.arrays import Bools, Int64
from stepscope.tables.categories import STEP
from stepscope.tables.journal import trace_steps
from stepscope.tables.parts import decode

Steps = tuple[int, int]  # the first and the last, both included

# All of a trace takes about its unpacked size while its slices are nested and linked; real traces pack to a thirteenth.
LARGE_BYTES = 2**30
_PACKED = 13
# A device works off what the host has launched before. So many steps are taken on both sides: who launched what runs in
# the first one, and what the last one launched. A queue holds about 1,000 launches, which are some 2 MB of a trace;
# launches of CUDA graphs are followed by many kernels each.
_BEHIND_STEPS = 3
_BEHIND_BYTES = 100 * 10**6  # unpacked; where steps are small, as many as take this


class StepRange(Struct, frozen=True):
    """Stretches of time of a trace, disjoint and in order: ns since its base."""

    starts: Int64
    ends: Int64

    def only(self, chunk: TraceChunk) -> TraceChunk:
        """What touches the stretches, and all annotations of steps, as they tell the steps' numbers."""
        slices = chunk.slices
        is_step = np.array([*(name.startswith(STEP) for name in slices.name.values), False])[slices.name.codes]
        near = self._touched(slices.start_ns, slices.start_ns + slices.duration_ns) | is_step
        return TraceChunk(
            rows_of_columns(slices, near),
            rows_of_columns(chunk.flows, self._touched(chunk.flows.time_ns, chunk.flows.time_ns)),
            rows_of_columns(chunk.memory, self._touched(chunk.memory.time_ns, chunk.memory.time_ns)),
        )

    def holds(self, marks: pl.DataFrame, wanted: Steps, base_ns: int) -> bool:
        """Whether the wanted ones of the steps that the second pass found lie in it; damage may hide them from one."""
        return all(
            bool(np.any((self.starts <= start) & (start + row["wall_ns"] <= self.ends)))
            for row in chosen(trace_steps(marks), wanted)
            for start in (row["start_ns"] - base_ns,)
        )

    def _touched(self, starts: Int64, ends: Int64) -> Bools:
        following = np.searchsorted(self.ends, starts)  # the first stretch that does not end before
        begun = np.append(self.starts, np.iinfo(np.int64).max)[following] <= ends
        return np.asarray(begun, np.bool_)


def rows_of_columns(columns: Any, kept: Bools) -> Any:
    return replace(columns, **{name: _column(column, kept) for name, column in asdict(columns).items()})


def _column(column: Text | npt.NDArray[Any], kept: Bools) -> Text | npt.NDArray[Any]:
    if isinstance(column, Text):
        return Text(column.values, column.codes[kept])
    if column.strides == (0,):  # one value stands for all rows
        return np.broadcast_to(column[:1], (int(kept.sum()),))
    return column[kept]


def chosen(steps: list[dict[str, Any]], wanted: Steps | None) -> list[dict[str, Any]]:
    return steps if wanted is None else [row for row in steps if wanted[0] <= row["step"] <= wanted[1]]


def is_large(path: Path) -> bool:
    """Whether all of a trace at once is too much; raises OSError."""
    return _unpacked_bytes(path) >= LARGE_BYTES


def _unpacked_bytes(path: Path) -> int:
    """About how large a trace is; raises OSError."""
    with open_regular(path, follow=True) as file:
        packed = file.read(len(GZIP)) == GZIP
    return path.stat().st_size * (_PACKED if packed else 1)


def step_range(path: Path, wanted: Steps, progress: Callable[[int, int], None] | None) -> StepRange | None:
    """Where the wanted steps lie, by a pass over the file; None where it tells of none of them.

    Raises UnreadableInputError and OSError.
    """
    source = KinetoTrace(path, progress=progress, only=STEP.encode())
    frames = []
    for chunk in source.chunks():
        slices = chunk.slices
        columns = {
            "category": decode(slices.category.values, slices.category.codes),
            "name": decode(slices.name.values, slices.name.codes),
            "start_ns": slices.start_ns,
            "duration_ns": slices.duration_ns,
        }
        frames.append(pl.DataFrame(columns))
    steps = trace_steps(pl.concat(frames)) if frames else []
    rows = chosen(steps, wanted)
    if not rows:
        return None
    behind = max(_BEHIND_STEPS, _BEHIND_BYTES * len(steps) // max(1, _unpacked_bytes(path)))
    starts, walls = (np.array([row[name] for row in rows], np.int64) for name in ("start_ns", "wall_ns"))
    ends = starts + (1 + behind) * walls
    starts = starts - behind * walls
    apart = np.flatnonzero(starts[1:] > np.maximum.accumulate(ends)[:-1]) + 1
    return StepRange(starts[[0, *apart]], np.maximum.reduceat(ends, [0, *apart]))
