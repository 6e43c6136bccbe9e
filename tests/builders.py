"""Small tables for tests, made of plain values; `run_folders` writes the files of a recording.

`make_tables` builds the typed tables an analysis reads, without any file. Rows are dicts of the columns in question;
every other column gets a usual value or null. `step_rows` makes a whole series of steps. Times start at `T0` on the
epoch clock; `MS` is a millisecond in ns.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import polars as pl

from stepscope.model import Note, Quality, RunFacts
from stepscope.tables.schema import SCHEMAS, RankInfo, Tables

T0 = 1_750_000_000_000_000_000
MS = 1_000_000
PID = 100
_USUAL_COMPILE = {"kind": "compile", "backend": "torch.compile", "count": 1}
PHASE_COLUMNS = ("data_wait_ns", "forward_ns", "backward_ns", "optimizer_ns", "other_ns")

Row = Mapping[str, Any]


def step_rows(
    count: int,
    *,
    data_wait_ms: float = 1,
    forward_ms: float = 3,
    backward_ms: float = 4,
    optimizer_ms: float = 1,
    other_ms: float = 1,
    start_ns: int = T0,
    first_step: int = 0,
    **columns: Any,
) -> list[dict[str, Any]]:
    """`count` equal steps, back to back from `start_ns`; `columns` are set on each of them."""
    phases = [round(ms * MS) for ms in (data_wait_ms, forward_ms, backward_ms, optimizer_ms, other_ms)]
    wall = sum(phases)
    return [
        {
            "step": first_step + i,
            "start_ns": start_ns + i * wall,
            "wall_ns": wall,
            **dict(zip(PHASE_COLUMNS, phases, strict=True)),
            **columns,
        }
        for i in range(count)
    ]


def full_steps(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows with every step column: number, start and wall follow from the others where they are missing."""
    result: list[dict[str, Any]] = []
    clock = T0
    for number, row in enumerate(rows):
        phases = [row.get(name) for name in PHASE_COLUMNS]
        wall = row.get("wall_ns")
        if wall is None:
            wall = sum(value for value in phases if value is not None) or 10 * MS
        full: dict[str, Any] = {
            "step": number,
            "kind": "train",
            "epoch": 0,
            "start_ns": clock,
            "wall_ns": wall,
            **dict.fromkeys(PHASE_COLUMNS),
            "device_ns": None,
            "samples": 8,
            "fetches": 1,
            "first_batch": number == 0,
            "in_window": False,
            "signal": "optimizer",
            "framework_step": None,
            "minor_faults": None,
            "major_faults": None,
            **row,
        }
        clock = full["start_ns"] + full["wall_ns"]
        result.append(full)
    return result


def make_tables(
    *,
    steps: Iterable[Row] = (),
    stacks: Iterable[Row] = (),
    stretches: Iterable[Row] = (),
    segments: Iterable[Row] | None = None,
    events: Iterable[Row] = (),
    links: Iterable[Row] = (),
    traces: Iterable[Row] = (),
    journal: Iterable[Row] = (),
    system: Iterable[Row] = (),
    processes: Iterable[Row] = (),
    compiles: Iterable[Row] = (),
    counters: Iterable[Row] = (),
    memory: Iterable[Row] = (),
    metrics: Iterable[Row] = (),
    run: Mapping[str, Any] | None = None,
    ranks: Sequence[RankInfo] | None = None,
    manifests: Sequence[dict[str, Any]] = (),
    counts: Mapping[str, int] | None = None,
    notes: Sequence[Note] = (),
) -> Tables:
    """Tables of one run from partial rows.

    `journal` rows may carry the kind's own fields beside the columns (`{"kind": "gc", "generation": 2}`); they end up
    in `data`. `stacks` and `stretches` rows may hold `frames` instead of a node: `"function (file:line)"` strings or
    mappings, root first. `segments` are made from the stacks when None. `events` rows get ids by position; `parent`
    and `frame` are ids. `links` rows name a device slice by its id in `event`; with a `launch` or an `operator` they
    count as linked by correlation. `run` overrides fields of `RunFacts`.
    """
    in_rank = {"rank": 0, "process": "rank-0"}
    step_table = full_steps(steps)
    paths = Paths()
    stack_rows = [_stack_row(row, paths) for row in stacks]
    stretch_rows = [_stretch_row(row, paths) for row in stretches]
    event_rows = [_event_row(i, {**in_rank, **row}) for i, row in enumerate(events)]
    trace_rows = [_trace_row({**in_rank, **row}) for row in traces]
    rank_numbers = sorted({row.get("rank", 0) for row in step_table} or {0})
    return Tables(
        run=run_facts(ranks=tuple(rank_numbers), world_size=len(rank_numbers), **(run or {})),
        quality=Quality(counts=dict(counts or {}), notes=tuple(notes)),
        ranks=tuple(ranks) if ranks is not None else tuple(rank_info(rank) for rank in rank_numbers),
        manifests=tuple(manifests),
        steps=_frame("steps", [{**in_rank, **row} for row in step_table]),
        journal=_frame("journal", [_journal_row({**in_rank, **row}) for row in journal]),
        events=_frame("events", event_rows),
        links=_frame("links", [_link_row({"process": "rank-0", **row}) for row in links]),
        traces=_frame("traces", [*trace_rows, *_unlisted(event_rows, trace_rows)]),
        segments=_frame("segments", _segment_rows(stack_rows, stretch_rows) if segments is None else list(segments)),
        stacks=_frame("stacks", stack_rows),
        stretches=_frame("stretches", stretch_rows),
        nodes=_frame("nodes", paths.nodes),
        frames=_frame("frames", paths.frames),
        system=_frame("system", [{"host": "host-a", "time_ns": T0, "value": 0.0, **row} for row in system]),
        processes=_frame("processes", [_process_row(row) for row in processes]),
        compiles=_frame("compiles", [{**in_rank, "time_ns": T0, **_USUAL_COMPILE, **row} for row in compiles]),
        counters=_frame("counters", [{**in_rank, **row} for row in counters]),
        memory=_frame("memory", [{**in_rank, "time_ns": T0, **row} for row in memory]),
        metrics=_frame("metrics", [{**in_rank, "time_ns": T0, "source": "log", **row} for row in metrics]),
    )


