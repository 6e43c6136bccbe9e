"""The tables of sampled stacks: paths of one tree, whose they are, what the thread was doing.

Frames are looked at once each, and a path that was met before costs one lookup per frame. What a stack's frames say
together becomes a few bits. Frames of this package are left out, and what they call in the standard library; its
wrappers hand over to the code they stand around. A loader worker's path begins at its worker loop, any other child's at
the last `Process.run`. A loader's `__next__` wins over everything inside it; of backward and optimizer the inner one
wins, and both over a forward inside them, as in the journal; but the closure that an optimizer of torch's calls is the
forward pass.

What a process was may be known only after all stacks were read, so rows get their owner at the end. Files that others
recorded have no index of processes: there the chains of process ids say who started whom (`foreign_processes`).

The journal calls forward all that runs from a batch to its backward pass. Where no frame says so, the time of a sample
does, unless steps are short beside the time between two samples or an optimizer's closure stands around the forward.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct, field

from stepscope.read.raw import Frame, FrameNames, Losses, RawHost, RawRank, RawSegment
from stepscope.tables import phases
from stepscope.tables.arrays import NONE, Int64, covered_before
from stepscope.tables.processes import ANY_FILE, HELPER, LAUNCHER, OTHER, RANK, WORKER, HostProcesses, Process
from stepscope.tables.schema import SCHEMAS, empty

MAX_NODES = 2_000_000  # some 400 MB; files of a gigabyte hold about half of it
_PATH_LEFT_OUT = Frame("(one of too many different call paths)", "", None)

# What a frame says by itself; a stack's bits are those of its frames, but for what `add` takes back.
OWN, OWN_WORK, ELSEWHERE, HELPER_BIT, WORKER_BIT = 1, 2, 4, 8, 16
DATA_WAIT, FORWARD, BACKWARD, OPTIMIZER, IMPORT, COMPILE = 32, 64, 128, 256, 512, 1024
_RUN = 2048  # `Process.run` of multiprocessing
TORN, LEAF_OWN, FROM_THREAD, FROM_MODULE, LEFT_OUT = 4096, 8192, 16384, 32768, 65536
STANDARD, HANDS_OVER = 262144, 524288  # the standard library; a frame of ours that calls the run's own code
IN_TORCH, UPDATE = 1048576, 2097152  # torch itself; the `step` of one of its optimizers
CLOSURE = 4194304  # below a closure that an optimizer calls
IMPORTING = 131072  # no phase begins below the import: a script that trains while it is imported does not import
_MARKED = DATA_WAIT | FORWARD | BACKWARD | OPTIMIZER
_BELOW_FORK = _MARKED | IMPORT | COMPILE | IMPORTING  # what the parent of a forked child did says nothing of the child
_SPECIAL = STANDARD | OWN | OWN_WORK | WORKER_BIT | _RUN | _MARKED  # more than a bit to add

_OWN_PACKAGE = f"{Path(__file__).parents[1]}/"
_OWN_PARTS = ("/stepscope/record/agent/",)  # the recorder may live in another environment than this reader
# Windows open and export on the training thread, between steps: none of the user's lines is to blame for that.
_OWN_WORK = "/stepscope/record/agent/window"
_HANDS_OVER = (
    "/stepscope/record/agent/wrapper_importlib_bootstrap.py",
    "/stepscope/record/agent/probes/wrapper_importlib_bootstrap.py",  # where it was in runs of earlier versions
    "/stepscope/record/agent/imports.py",
)
_IN_TORCH = re.compile(r"(^|/)torch/")
_STANDARD_LIBRARY = re.compile(r"/lib(64)?/python\d+(\.\d+)?t?/(?!site-packages/|dist-packages/)")
_WORKER_LOOP = "torch/utils/data/_utils/worker.py"
_PROCESS_FILE = "multiprocessing/process.py"
_HELPER_FILES = ("multiprocessing/resource_tracker.py", "multiprocessing/forkserver.py")
# What a main thread's stack starts with; without stopping the process, a sampler now and then reads a torn stack.
_ROOTS = {"<module>", "_run_module_as_main", "_run_code", "_bootstrap", "_shutdown", "_find_and_load", "_exit_function"}
# phase -> its bit; of several that a stack has, the first counts
_MARK_BITS = {
    phases.DATA_WAIT: DATA_WAIT,
    phases.BACKWARD: BACKWARD,
    phases.OPTIMIZER: OPTIMIZER,
    phases.FORWARD: FORWARD,
}


class CallPaths:
    """The tree under construction; `names` gives the frames their numbers."""

    def __init__(self, names: FrameNames, *, most: int = MAX_NODES) -> None:
        self._names = names
        self._most = most
        self._known: dict[int, int] = {}  # (parent + 1) << 32 | frame -> node
        self._parent, self._frame, self._depth = array("i"), array("i"), array("i")
        self._bits: list[int] = []  # by frame number
        self._first: list[int] = []  # of stacks that begin with the frame

    def add(self, frames: Sequence[int]) -> tuple[int, int]:
        """The node of a stack (-1 without a frame that is kept) and its bits."""
        if not frames:
            return NONE, 0
        self._look_at_new_frames()
        of_frame, known = self._bits, self._known
        node, bits, ours, updates = NONE, self._first[frames[0]], False, False
        for frame in frames:
            own = of_frame[frame]
            if own & _SPECIAL:
                if own & (OWN | OWN_WORK):
                    bits |= own
                    ours = not own & HANDS_OVER
                    if not ours and bits & OPTIMIZER:  # around the closure that any optimizer was given
                        bits = bits & ~OPTIMIZER | FORWARD | CLOSURE
                    continue
                if ours and own & STANDARD:
                    continue
                if (own & WORKER_BIT and not bits & WORKER_BIT) or (own & _RUN and not bits & WORKER_BIT and node >= 0):
                    node, bits = NONE, bits & ~_BELOW_FORK
                if own & _MARKED:
                    bits &= ~(IMPORTING | BACKWARD | OPTIMIZER) if own & (BACKWARD | OPTIMIZER) else ~IMPORTING
                    updates = bool(own & UPDATE)
            elif updates and not own & IN_TORCH:
                bits, updates = bits & ~OPTIMIZER | FORWARD | CLOSURE, False
            bits |= own
            ours = False
            below = known.get((node + 1) << 32 | frame)
            node = self._new(node, frame) if below is None else below
            if node == NONE:
                return self._left_out(), bits | LEFT_OUT
        if ours:
            bits |= LEAF_OWN
        return node, bits

    def _new(self, parent: int, frame: int) -> int:
        node = len(self._parent)
        if node >= self._most:
            return NONE
        self._known[(parent + 1) << 32 | frame] = node
        self._parent.append(parent)
        self._frame.append(frame)
        self._depth.append(self._depth[parent] + 1 if parent >= 0 else 0)
        return node

    def _left_out(self) -> int:
        """The one node that stands for all paths beyond the limit."""
        frame = self._names.number(_PATH_LEFT_OUT)
        self._look_at_new_frames()
        node = self._known.get(frame)
        if node is None:
            self._most = max(self._most, len(self._parent) + 1)
            node = self._new(NONE, frame)
            self._most = len(self._parent)
        return node

    def _look_at_new_frames(self) -> None:
        frames = self._names.frames
        for number in range(len(self._bits), len(frames)):
            bits = _bits_of(frames[number])
            self._bits.append(bits)
            self._first.append(_bits_of_root(frames[number], bits))

    def nodes_table(self) -> pl.DataFrame:
        own = {"parent": self._parent, "depth": self._depth, "frame": self._frame}
        columns = {name: np.array(values, np.int32) for name, values in own.items()}
        columns["node"] = np.arange(len(self._parent), dtype=np.int32)
        frame = pl.DataFrame(columns).select(list(SCHEMAS["nodes"]))
        return frame.with_columns(pl.when(pl.col("parent") >= 0).then("parent"))

    def frames_table(self) -> pl.DataFrame:
        rows = [(number, *frame) for number, frame in enumerate(self._names.frames)]
        return pl.DataFrame(rows, schema=SCHEMAS["frames"], orient="row")

    def waiting(self, node: npt.NDArray[np.int32], on_device: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Whether threads whose innermost frames are these nodes wait; `on_device` says which of them train on one.

        Below a wait a sampler that unwinds native code shows libc, so the innermost Python frame decides.
        """
        frames = self._names.frames
        waits = [np.array([phases.is_wait(frame, on_device=flag) for frame in frames], bool) for flag in (False, True)]
        if not len(self._frame):
            return np.zeros(len(node), bool)
        native = np.array([bool(frame.file) and not frame.file.endswith((".py", ">")) for frame in frames], bool)
        of_node, parent = np.frombuffer(self._frame, np.int32), np.frombuffer(self._parent, np.int32)
        at = node.copy()
        while (below := (at >= 0) & native[of_node[np.maximum(at, 0)]]).any():
            at[below] = parent[at[below]]
        leaf = of_node[np.maximum(at, 0)]
        found: npt.NDArray[np.bool_] = np.where(on_device, waits[1][leaf], waits[0][leaf]) & (at >= 0)
        return found


