"""The table of sampled stacks: whose they are, what the thread was doing, our own frames and fork leftovers removed.

A training run repeats few distinct stacks in many segments, so each is classified once. Frames are stored as lists of
structs, assembled from a table of distinct frames, which is what keeps an hour of sampling affordable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl

from stepscope.read.raw import Frame, RawHost, RawRank, RawSegment, RawStack
from stepscope.tables import phases
from stepscope.tables.processes import HELPER, OTHER, RANK, WORKER, HostProcesses
from stepscope.tables.schema import FRAME, SCHEMAS

_OWN_PACKAGE = f"{Path(__file__).parents[1]}/"
_OWN_PARTS = ("/stepscope/record/agent/",)  # the recorder may live in another environment than this reader
# Windows open and export on the training thread, between steps: none of the user's lines is to blame for that.
_OWN_WORK = "/stepscope/record/agent/window"
_WORKER_LOOP = "torch/utils/data/_utils/worker.py"
_PROCESS_FILE = "multiprocessing/process.py"
_HELPER_FILES = ("multiprocessing/resource_tracker.py", "multiprocessing/forkserver.py")
# What a main thread's stack starts with; without stopping the process, a sampler now and then reads a torn stack.
_ROOTS = {"<module>", "_run_module_as_main", "_run_code", "_bootstrap", "_shutdown", "_find_and_load", "_exit_function"}


@dataclass(frozen=True)
class StacksTable:
    """The stacks, with counts: `stack_samples`, `torn_stack_samples`, `own_stack_samples`."""

    frame: pl.DataFrame
    counts: Counter[str]


class _Shape(NamedTuple):
    """What follows from the frames alone."""

    frames: tuple[Frame, ...]
    is_own_thread: bool
    is_own_work: bool
    is_worker: bool
    is_helper: bool
    is_torn: bool
    phase: str | None
    importing: bool
    leaf_is_own: bool


def stacks_table(
    hosts: Iterable[RawHost], processes: dict[str, HostProcesses], ranks: Sequence[RawRank]
) -> StacksTable:
    """All stacks of all hosts; `processes` by host name."""
    builder = _Builder({rank.name: rank for rank in ranks})
    for host in hosts:
        builder.note_workers(host)
        for segment in host.segments:
            for stack in segment.stacks:
                builder.add(host.name, segment, stack, processes[host.name])
    return StacksTable(builder.table(), builder.counts)


class _Builder:
    def __init__(self, ranks: dict[str, RawRank]) -> None:
        self.counts: Counter[str] = Counter()
        self._ranks = ranks
        self._first_step = {name: rank.steps[0]["start_ns"] for name, rank in ranks.items() if rank.steps}
        self._on_device = {
            name: str((rank.info or {}).get("device") or "cpu").partition(":")[0] != "cpu"
            for name, rank in ranks.items()
        }
        self._shapes: dict[tuple[Frame, ...], _Shape] = {}
        self._workers: set[int | None] = set()  # pids of the current host seen in a loader worker's loop
        self._rows: list[tuple[Any, ...]] = []
        self._frames: dict[Frame, int] = {}
        self._frame_rows: list[int] = []
        self._frame_ids: list[int] = []

    def note_workers(self, host: RawHost) -> None:
        """A worker's other threads do not show its loop, so its pid is learnt before its stacks are added."""
        stacks = ((segment, stack) for segment in host.segments for stack in segment.stacks)
        self._workers = {_pid(segment, stack) for segment, stack in stacks if self._shape(stack.frames).is_worker}

    def add(self, host: str, segment: RawSegment, stack: RawStack, processes: HostProcesses) -> None:
        shape = self._shape(stack.frames)
        self.counts["stack_samples"] += stack.samples
        pid = _pid(segment, stack)
        main = stack.thread_name == "MainThread" or (stack.thread is not None and stack.thread == str(pid))
        if shape.is_own_work or (shape.is_own_thread and not main):
            self.counts["own_stack_samples"] += stack.samples
            return
        if main and shape.is_torn and segment.blocking is False:
            self.counts["torn_stack_samples"] += stack.samples
            return
        owner = processes.owner(stack.pids or (() if pid is None else (pid,)))
        role = _role(shape, pid, pid in self._workers, segment, processes)
        rank = self._ranks.get(owner) if owner else None
        phase = self._phase(shape, segment, owner) if role == RANK and main else None
        waits = phases.is_waiting(shape.frames, on_device=self._on_device.get(owner or "", False))
        waiting = None if segment.idle is None else waits and not shape.leaf_is_own
        self._keep_frames(shape.frames)
        self._rows.append(
            (
                host, segment.source, segment.number, rank.rank if rank else None, owner if rank else None, pid, role,
                stack.thread, stack.thread_name, main, stack.samples, waiting, phase,
                segment.start_ns, segment.end_ns, segment.rate_hz,
            )
        )  # fmt: skip

    def table(self) -> pl.DataFrame:
        schema = SCHEMAS["stacks"]
        plain = {name: dtype for name, dtype in schema.items() if name != "frames"}
        rows = pl.DataFrame(self._rows, schema=plain, orient="row")
        distinct = pl.Series([frame._asdict() for frame in self._frames], dtype=FRAME)
        used = distinct.gather(pl.Series(self._frame_ids, dtype=pl.UInt32)) if self._frame_ids else distinct.clear()
        numbered = pl.DataFrame({"row": pl.Series(self._frame_rows, dtype=pl.UInt32), "frames": used})
        lists = numbered.group_by("row", maintain_order=True).agg("frames")
        joined = rows.with_row_index("row").join(lists, on="row", how="left", maintain_order="left")
        no_frames = pl.lit([], dtype=pl.List(FRAME))
        return joined.with_columns(pl.col("frames").fill_null(no_frames)).select(list(schema))

    def _keep_frames(self, frames: Sequence[Frame]) -> None:
        row = len(self._rows)
        known = self._frames
        self._frame_ids.extend(known.setdefault(frame, len(known)) for frame in frames)
        self._frame_rows.extend([row] * len(frames))

    def _shape(self, frames: tuple[Frame, ...]) -> _Shape:
        shape = self._shapes.get(frames)
        if shape is None:
            shape = self._shapes[frames] = _shape_of(frames)
        return shape

    def _phase(self, shape: _Shape, segment: RawSegment, owner: str | None) -> str:
        first_step = self._first_step.get(owner or "")
        if first_step is not None and segment.end_ns is not None and segment.end_ns <= first_step:
            return phases.STARTUP
        if shape.phase is not None:
            return shape.phase
        return phases.STARTUP if shape.importing else phases.OTHER


