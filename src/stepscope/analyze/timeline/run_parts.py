"""What a run tells beside its traces: steps, their phases, and what sampled processes did at which moment.

Of a phase only the length in a step is measured, not its place: phases are laid into their step in the usual order. A
sampled process is drawn by the user's innermost function on its stack, below that by the function it stood in.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl

from stepscope.analyze.timeline.parts import KIND, Collection, Part
from stepscope.engine.call_tree import CallTree
from stepscope.engine.user_code import UserCode
from stepscope.model import PHASES
from stepscope.tables.arrays import NONE, Bools, Int32, Int64
from stepscope.tables.schema import Tables

PHASES_NOTE = "of phases only lengths are measured: they are drawn in their usual order within each step"
_PHASE_COLUMNS = tuple(f"{name}_ns" for name in PHASES)
_ROLES = {"loader_worker": "loader worker", "rank": "sampled main thread"}


def add_steps(tables: Tables, collection: Collection, workers: Mapping[str, str], first_id: int) -> None:
    """Add a track of steps for every process, and one of phases where they are known."""
    steps = tables.steps
    if steps.is_empty():
        return
    track = np.zeros(steps.height, np.int32)
    phases = np.zeros(steps.height, np.int32)
    process = steps["process"].fill_null("")
    for name in process.unique(maintain_order=True).to_list():
        rows = (process == name).to_numpy()
        group = workers.get(name, name)
        track[rows] = collection.tracks.number(group, "steps", "", "steps")
        known = steps.filter(pl.Series(rows)).select(pl.col(_PHASE_COLUMNS).count().sum()).sum_horizontal()[0]
        phases[rows] = collection.tracks.number(group, "phases", "", "phases") if known else NONE
    start, wall = steps["start_ns"].to_numpy(), steps["wall_ns"].to_numpy()
    evaluates = (steps["kind"] == "eval").fill_null(False).to_numpy()
    depth = np.zeros(steps.height, np.int32)
    kind = np.where(evaluates, KIND["eval_step"], KIND["step"]).astype(np.int8)
    names = collection.names.numbers(["training step", "evaluation step"])
    ids = np.arange(first_id, first_id + steps.height, dtype=np.int32)
    collection.add(Part(ids, track, depth, start, start + wall, names[evaluates.astype(np.int8)], kind))
    if (phases >= 0).any():
        _add_phases(steps, collection, phases, first_id + steps.height)


def _add_phases(steps: pl.DataFrame, collection: Collection, track: Int32, first_id: int) -> None:
    """Phase k of step i has the id `first_id` + number of phases * i + k."""
    count = len(PHASES)
    lengths = np.column_stack([steps[name].fill_null(0).to_numpy() for name in _PHASE_COLUMNS]).astype(np.int64)
    ends = steps["start_ns"].to_numpy()[:, None] + np.cumsum(lengths, axis=1)
    keep = (lengths > 0) & (track >= 0)[:, None]
    row, phase = np.nonzero(keep)
    names = collection.names.numbers([name.replace("_", " ") for name in PHASES])
    kinds = np.asarray([KIND[name] for name in PHASES], np.int8)
    collection.add(
        Part(
            id=(first_id + row * count + phase).astype(np.int32),
            track=track[row],
            depth=np.zeros(len(row), np.int32),
            start=(ends - lengths)[keep],
            end=ends[keep],
            name=names[phase],
            kind=kinds[phase],
        )
    )
    collection.notes.append(PHASES_NOTE)


def add_samples(
    tables: Tables, calls: CallTree, code: UserCode, collection: Collection, workers: Mapping[str, str], first_id: int
) -> None:
    """Add a track for every main thread that was sampled with times: of ranks, and of the workers of their loaders."""
    stretches = tables.stretches
    if stretches.is_empty():
        return
    drawn = (
        stretches["main_thread"].fill_null(False)
        & stretches["role"].is_in(list(_ROLES))
        & stretches["node"].is_not_null()
        & (stretches["end_ns"] > stretches["start_ns"])
    )
    rows = np.flatnonzero(drawn.fill_null(False).to_numpy())
    if not len(rows):
        return
    chosen = stretches[rows]
    track = _sampled_tracks(chosen, collection, workers)
    node = chosen["node"].to_numpy()
    user, leaf, itself = _names_of_nodes(calls, code, collection)
    waiting = chosen["waiting"].fill_null(False).to_numpy()
    kind = np.where(waiting, KIND["waiting"], KIND["sampled"]).astype(np.int8)
    start, end = chosen["start_ns"].to_numpy(), chosen["end_ns"].to_numpy()
    outer = user[node]
    known = np.flatnonzero(outer >= 0)
    inner = np.flatnonzero(~itself[node])  # where the process stood in the user's function itself, that says it all
    depth = (outer >= 0).astype(np.int32)[inner]
    ids = (first_id + rows[inner]).astype(np.int32)
    collection.add(Part(ids, track[inner], depth, start[inner], end[inner], leaf[node[inner]], kind[inner]))
    of_user = (first_id + stretches.height + rows[known]).astype(np.int32)
    _add_stretched(collection, of_user, track[known], start[known], end[known], outer[known])


def _add_stretched(collection: Collection, ids: Int32, track: Int32, start: Int64, end: Int64, name: Int32) -> None:
    """The user's functions: stretches that follow each other in one function are one slice, with the first one's id.

    Their ids follow those of the stretches.
    """
    order = np.lexsort((start, track))
    ids, track, name = ids[order], track[order], name[order]
    start, end = start[order], end[order]
    if not len(ids):
        return
    same: Bools = (track[1:] == track[:-1]) & (name[1:] == name[:-1]) & (start[1:] <= end[:-1])
    first = np.flatnonzero(np.append(True, ~same))
    kind = np.full(len(first), KIND["user_function"], np.int8)
    depth = np.zeros(len(first), np.int32)
    collection.add(
        Part(ids[first], track[first], depth, start[first], np.maximum.reduceat(end, first), name[first], kind)
    )


def _sampled_tracks(chosen: pl.DataFrame, collection: Collection, workers: Mapping[str, str]) -> Int32:
    """The track of each stretch: one for every process that was sampled."""
    keys = chosen.select(
        pl.col("host").fill_null(""), pl.col("process").fill_null(""), pl.col("pid").fill_null(NONE), pl.col("role")
    )
    distinct = keys.unique(maintain_order=True).with_row_index("number")
    numbers = []
    for _, host, process, pid, role in distinct.iter_rows():
        group = workers.get(process, process) or host or "sampled"
        label = f"{_ROLES[role]} {pid}" if pid >= 0 else _ROLES[role]
        rank = (0.0 if role == "rank" else 1.0, float(pid))
        numbers.append(collection.tracks.number(group, "worker", f"{host}/{pid}/{role}", label, rank))
    at = keys.join(distinct, on=keys.columns, how="left", maintain_order="left")["number"].to_numpy()
    found: Int32 = np.asarray(numbers, np.int32)[at]
    return found


def _names_of_nodes(calls: CallTree, code: UserCode, collection: Collection) -> tuple[Int32, Int32, Bools]:
    """By node the name of the user's innermost function (-1: none) and of the innermost, and whether they are one."""
    labels = collection.names.numbers([_label(frame.function, frame.file, frame.line) for frame in calls.frames])
    users = np.asarray([code.resolve(frame.file) is not None for frame in calls.frames], bool)
    innermost = calls.innermost(calls.by_node(users).astype(bool))
    leaf = labels[calls.frame]
    user = np.where(innermost >= 0, leaf[np.maximum(innermost, 0)], NONE).astype(np.int32)
    return user, leaf, innermost == np.arange(len(calls))


def _label(function: str, file: str, line: int | None) -> str:
    name = file.rpartition("/")[2]
    if not name:
        return function
    return f"{function} ({name}:{line})" if line is not None else f"{function} ({name})"