def run_facts(**overrides: Any) -> RunFacts:
    """RunFacts of a run on one CPU host, with fields replaced."""
    values: dict[str, Any] = {
        "folder": "/runs/demo",
        "name": "demo",
        "tags": (),
        "command": ("python", "train.py"),
        "cwd": "/home/user/project",
        "started_ns": T0 - 1000 * MS,
        "ended_ns": T0 + 60_000 * MS,
        "exit_status": 0,
        "hosts": ("host-a",),
        "ranks": (0,),
        "world_size": 1,
        "versions": {"python": "3.11.7", "torch": "2.13.0+cpu"},
        "hardware": {"cpu_model": "Test CPU", "logical_cores": 8, "physical_cores": 4, "affinity": list(range(8))},
        "noise": {},
        "git": None,
        "user_roots": ("/home/user/project",),
    }
    return RunFacts(**{**values, **overrides})


def rank_info(rank: int = 0, **overrides: Any) -> RankInfo:
    """RankInfo of a CPU rank, with fields replaced."""
    values: dict[str, Any] = {
        "rank": rank,
        "process": f"rank-{rank}",
        "pid": PID + rank,
        "host": "host-a",
        "world_size": 1,
        "device": "cpu",
        "main_file": "/home/user/project/train.py",
        "started_ns": T0 - 1000 * MS,
        "versions": {"python": "3.11.7", "torch": "2.13.0+cpu"},
    }
    return RankInfo(**{**values, **overrides})


def frame_of(text: str) -> dict[str, Any]:
    """`"main (train.py:3)"` as a frame; the line is null where none is given."""
    head, _, tail = text.rpartition(" (")
    if not head or not tail.endswith(")"):
        return {"function": text, "file": "", "line": None}
    file, _, line = tail[:-1].rpartition(":")
    if not file or not line.isdigit():
        return {"function": head, "file": tail[:-1], "line": None}
    return {"function": head, "file": file, "line": int(line)}


def _frame(name: str, rows: Sequence[Row]) -> pl.DataFrame:
    schema = SCHEMAS[name]
    unknown = {key for row in rows for key in row} - set(schema)
    if unknown:
        raise ValueError(f"table {name} has no column {sorted(unknown)}")
    return pl.DataFrame([{column: row.get(column) for column in schema} for row in rows], schema=schema, strict=True)


def _journal_row(row: Row) -> dict[str, Any]:
    columns = SCHEMAS["journal"]
    own = {key: value for key, value in row.items() if key not in columns}
    known = {key: value for key, value in row.items() if key in columns}
    return {"time_ns": T0, "data": json.dumps(own), **known}


def _event_row(index: int, row: Row) -> dict[str, Any]:
    duration = row.get("duration_ns", MS)
    usual = {
        "id": index,
        "trace": "trace-0.pt.trace.json",
        "track": f"{PID}/{PID}",
        "category": "cpu_op",
        "start_ns": T0,
        "duration_ns": duration,
        "self_ns": duration,
        "depth": 0,
    }
    return {**usual, **row}


