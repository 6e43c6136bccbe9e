"""The typed columns every analysis stands on, and the bundle that carries them.

Column names carry units; times are integer nanoseconds on the epoch clock; a missing figure is null, never 0.
`SCHEMAS` is the single definition: builders cast to it, the Parquet store writes it, tests check it.
"""

from __future__ import annotations

from typing import Any

import polars as pl
from msgspec import Struct

from stepscope.model import Quality, RunFacts

SCHEMAS: dict[str, dict[str, Any]] = {
    # a step of a training process; `process` is the folder ("rank-0", "rank-0.2"), the unit step numbers count in
    "steps": {
        "rank": pl.Int32,
        "process": pl.String,
        "step": pl.Int64,
        "kind": pl.String,
        "epoch": pl.Int64,
        "start_ns": pl.Int64,
        "wall_ns": pl.Int64,
        "data_wait_ns": pl.Int64,  # null, as `before_forward_ns` otherwise, where the step asked no loader
        "before_forward_ns": pl.Int64,
        "forward_ns": pl.Int64,
        "backward_ns": pl.Int64,
        "optimizer_ns": pl.Int64,
        "other_ns": pl.Int64,
        "device_ns": pl.Int64,
        "samples": pl.Int64,
        "fetches": pl.Int64,
        "first_batch": pl.Boolean,
        "in_window": pl.Boolean,
        "signal": pl.String,
        "framework_step": pl.Int64,
        "minor_faults": pl.Int64,
        "major_faults": pl.Int64,
    },
    # a line of rank-N/events.jsonl; `data` holds the kind's own fields as JSON text
    "journal": {
        "rank": pl.Int32,
        "process": pl.String,
        "kind": pl.String,
        "time_ns": pl.Int64,
        "duration_ns": pl.Int64,
        "step": pl.Int64,
        "data": pl.String,
    },
    # a slice of a trace. `id` is the row's number; `parent` and `frame` refer to it: the enclosing slice on the same
    # track, and the innermost Python function (category python_function) around it. `self_ns` leaves children out.
    "events": {
        "id": pl.Int64,
        "rank": pl.Int32,
        "process": pl.String,
        "trace": pl.String,
        "track": pl.String,  # "pid/tid" of the trace
        "category": pl.String,
        "name": pl.String,
        "start_ns": pl.Int64,
        "duration_ns": pl.Int64,
        "self_ns": pl.Int64,
        "depth": pl.Int32,
        "parent": pl.Int64,
        "frame": pl.Int64,
        "forward": pl.Int64,  # of an operator that runs an autograd node: the forward operator that made the node
        "step": pl.Int64,  # the step it starts in; of a device slice, the step its launch starts in
        "correlation": pl.Int64,
        "external_id": pl.Int64,
        "sequence": pl.Int64,
        "device": pl.Int32,
        "stream": pl.Int64,
        "shapes": pl.String,  # JSON text of "Input Dims"
        "types": pl.String,  # JSON text of "Input type"
        "bytes": pl.Int64,
        "forward_thread": pl.Int64,  # of an operator of the backward pass: the thread of its forward operator
        "python_module": pl.Int64,
        "blocks": pl.Int64,  # of the grid
        "threads": pl.Int64,  # of a block
        "registers": pl.Int64,  # per thread
        "shared_memory_bytes": pl.Int64,  # per block
        "blocks_per_sm": pl.Float64,
        "warps_per_sm": pl.Float64,
        "occupancy_percent": pl.Float64,  # the writer's estimate
        "call_stack": pl.String,  # of an operator, in traces of 2021: "file(line): function;...", innermost first
        "collective": pl.String,  # JSON object of a collective's arguments
    },
    # a device slice (kernel, copy, memset) and where it comes from; ids are rows of `events`
    "links": {
        "event": pl.Int64,
        "process": pl.String,
        "trace": pl.String,
        "launch": pl.Int64,  # the runtime or driver call
        "operator": pl.Int64,  # the innermost operator around the launch
        "frame": pl.Int64,  # the innermost Python function around the launch
        "method": pl.String,  # how the launch or operator was found: correlation | flow | external_id | containment
        "state": pl.String,  # linked | before_recording | graph | unlinked
        "forward": pl.Int64,  # of a backward operator: the forward operator that it belongs to
        "forward_method": pl.String,  # sequence | flow
    },
    # a trace file of a process, and what reading it cost
    "traces": {
        "rank": pl.Int32,
        "process": pl.String,
        "trace": pl.String,
        "owner": pl.String,  # stepscope | user
        "folder": pl.String,  # of the file, relative to what was given; "" in it, and in a recorded run
        "claimed_rank": pl.Int32,  # what the file itself or its name says, also where another one had it already
        "events": pl.Int64,
        "salvaged": pl.Int64,
        "lost": pl.Int64,
        "unsupported": pl.Int64,
        "clipped": pl.Int64,
        "repaired": pl.Int64,
        "problems": pl.List(pl.String),
        "metadata": pl.String,  # JSON object of the allow-listed keys
        "threads": pl.String,  # JSON object: track -> thread name
    },
    # a segment of sampling, or a file of stacks that others recorded; (`host`, `file`) is its key
    "segments": {
        "host": pl.String,
        "file": pl.String,
        "source": pl.String,  # "py-spy" | "agent" | the tool that wrote a foreign file
        "format": pl.String,
        "unit": pl.String,  # of `samples` in all tables: "samples", or the "us" or "bytes" of files that hold weights
        "idle": pl.Boolean,  # whether waiting threads were sampled too; null where nothing tells it
        "blocking": pl.Boolean,
        "rate_hz": pl.Float64,
        "start_ns": pl.Int64,
        "end_ns": pl.Int64,
        "wall_ns": pl.Int64,  # from start to end, or what the file says
        "samples": pl.Int64,  # read, whatever became of them
        "skipped_samples": pl.Int64,  # of records that could not be read
        "errors": pl.Int64,
        "status": pl.String,
        "timed": pl.Boolean,  # its stretches are in `stretches`
    },
    # a distinct stack of a thread in a segment of time; ours and the agent's frames removed
    "stacks": {
        "host": pl.String,
        "file": pl.String,  # of its segment
        "source": pl.String,
        "segment": pl.Int64,
        "rank": pl.Int32,
        "process": pl.String,  # folder of the rank it belongs to (a worker belongs to its parent's), or null
        "pid": pl.Int64,
        "role": pl.String,  # rank | loader_worker | launcher | helper | other
        "thread": pl.String,
        "thread_name": pl.String,
        "main_thread": pl.Boolean,
        "node": pl.Int32,  # of `nodes`: the innermost frame; null for a stack without frames
        "samples": pl.Int64,
        "waiting": pl.Boolean,  # the innermost frame is a known wait
        "phase": pl.String,  # data_wait | forward | backward | optimizer | other | startup | null
        "stage": pl.String,  # import | compile: what the thread does whatever the phase; null for all else
        "start_ns": pl.Int64,
        "end_ns": pl.Int64,
        "rate_hz": pl.Float64,
    },
    # a time in which a sampled thread stood in one stack, where the sampler told the time of its samples
    "stretches": {
        "host": pl.String,
        "file": pl.String,
        "process": pl.String,
        "pid": pl.Int64,
        "role": pl.String,
        "thread": pl.String,
        "main_thread": pl.Boolean,
        "node": pl.Int32,
        "waiting": pl.Boolean,
        "phase": pl.String,
        "stage": pl.String,
        "start_ns": pl.Int64,
        "end_ns": pl.Int64,
    },
    # a call path: the frame and the path that called it. A row's number is its `node`; parents come before children.
    "nodes": {
        "node": pl.Int32,
        "parent": pl.Int32,  # null at the root
        "depth": pl.Int32,  # 0 at the root
        "frame": pl.Int32,
    },
    # a distinct frame of sampled stacks; a row's number is its `frame`
    "frames": {"frame": pl.Int32, "function": pl.String, "file": pl.String, "line": pl.Int64},
    "system": {
        "host": pl.String,
        "time_ns": pl.Int64,
        "metric": pl.String,
        "unit": pl.String,
        "value": pl.Float64,
        "pid": pl.Int64,
        "device": pl.String,
    },
    "processes": {
        "host": pl.String,
        "pid": pl.Int64,
        "ppid": pl.Int64,
        "role": pl.String,
        "command": pl.String,
        "python": pl.Boolean,
        "torch": pl.Boolean,
        "reported": pl.Boolean,  # the agent in it wrote a line
        "process": pl.String,  # rank folder it claimed, or null
        "start_ns": pl.Int64,
        "end_ns": pl.Int64,
    },
    # a compile, recompile, graph break, fallback or host transfer, or several alike (`count`)
    "compiles": {
        "rank": pl.Int32,
        "process": pl.String,
        "step": pl.Int64,
        "step_source": pl.String,  # how the step is known: context | time | poll | file | trace; null without one
        "time_ns": pl.Int64,  # where it began
        "duration_ns": pl.Int64,  # of all `count` together
        "kind": pl.String,  # compile | recompile | limit_hit | failure | graph_break | fallback | transfer
        "backend": pl.String,  # torch.compile | torch_xla; "cuda" of copies seen in a trace, ROCm included
        "count": pl.Int64,
        "direction": pl.String,  # forward | backward; of transfers device_to_host
        "graph": pl.String,  # the compiler's id: "2/8", an XLA graph hash
        "operator": pl.String,  # of fallbacks and transfers, and of graph breaks at an operator
        "bytes": pl.Int64,
        "cause": pl.String,  # a word of `compile_reasons.CAUSES`; null of a first compile
        "reason": pl.String,  # as the compiler words it
        "subject": pl.String,  # what changed: "x.size(0)", "s.calls", "scale"
        "old": pl.String,
        "new": pl.String,
        "hint": pl.String,  # the compiler's own advice
        "file": pl.String,  # the user's line that caused it
        "line": pl.Int64,
        "function": pl.String,
        "def_file": pl.String,  # where the compiled function begins
        "def_line": pl.Int64,
        "call_file": pl.String,  # the user's line that called it
        "call_line": pl.Int64,
        "cache_entries": pl.Int64,  # compiled versions of the function before this event
        "limit": pl.Int64,  # of versions
        "source": pl.String,  # what told it, with its version
    },
    # a metric or counter of a torch_xla report, as of the end of the report or of a step
    "counters": {
        "rank": pl.Int32,
        "process": pl.String,
        "step": pl.Int64,
        "name": pl.String,
        "kind": pl.String,  # metric | counter
        "unit": pl.String,  # of `total` and percentiles: ns | bytes | count
        "samples": pl.Int64,
        "total": pl.Float64,
        "samples_per_second": pl.Float64,
        "value_per_second": pl.Float64,  # in `unit`
        "percentiles": pl.String,  # JSON object: percent -> value in `unit`
    },
    "memory": {
        "rank": pl.Int32,
        "process": pl.String,
        "device": pl.String,
        "time_ns": pl.Int64,
        "bytes": pl.Int64,
        "allocated_bytes": pl.Int64,
        "reserved_bytes": pl.Int64,
        "owner": pl.String,
        "address": pl.Int64,
        "trace": pl.String,
        "track": pl.String,
    },
    "metrics": {
        "rank": pl.Int32,
        "process": pl.String,
        "step": pl.Int64,  # whose interval holds the time, else null; of what is logged the last that began before
        "time_ns": pl.Int64,
        "name": pl.String,  # "train/loss": the group is what stands before the last slash
        "value": pl.Float64,  # NaN and infinities are values
        "source": pl.String,  # backward | optimizer | clipping | scaler | loader | log | watch | the tool logged with
    },
}