def phase_of(bits: int) -> str | None:
    """The phase that the frames of a rank's main thread mark; None where none does."""
    return next((phase for phase, bit in _MARK_BITS.items() if bits & bit), None)


def _bits_of(frame: Frame) -> int:
    if frame.file.startswith(_OWN_PACKAGE) or any(part in frame.file for part in _OWN_PARTS):
        hands_over = HANDS_OVER if frame.file.endswith(_HANDS_OVER) else 0
        return OWN | hands_over | (OWN_WORK if _OWN_WORK in frame.file else 0)
    name = phases.last_part(frame.function)
    mark = phases.phase_mark(frame)
    in_torch, updates = bool(_IN_TORCH.search(frame.file)), mark == phases.OPTIMIZER
    said = (
        (_MARK_BITS.get(mark or "", 0), True),
        (ELSEWHERE, not phases.in_file(frame.file, "threading.py")),
        (STANDARD, _STANDARD_LIBRARY.search(frame.file)),
        (IN_TORCH, in_torch),
        (UPDATE, in_torch and updates and not phases.in_file(frame.file, "torch/optim/optimizer.py")),
        (HELPER_BIT, any(phases.in_file(frame.file, file) for file in _HELPER_FILES)),
        (WORKER_BIT, name == "_worker_loop" and phases.in_file(frame.file, _WORKER_LOOP)),
        (_RUN, name == "run" and phases.in_file(frame.file, _PROCESS_FILE)),
        (IMPORT | IMPORTING, phases.imports(frame)),
        (COMPILE, phases.compiles(frame)),
    )
    return sum(bit for bit, is_so in said if is_so)