def _shape_of(frames: tuple[Frame, ...]) -> _Shape:
    own = [_is_own(frame.file) for frame in frames]
    kept = tuple(frame for frame, ours in zip(frames, own, strict=True) if not ours)
    worker_at = _index(kept, "_worker_loop", _WORKER_LOOP)
    cut = _after_fork(kept) if worker_at is None else kept[worker_at:]
    return _Shape(
        frames=cut,
        is_own_thread=any(own) and all(phases.in_file(frame.file, "threading.py") for frame in kept),
        is_own_work=any(_OWN_WORK in frame.file for frame in frames),
        is_worker=worker_at is not None,
        is_helper=any(phases.in_file(frame.file, file) for frame in kept for file in _HELPER_FILES),
        is_torn=bool(frames) and not own[0] and not _is_root(frames[0]),
        phase=phases.phase_of(cut),
        importing=phases.imports(cut),
        leaf_is_own=bool(own) and own[-1],
    )


def _is_own(file: str) -> bool:
    return file.startswith(_OWN_PACKAGE) or any(part in file for part in _OWN_PARTS)


def _is_root(frame: Frame) -> bool:
    # Native frames (a library for a file) stand below Python's where a sampler unwinds them.
    return phases.last_part(frame.function) in _ROOTS or not frame.file.endswith((".py", ">"))


def _after_fork(frames: tuple[Frame, ...]) -> tuple[Frame, ...]:
    """A forked child's stack starts with its parent's; what it runs itself begins at the last `Process.run`."""
    for index in range(len(frames) - 1, 0, -1):
        frame = frames[index]
        if phases.last_part(frame.function) == "run" and phases.in_file(frame.file, _PROCESS_FILE):
            return frames[index:]
    return frames


def _index(frames: Sequence[Frame], function: str, file: str) -> int | None:
    for index, frame in enumerate(frames):
        if phases.last_part(frame.function) == function and phases.in_file(frame.file, file):
            return index
    return None


def _pid(segment: RawSegment, stack: RawStack) -> int | None:
    return stack.pids[-1] if stack.pids else segment.pid


def _role(shape: _Shape, pid: int | None, is_worker: bool, segment: RawSegment, processes: HostProcesses) -> str:
    process = processes.by_pid.get(pid) if pid is not None else None
    if process is not None and process.role == RANK and process.claimed:
        return RANK
    if is_worker:
        return WORKER
    if shape.is_helper:
        return HELPER
    if process is not None:
        return process.role or OTHER
    if processes.all:
        return OTHER  # it lived too shortly to be seen from outside
    return RANK if pid is not None and pid == segment.pid else OTHER