class RankInfo(Struct, frozen=True):
    """A training process as its rank.json describes it."""

    rank: int
    process: str
    pid: int
    host: str
    world_size: int | None
    device: str | None
    main_file: str | None
    started_ns: int | None
    versions: dict[str, str]
    threads: int | None = None  # of torch's operators on the CPU, when training began


class Tables(Struct, frozen=True):
    """All tables of a run. Every frame has exactly the columns of `SCHEMAS`; an absent source is an empty frame."""

    run: RunFacts
    quality: Quality
    ranks: tuple[RankInfo, ...]
    manifests: tuple[dict[str, Any], ...]  # one per host, as written
    steps: pl.DataFrame
    journal: pl.DataFrame
    events: pl.DataFrame
    links: pl.DataFrame
    traces: pl.DataFrame
    segments: pl.DataFrame
    stacks: pl.DataFrame
    stretches: pl.DataFrame
    nodes: pl.DataFrame
    frames: pl.DataFrame
    system: pl.DataFrame
    processes: pl.DataFrame
    compiles: pl.DataFrame
    counters: pl.DataFrame
    memory: pl.DataFrame
    metrics: pl.DataFrame


def empty(name: str) -> pl.DataFrame:
    """An empty frame with the columns of table `name`."""
    return pl.DataFrame(schema=SCHEMAS[name])