def _bits_of_root(frame: Frame, bits: int) -> int:
    if bits & OWN:
        return 0
    name = phases.last_part(frame.function)
    # Native frames (a library for a file) stand below Python's where a sampler unwinds them.
    found = 0 if name in _ROOTS or not frame.file.endswith((".py", ">")) else TORN
    if phases.in_file(frame.file, "threading.py"):
        return found | FROM_THREAD
    return found | (FROM_MODULE if name in _ROOTS else 0)


Progress = Callable[[str, int, int], None]
_OF_SEGMENTS = ("file", "source", "idle", "blocking", "start_ns", "end_ns", "errors", "status")


class Who(NamedTuple):
    """A sampled thread. `segment` is the position of its file where processes are known per file only, else -1."""

    host: int
    segment: int
    pids: tuple[int, ...]
    thread: str | None
    name: str | None


class Taken(Struct):
    """What reading the stacks of one host taught of its processes, by (segment or -1, pid)."""

    parents: dict[tuple[int, int], int | None] = field(default_factory=dict)
    workers: set[tuple[int, int | None]] = field(default_factory=set)
    training: set[tuple[int, int]] = field(default_factory=set)  # seen in a backward pass or an optimizer
    hints: dict[tuple[int, int], str] = field(default_factory=dict)
    anonymous: set[int] = field(default_factory=set)  # segments with stacks that name no process


