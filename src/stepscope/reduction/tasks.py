"""What engines run: functions of a text that holds paths and names, to a text that holds sizes and checksums.

Tables never go over the wire. A task that is run twice, on whatever machine, leaves the same bytes; each file is
written beside its place and moved there whole. Engines pickle the functions' names and these texts, nothing else; no
file of a recording is ever unpickled.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import msgspec
import polars as pl
from msgspec import Struct

from stepscope.errors import UnreadableInputError
from stepscope.files import read_small
from stepscope.read.raw import RawRank, TraceRef
from stepscope.read.run_folder import read_rank_steps
from stepscope.reduction.host import reduce_host
from stepscope.reduction.plan import HostPlan, TracePlan
from stepscope.reduction.trace import TraceRows, reduce_trace
from stepscope.schema import REDUCED_INDEX
from stepscope.tables import reduced

MAX_PART_BYTES = 2**30
_DAMAGED = (OSError, UnreadableInputError, pl.exceptions.PolarsError)


class TraceTask(Struct, frozen=True):
    run: str
    host: str
    recorded: bool
    trace: TracePlan
    target: str  # the file to write


class Made(Struct, frozen=True):
    """A file, or why there is none."""

    path: str = ""
    bytes: int = 0
    sha256: str = ""
    problem: str | None = None


class HostTask(Struct, frozen=True):
    plan: HostPlan
    traces: tuple[TraceTask, ...]
    made: tuple[Made, ...]  # of the traces
    target: str  # the folder in which `reduced` lies


def trace_task(text: str) -> str:
    """Reduce the trace of a `TraceTask` to a file; a `Made`, both as JSON."""
    task = msgspec.json.decode(text, type=TraceTask)
    try:
        data = msgspec.msgpack.encode(_rows_of(task))
        target = Path(task.target)
        descriptor, part = tempfile.mkstemp(suffix=reduced.PART, dir=target.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(part, target)
        made = Made(task.target, len(data), hashlib.sha256(data).hexdigest())
    except _DAMAGED as error:
        made = Made(problem=str(error))
    return msgspec.json.encode(made).decode()


def _rows_of(task: TraceTask) -> TraceRows:
    trace = task.trace
    rank = RawRank(trace.process, trace.rank)
    if task.recorded:
        rank = read_rank_steps(Path(task.run) / trace.process)
    ref = TraceRef(Path(trace.path), trace.name, trace.owner)
    return reduce_trace(ref, rank, task.host, recorded=task.recorded)


def host_task(text: str) -> str:
    """Reduce the machine of a `HostTask` and write its tables; a `Made` of their index, both as JSON."""
    task = msgspec.json.decode(text, type=HostTask)
    try:
        traces, problems = [], list(task.plan.left_out)
        for trace, made in zip(task.traces, task.made, strict=True):
            rows = _again(trace, made)
            if isinstance(rows, str):
                problems.append(f"{trace.trace.process}/{trace.trace.name}: {rows}")
            else:
                traces.append((trace.trace.process, rows))
        plan = msgspec.structs.replace(task.plan, left_out=tuple(problems))
        index, frames = reduce_host(plan, traces)
        folder = reduced.write_host(Path(task.target), index, frames)
        data = read_small(folder / REDUCED_INDEX, reduced.MAX_INDEX_BYTES)
        answer = Made(str(folder), len(data), hashlib.sha256(data).hexdigest())
    except _DAMAGED as error:
        answer = Made(problem=str(error))
    return msgspec.json.encode(answer).decode()


def _again(task: TraceTask, made: Made) -> TraceRows | str:
    """What a trace was reduced to, made once more where its file is not the one told; or why there is nothing."""
    if made.problem is not None:
        return made.problem
    try:
        data = read_small(made.path, MAX_PART_BYTES)
        if len(data) == made.bytes and hashlib.sha256(data).hexdigest() == made.sha256:
            return msgspec.msgpack.decode(data, type=TraceRows)
    except (OSError, msgspec.MsgspecError):
        pass
    try:
        return _rows_of(task)
    except _DAMAGED as error:
        return str(error)