def _link_row(row: Row) -> dict[str, Any]:
    linked = row.get("operator") is not None
    usual = {
        "trace": "trace-0.pt.trace.json",
        "method": "correlation" if linked or row.get("launch") is not None else None,
        "state": "linked" if linked else "unlinked" if row.get("launch") is not None else "before_recording",
        "forward_method": "sequence" if row.get("forward") is not None else None,
    }
    return {**usual, **row}


def _trace_row(row: Row) -> dict[str, Any]:
    counts = dict.fromkeys(("events", "salvaged", "lost", "unsupported", "clipped", "repaired"), 0)
    usual = {"trace": "trace-0.pt.trace.json", "owner": "user", "problems": [], "metadata": "{}", "threads": "{}"}
    return {**usual, **counts, **row}


def _unlisted(events: list[dict[str, Any]], traces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of `traces` for those that only slices name."""
    listed = {(row["process"], row["trace"]) for row in traces}
    found = {(row["process"], row["trace"]): row["rank"] for row in events}
    return [
        _trace_row({"process": process, "trace": trace, "rank": rank, "owner": "stepscope"})
        for (process, trace), rank in found.items()
        if (process, trace) not in listed
    ]


class Paths:
    """Rows of the tables `nodes` and `frames`, made as paths are asked for."""

    def __init__(self) -> None:
        self.nodes: list[Row] = []
        self.frames: list[Row] = []
        self._known: dict[Any, int] = {}

    def node(self, frames: Iterable[str | Mapping[str, Any]]) -> int | None:
        """The node of the innermost of `frames`, root first; None without frames."""
        node: int | None = None
        for depth, item in enumerate(frames):
            frame = frame_of(item) if isinstance(item, str) else item
            key = ("frame", frame["function"], frame["file"], frame["line"])
            if key not in self._known:
                self._known[key] = len(self.frames)
                self.frames.append({"frame": len(self.frames), **frame})
            path = (node, self._known[key])
            if path not in self._known:
                self._known[path] = len(self.nodes)
                self.nodes.append({"node": len(self.nodes), "parent": node, "depth": depth, "frame": path[1]})
            node = self._known[path]
        return node


def _stack_row(row: Row, paths: Paths) -> dict[str, Any]:
    pid = row.get("pid", PID)
    usual = {
        "host": "host-a",
        "file": "stacks-0.raw",
        "source": "py-spy",
        "segment": 0,
        "rank": 0,
        "process": "rank-0",
        "pid": pid,
        "role": "rank",
        "thread": str(pid),
        "thread_name": "MainThread",
        "main_thread": True,
        "samples": 1,
        "waiting": False,
        "phase": "other" if row.get("role", "rank") == "rank" else None,
        "start_ns": T0,
        "end_ns": T0 + 5000 * MS,
        "rate_hz": 100.0,
    }
    plain = {name: value for name, value in row.items() if name != "frames"}
    return {**usual, "node": paths.node(row.get("frames", ())), **plain}


def _stretch_row(row: Row, paths: Paths) -> dict[str, Any]:
    stack = _stack_row(row, paths)
    return {name: value for name, value in stack.items() if name in SCHEMAS["stretches"]}


def _segment_rows(stacks: Sequence[Row], stretches: Sequence[Row]) -> list[Row]:
    """One row per host and file of the stacks."""
    timed = {(row["host"], row["file"]) for row in stretches}
    found: dict[tuple[str, str], Row] = {}
    for row in stacks:
        key = (row["host"], row["file"])
        usual = {
            "host": key[0],
            "file": key[1],
            "source": row["source"],
            "format": "py-spy raw",
            "unit": "samples",
            "idle": True,
            "blocking": False,
            "rate_hz": row["rate_hz"],
            "start_ns": row["start_ns"],
            "end_ns": row["end_ns"],
            "wall_ns": None if row["start_ns"] is None or row["end_ns"] is None else row["end_ns"] - row["start_ns"],
            "samples": 0,
            "skipped_samples": 0,
            "errors": 0,
            "status": "ok",
            "timed": key in timed,
        }
        found.setdefault(key, usual)["samples"] += row["samples"]
    return list(found.values())


def _process_row(row: Row) -> dict[str, Any]:
    usual = {
        "host": "host-a",
        "pid": PID,
        "ppid": 1,
        "role": "rank",
        "command": "python train.py",
        "python": True,
        "torch": True,
        "reported": True,
        "process": "rank-0" if row.get("role", "rank") == "rank" else None,
        "start_ns": T0 - 1000 * MS,
    }
    return {**usual, **row}