class StackRows:
    """The stacks of all hosts, taken in once; `tables` joins them with their processes.

    `counts` then holds `stack_samples`, and of them `torn_stack_samples`, `own_stack_samples` and
    `left_out_path_samples` (of paths beyond the limit, which stand under one name).
    """

    def __init__(self, hosts: Sequence[RawHost], losses: Losses, progress: Progress | None = None) -> None:
        self.hosts = hosts
        self.taken = [Taken() for _ in hosts]
        self.counts: Counter[str] = Counter()
        self._names = FrameNames()
        self._paths = CallPaths(self._names)
        self._segments: list[tuple[int, RawSegment]] = []
        self._sums: list[tuple[int, int]] = []  # samples read and skipped, by segment
        self._who: dict[Who, int] = {}
        self._columns = {name: array("q") for name in ("segment", "who", "node", "samples", "bits")}
        self._stretches = {name: array("q") for name in ("row", "start_ns", "end_ns")}
        for number, host in enumerate(hosts):
            for segment in host.segments:
                self._take(number, segment, losses, progress)

    def _take(self, host: int, segment: RawSegment, losses: Losses, progress: Progress | None) -> None:
        position = len(self._segments)
        self._segments.append((host, segment))
        per_file = ANY_FILE if self.hosts[host].name else position
        skipped_before, first = losses.counts.get("skipped_samples", 0), len(self._columns["node"])
        rows: dict[int, int] = {}
        same: dict[tuple[int, int, int], int] = {}  # files may say one stack a million times
        report = (lambda done, size: progress(segment.file, done, size)) if progress is not None else None
        columns, total = self._columns, 0
        for stack in segment.stacks.read(self._names, losses, report):
            total += stack.samples
            node, bits = self._paths.add(stack.frames)
            pids = stack.pids or (() if segment.pid is None else (segment.pid,))
            who = Who(host, per_file, pids, stack.thread, stack.thread_name)
            key = (self._who.setdefault(who, len(self._who)), node, bits)
            row = rows[stack.record] = same.setdefault(key, len(columns["node"]))
            if row < len(columns["node"]):
                columns["samples"][row] += stack.samples
                continue
            columns["segment"].append(position)
            columns["who"].append(key[0])
            columns["node"].append(node)
            columns["samples"].append(stack.samples)
            columns["bits"].append(bits)
        if not segment.stretches.record:
            rows.clear()
        self._note_processes(self.taken[host], per_file, first)
        self.taken[host].hints.update({(per_file, pid): hint for pid, hint in segment.stacks.hints.items()})
        self._sums.append((total, losses.counts.get("skipped_samples", 0) - skipped_before))
        times = segment.stretches
        for record, start_ns, end_ns in zip(times.record, times.start_ns, times.end_ns, strict=True):
            if record in rows:
                self._stretches["row"].append(rows[record])
                self._stretches["start_ns"].append(start_ns)
                self._stretches["end_ns"].append(end_ns)

    def _note_processes(self, taken: Taken, per_file: int, first: int) -> None:
        everyone = list(self._who)
        pairs = set(zip(self._columns["who"][first:], self._columns["bits"][first:], strict=True))
        for number, bits in pairs:
            pids = everyone[number].pids
            if not pids:
                taken.anonymous.add(per_file)
            parents: list[int | None] = [None, *pids[:-1]] if pids else []
            for pid, parent in zip(pids, parents, strict=True):
                if taken.parents.get((per_file, pid)) is None:
                    taken.parents[(per_file, pid)] = parent
            if bits & WORKER_BIT:
                taken.workers.add((per_file, pids[-1] if pids else None))
            elif pids and bits & (BACKWARD | OPTIMIZER):
                taken.training.add((per_file, pids[-1]))

    def tables(self, processes: Sequence[HostProcesses], ranks: Sequence[RawRank]) -> dict[str, pl.DataFrame]:
        """The tables `segments`, `stacks`, `stretches`, `nodes` and `frames`; `processes` in the order of the hosts."""
        columns = {name: np.frombuffer(values, np.int64) for name, values in self._columns.items() if len(values)}
        found = {"segments": self._segments_table(), "stacks": empty("stacks"), "stretches": empty("stretches")}
        found |= {"nodes": self._paths.nodes_table(), "frames": self._paths.frames_table()}
        if not columns:
            return found
        table = self._table(columns, found["segments"], self._threads(processes, ranks), ranks)
        self.counts["stack_samples"] = int(columns["samples"].sum())
        for name in ("own", "torn"):
            self.counts[f"{name}_stack_samples"] = int(table.filter(pl.col(f"is_{name}"))["samples"].sum())
        left_out = pl.Series((columns["bits"] & LEFT_OUT) != 0)
        self.counts["left_out_path_samples"] = int(table.filter(left_out)["samples"].sum())
        kept = ~(pl.col("is_own") | pl.col("is_torn"))
        found["stacks"] = _as_table("stacks", table.filter(kept))
        if len(self._stretches["row"]):
            row, start_ns, end_ns = (np.frombuffer(values, np.int64) for values in self._stretches.values())
            stretches = table[row].with_columns(start_ns=pl.Series(start_ns), end_ns=pl.Series(end_ns))
            found["stretches"] = _as_table("stretches", stretches.filter(kept).with_columns(phase=_phase()))
        return found

    def _segments_table(self) -> pl.DataFrame:
        found: list[dict[str, Any]] = []
        for (host, segment), (samples, skipped) in zip(self._segments, self._sums, strict=True):
            known = segment.start_ns is not None and segment.end_ns is not None
            found.append(
                {
                    **{name: getattr(segment, name) for name in _OF_SEGMENTS},
                    "host": self.hosts[host].name,
                    "format": segment.stacks.format,
                    "unit": segment.stacks.unit,
                    "rate_hz": segment.rate_hz if segment.rate_hz is not None else segment.stacks.rate_hz,
                    "wall_ns": segment.end_ns - segment.start_ns if known else segment.stacks.wall_ns,  # type: ignore[operator]
                    "samples": samples,
                    "skipped_samples": skipped,
                    "timed": bool(segment.stretches.record),
                }
            )
        return pl.DataFrame(found, schema=SCHEMAS["segments"])

    def _threads(self, processes: Sequence[HostProcesses], ranks: Sequence[RawRank]) -> pl.DataFrame:
        """What is known of each thread: its process, the rank it belongs to, the process's role by itself."""
        found: list[dict[str, Any]] = []
        by_name = {rank.name: rank for rank in ranks}
        mains = {who[:4] for who in self._who if who.name == "MainThread"}
        for who in self._who:
            pid = who.pids[-1] if who.pids else None
            process = processes[who.host].by_pid.get((who.segment, pid))
            owner = processes[who.host].owner(who.segment, who.pids)
            rank = by_name.get(owner) if owner else None
            device = str(((rank.info if rank else None) or {}).get("device") or "cpu")
            steps = rank.steps if rank else ()
            claimed = process is not None and process.role == RANK and bool(process.claimed)
            if claimed:
                role = RANK
            elif (who.segment, pid) in self.taken[who.host].workers:
                role = WORKER
            elif process is not None:
                role = process.role or OTHER
            else:  # it lived too shortly to be seen from outside, or nothing was
                role = OTHER if processes[who.host].all or len(who.pids) != 1 else RANK
            found.append(
                {
                    "rank": rank.rank if rank else None,
                    "process": owner if rank else None,
                    "pid": pid,
                    "role": role,
                    "thread": who.thread,
                    "thread_name": who.name,
                    "is_claimed": claimed,
                    "is_main": None if who[3:] == (None, None) else who[:4] in mains or who.thread == str(pid),
                    "on_device": device.partition(":")[0] != "cpu",
                    "first_step_ns": steps[0]["start_ns"] if steps else None,
                }
            )
        schema = {name: SCHEMAS["stacks"][name] for name in ("rank", "process", "pid", "role", "thread", "thread_name")}
        more = {"is_claimed": pl.Boolean, "is_main": pl.Boolean, "on_device": pl.Boolean, "first_step_ns": pl.Int64}
        return pl.DataFrame(found, schema={**schema, **more})

    def _table(
        self, columns: Mapping[str, Any], segments: pl.DataFrame, threads: pl.DataFrame, ranks: Sequence[RawRank]
    ) -> pl.DataFrame:
        bits, threads = columns["bits"], threads[columns["who"]]
        numbers = pl.Series("segment", [segment.number for _, segment in self._segments], dtype=pl.Int64)
        files = segments.with_columns(numbers)[columns["segment"]]
        table = threads.hstack(
            files.select("host", "file", "source", "segment", "start_ns", "end_ns", "rate_hz", "blocking")
        )
        waits = self._paths.waiting(columns["node"].astype(np.int32), threads["on_device"].to_numpy())

        distinct, where = np.unique(bits, return_inverse=True)  # few different ones
        phase = pl.Series([phase_of(int(value)) for value in distinct], dtype=pl.String)

        def has(bit: int) -> pl.Series:
            return pl.Series((bits & bit) != 0)

        table = table.with_columns(
            node=pl.Series(columns["node"]).cast(pl.Int32),
            samples=pl.Series(columns["samples"]),
            waiting=pl.Series(waits),
            marked=phase[where],
            stage=pl.when(has(COMPILE)).then(pl.lit(phases.COMPILE)).when(has(IMPORTING)).then(pl.lit(phases.IMPORT)),
            importing=has(IMPORT),
            # a stack without a thread's name is a main thread's or not by its outermost frame
            main_thread=pl.coalesce("is_main", pl.when(has(FROM_THREAD)).then(False).when(has(FROM_MODULE)).then(True)),
            role=pl.when(~pl.col("is_claimed") & (pl.col("role") != WORKER) & has(HELPER_BIT))
            .then(pl.lit(HELPER))
            .otherwise("role"),
            own_work=has(OWN_WORK | LEAF_OWN),
            own_thread=has(OWN) & ~has(ELSEWHERE),  # it runs nothing but this package
            torn=has(TORN),
            in_closure=has(CLOSURE),
        )
        is_main = pl.col("main_thread").fill_null(False)
        is_own = pl.col("own_work") | (pl.col("own_thread") & ~is_main)
        table = table.with_columns(
            pl.col("node").replace(NONE, None),
            is_own=is_own,
            is_torn=~is_own & is_main & pl.col("torn") & ~pl.col("blocking").fill_null(True),
        )
        forward = mostly_forward(table, self._stretches, ranks)
        marked = pl.when(pl.col("marked").is_null() & ~pl.col("importing") & forward).then(pl.lit(phases.FORWARD))
        return table.with_columns(marked=marked.otherwise("marked")).with_columns(phase=_phase())


