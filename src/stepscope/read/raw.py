"""What the readers hand on: rows as they were written, checked one by one, and what was lost on the way.

Nothing here is joined, classified or computed; `stepscope.tables` does that. Times are integer nanoseconds on the
epoch clock of the recording host. Text is always valid Unicode: a byte that was none stands as `\\xNN`.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

Row = dict[str, Any]


class Losses(Struct):
    """What a reader could not use, by kind; filled while reading and never read back by a reader.

    Kinds: `torn_lines` (a last line cut off by a kill), `bad_lines`, `oversized_files`, `unreadable_files`,
    `user_traces_left_out`; of stacks `skipped_records`, `skipped_samples`, `bad_stretches` (times), `cut_off_files`
    (packed, and damaged in the middle) and `other_units` (profiles that count something else than the file's first);
    of event files `bad_events` (records) and `cut_off_event_files`; of folders `foreign_files` (of another kind; among
    traces only JSON is looked at); of traces `duplicate_ranks` and `guessed_ranks` (files whose rank had to be made
    up), `missing_ranks`.
    """

    counts: Counter[str] = field(default_factory=Counter)
    files: dict[str, list[str]] = field(default_factory=dict)  # kind -> the files it happened in

    def add(self, kind: str, file: str, count: int = 1) -> None:
        """Count `count` losses of `kind` in `file` (a path inside the run folder)."""
        if count <= 0:
            return
        self.counts[kind] += count
        names = self.files.setdefault(kind, [])
        if file not in names:
            names.append(file)


class Frame(NamedTuple):
    """One frame of a sampled stack; `file` is empty and `line` None where the sampler could not tell."""

    function: str
    file: str
    line: int | None


class FrameNames:
    """Numbers for frames. The same few thousand frames make up all stacks of a run, so stacks hold numbers."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self._numbers: dict[Frame, int] = {}

    def number(self, frame: Frame) -> int:
        known = self._numbers.setdefault(frame, len(self.frames))
        if known == len(self.frames):
            self.frames.append(frame)
        return known


class RawStack(NamedTuple):
    """A distinct stack of a file. `pids` lists ancestors first, the sampled process last; frames are root first.

    `samples` is in the unit of its file. `record` counts the file's records from 0 on, unreadable ones included.
    """

    pids: tuple[int, ...]
    thread: str | None
    thread_name: str | None
    frames: tuple[int, ...]
    samples: int
    record: int


class Stretches(Struct):
    """Times in which a thread stood in one stack, as columns: a day of sampling has millions of them.

    `record` is the stack's in its file; times are on the run's clock.
    """

    record: array[int] = field(default_factory=lambda: array("q"))
    start_ns: array[int] = field(default_factory=lambda: array("q"))
    end_ns: array[int] = field(default_factory=lambda: array("q"))


Progress = Callable[[int, int], None]  # bytes of a file consumed, and its size
SAMPLES = "samples"


class StackSource:
    """A file of sampled stacks that is read once, as a stream. What only its content tells is there afterwards.

    `label` names the file in the losses. `tool` is who wrote it and `format` how ("py-spy raw", "speedscope",
    "collapsed"). `unit` is of every count: "samples", or "us" or "bytes" where the file holds weights. `idle` (whether
    waiting threads were sampled), `rate_hz` and `wall_ns` are None where nothing tells them. `hints` maps pids to what
    their command lines said: "launcher", "helper" or "spawned" (a child that multiprocessing started).
    """

    format = ""

    def __init__(self, path: Path, label: str | None = None, *, tool: str = "unknown") -> None:
        self.path = path
        self.label = label or path.name
        self.tool = tool
        self.idle: bool | None = None
        self.unit = SAMPLES
        self.rate_hz: float | None = None
        self.wall_ns: int | None = None
        self.hints: dict[int, str] = {}

    def read(self, names: FrameNames, losses: Losses, progress: Progress | None = None) -> Iterator[RawStack]:
        """The stacks; what cannot be read is counted in `losses`."""
        raise NotImplementedError


class RawSegment(Struct, frozen=True, kw_only=True):
    """A stretch of sampling, or a file of stacks that others recorded. Fields are None where nothing tells them."""

    number: int
    file: str
    source: str  # "py-spy" | "agent", or the tool that wrote a third-party file
    status: str
    stacks: StackSource
    pid: int | None = None
    start_ns: int | None = None
    end_ns: int | None = None
    rate_hz: float | None = None
    idle: bool | None = None
    blocking: bool | None = None
    errors: int | None = None
    stretches: Stretches = field(default_factory=Stretches)  # empty where no sample's time is known


class RawHost(Struct, frozen=True):
    name: str  # the H of the folder's name
    manifest: Row | None = None
    agents: tuple[Row, ...] = ()
    processes: tuple[Row, ...] = ()
    system: tuple[Row, ...] = ()
    segments: tuple[RawSegment, ...] = ()


class TraceRef(Struct, frozen=True):
    """A trace file of a rank, not opened yet. `owner` is "stepscope" for a window of ours, else "user".

    `folder` is the file's folder relative to what was given, with forward slashes; "" for that itself and in a run
    folder. `claimed_rank` is what the file's metadata or its name says, None where neither does.
    """

    path: Path
    name: str  # the file's name without a .gz ending, or the path as the user's profiler wrote it
    owner: str
    folder: str = ""
    claimed_rank: int | None = None


class RawSeries(Struct, frozen=True):
    """A stretch of one curve: `times_ns` and `values` of n points; NaN and infinities are values.

    `updates` (n or None) counts the optimizer steps that ended before each value; -1 minus that where one is under way.
    """

    name: str
    source: str
    times_ns: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    updates: npt.NDArray[np.int64] | None = None
    optimizers: npt.NDArray[np.int64] | None = None  # the number of the one that made the update
    about: Row = field(default_factory=dict)  # what is known of all values: the line, the largest norm
    steps: npt.NDArray[np.int64] | None = None  # of each value, where a file tells them; negative: before the first


class RawRank(Struct, frozen=True):
    """One `rank-N` or `rank-N.K` folder; `steps` rows carry every name of `model.STEP_COLUMNS`."""

    name: str
    rank: int
    info: Row | None = None  # rank.json
    steps: tuple[Row, ...] = ()
    journal: tuple[Row, ...] = ()
    traces: tuple[TraceRef, ...] = ()
    last_word: Row | None = None  # what the journal had no room for
    metrics: tuple[RawSeries, ...] = ()


class RawRun(Struct, frozen=True):
    folder: Path
    hosts: tuple[RawHost, ...]
    ranks: tuple[RawRank, ...]
    losses: Losses
    accounting: tuple[Row, ...] | None = None  # rows of sacct.txt, `read.accounting`; None: there is none
