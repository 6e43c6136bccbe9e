"""What the readers hand on: rows as they were written, checked one by one, and what was lost on the way.

Nothing here is joined, classified or computed; `stepscope.tables` does that. Times are integer nanoseconds on the
epoch clock of the recording host. Text is always valid Unicode: a byte that was none stands as `\\xNN`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]


@dataclass
class Losses:
    """What a reader could not use, by kind; filled while reading and never read back by a reader.

    Kinds: `torn_lines` (a last line cut off by a kill), `bad_lines`, `skipped_records` and `skipped_samples` (stacks),
    `oversized_files`, `unreadable_files`, `user_traces_left_out`; of folders of traces `foreign_files` (JSON that is no
    trace), `duplicate_ranks` and `guessed_ranks` (files whose rank had to be made up), `missing_ranks`.
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


class RawStack(NamedTuple):
    """A distinct stack of a segment. `pids` lists ancestors first, the sampled process last; frames are root first."""

    pids: tuple[int, ...]
    thread: str | None
    thread_name: str | None
    frames: tuple[Frame, ...]
    samples: int


@dataclass(frozen=True)
class RawSegment:
    """A stretch of sampling. Fields are None where its line in stacks.jsonl is missing or silent."""

    number: int
    file: str
    source: str  # "py-spy" | "agent"
    pid: int | None
    start_ns: int | None
    end_ns: int | None
    rate_hz: float | None
    idle: bool | None
    blocking: bool | None
    samples: int | None
    errors: int | None
    status: str
    message: str
    stacks: tuple[RawStack, ...]


@dataclass(frozen=True)
class RawHost:
    """One `host-H` folder."""

    name: str  # the H of the folder's name
    folder: Path
    manifest: Row | None
    agents: tuple[Row, ...]
    processes: tuple[Row, ...]
    system: tuple[Row, ...]
    segments: tuple[RawSegment, ...]


@dataclass(frozen=True)
class TraceRef:
    """A trace file of a rank, not opened yet. `owner` is "stepscope" for a window of ours, else "user".

    `folder` is the file's folder relative to what was given, with forward slashes; "" for that itself and in a run
    folder. `claimed_rank` is what the file's metadata or its name says, None where neither does.
    """

    path: Path
    name: str  # the file's name without a .gz ending, or the path as the user's profiler wrote it
    owner: str
    folder: str = ""
    claimed_rank: int | None = None


@dataclass(frozen=True)
class RawRank:
    """One `rank-N` or `rank-N.K` folder; `steps` rows carry every name of `model.STEP_COLUMNS`."""

    name: str
    rank: int
    folder: Path
    info: Row | None  # rank.json
    steps: tuple[Row, ...]
    journal: tuple[Row, ...]
    traces: tuple[TraceRef, ...]


@dataclass(frozen=True)
class RawRun:
    """Everything that could be read of a run."""

    folder: Path
    hosts: tuple[RawHost, ...]
    ranks: tuple[RawRank, ...]
    losses: Losses