def _as_table(name: str, rows: pl.DataFrame) -> pl.DataFrame:
    return rows.select(pl.col(column).cast(dtype) for column, dtype in SCHEMAS[name].items())


def _phase() -> pl.Expr:
    before = (pl.col("end_ns") <= pl.col("first_step_ns")).fill_null(False)
    phase = (
        pl.when(before)
        .then(pl.lit(phases.STARTUP))
        .when(pl.col("marked").is_not_null())
        .then(pl.col("marked"))
        .when(pl.col("importing"))
        .then(pl.lit(phases.STARTUP))
        .otherwise(pl.lit(phases.OTHER))
    )
    return pl.when((pl.col("role") == RANK) & pl.col("main_thread").fill_null(False)).then(phase)


MOSTLY = 0.5  # of the time of a path in one segment: a line stands before the backward pass or behind it
SHORT = 4.0  # times between two samples that a step has to last: with less a sample's time tells no part; untuned
_BEFORE = ("data_wait_ns", "forward_ns", "backward_ns")


def mostly_forward(rows: pl.DataFrame, stretches: Mapping[str, Any], ranks: Sequence[RawRank]) -> pl.Series:
    """By row, whether most of its time lies in the forward part of steps.

    Args:
        rows: `process`, `rate_hz`, and `in_closure`: the row stands in a closure that an optimizer calls.
        stretches: `row`, `start_ns`, `end_ns` of what the sampler gave times.
    """
    count = rows.height
    inside, whole = np.zeros(count), np.zeros(count)
    if not len(stretches.get("row", ())):
        return pl.Series(inside > whole, dtype=pl.Boolean)
    row = np.asarray(stretches["row"])
    start, end = np.asarray(stretches["start_ns"]), np.asarray(stretches["end_ns"])
    process = rows["process"].fill_null("")[row].to_numpy()
    for rank in ranks:
        own = process == rank.name
        mine = rows.filter(pl.col("process") == rank.name)
        if mine["in_closure"].any():
            continue
        steps = _forward_parts(rank, mine["rate_hz"].median())
        if own.any() and len(steps[0]):
            np.add.at(inside, row[own], covered_before(*steps, end[own]) - covered_before(*steps, start[own]))
            np.add.at(whole, row[own], np.maximum(end[own] - start[own], 1))
    return pl.Series(inside > MOSTLY * whole, dtype=pl.Boolean)


def _forward_parts(rank: RawRank, rate_hz: object) -> tuple[Int64, Int64]:
    """Where each step's forward part begins and ends; without a loader the first module begins it."""
    walls = [step["wall_ns"] for step in rank.steps if step["wall_ns"] is not None]
    long = isinstance(rate_hz, float) and rate_hz > 0 and sum(walls) * rate_hz >= SHORT * 1e9 * len(walls)
    known = [row for row in rank.steps if long and row["start_ns"] is not None and row["forward_ns"] is not None]
    begins = [row["start_ns"] + (0 if row["fetches"] else row["data_wait_ns"] or 0) for row in known]
    ends = [row["start_ns"] + sum(row[name] or 0 for name in _BEFORE) for row in known]
    found = np.array(sorted(zip(begins, ends, strict=True)), np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]


_ROLE_OF_HINT = {"launcher": LAUNCHER, "helper": HELPER}
_Key = tuple[int, int]  # position of the file, pid


def foreign_processes(host: RawHost, taken: Taken, first_rank: int) -> tuple[HostProcesses, tuple[RawRank, ...]]:
    """The processes of the host's files, and their ranks, numbered from `first_rank` on by file and process id.

    A launcher's children, and processes that nobody else started, train: they are the ranks. A process whose child
    trains while it does not is a launcher too. Process ids of different files are never taken for each other.
    """
    found = HostProcesses(host.name)
    roles = _roles(taken)
    for key in sorted(taken.parents):
        process = found.by_pid[key] = Process(key[1], ppid=taken.parents[key], role=roles[key], python=True)
        found.all.append(process)
    named = {segment for segment, _ in taken.parents}
    for segment in sorted(taken.anonymous - named):
        found.by_pid[segment, None] = Process(-1, role=RANK, python=True)
    ranks: list[RawRank] = []
    for (_, pid), process in sorted(found.by_pid.items(), key=lambda one: (one[0][0], one[0][1] or 0)):
        if process.role != RANK:
            continue
        number = first_rank + len(ranks)
        process.claimed = f"rank-{number}"
        process.reported = True  # no agent was asked to
        info = {"rank": number, "pid": pid, "device": None, "host": host.name}
        ranks.append(RawRank(process.claimed, number, info, (), (), ()))
    return found, tuple(ranks)


def _roles(taken: Taken) -> dict[_Key, str]:
    roles: dict[_Key, str] = {}
    trains = taken.training - {key for key in taken.workers if key[1] is not None}
    launches = {parent for key in trains for parent in _ancestors(key, taken) if parent not in trains}
    for key in sorted(taken.parents, key=lambda key: len(list(_ancestors(key, taken)))):
        hint = taken.hints.get(key)
        above = [roles.get(parent) for parent in _ancestors(key, taken)]
        if key in taken.workers:
            roles[key] = WORKER
        elif hint in _ROLE_OF_HINT:
            roles[key] = _ROLE_OF_HINT[hint]
        elif key in launches:
            roles[key] = LAUNCHER
        elif RANK not in above and WORKER not in above:
            roles[key] = RANK
        else:
            roles[key] = WORKER if hint == "spawned" else OTHER
    return roles


def _ancestors(key: _Key, taken: Taken) -> Iterable[_Key]:
    seen = {key}
    while True:
        parent = taken.parents.get(key)
        if parent is None or (key[0], parent) in seen:
            return
        key = (key[0], parent)
        seen.add(key)
        yield key
