"""The rhythm of loaders with workers: what starting them again for every epoch costs, and waits that come in waves.

An iterator of a DataLoader with workers that do not persist starts its processes anew. Making it, and what the first
batch takes longer than the work for one batch explains, is time that persistent workers do not need.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl

from stepscope.analyze.input.loader import feeding_loader
from stepscope.analyze.sites import site_of
from stepscope.engine.attribution import heaviest_lines, place
from stepscope.engine.host_activity import LOADER_RANGE
from stepscope.engine.journal import event_data, place_of
from stepscope.engine.spans import Base, Span
from stepscope.engine.step_labels import LabelledSteps
from stepscope.model import LoaderFacts, Place
from stepscope.model.machine import EpochFacts, TraceLoader, WaveFacts
from stepscope.tables.arrays import Bools, Int64, climb
from stepscope.tables.schema import Tables

MIN_WAVES = 5  # fewer may stand in a row by chance
ENDING = 1.5  # of the time to start workers: ending them took 1.3 times as long where it was measured
FIRST_STEPS = 8  # of an epoch, at most: while workers start they take cores and memory from the steps; untuned
FASTER = 0.25

_Event = dict[str, Any]


def epoch_facts(tables: Tables, labelled: LabelledSteps, loader: LoaderFacts | None) -> tuple[EpochFacts, ...] | None:
    """One per loader with workers that was iterated again during training; None where there is none."""
    frame = labelled.frame.filter(pl.col("start_ns").is_not_null()).sort("process", "start_ns")
    train = frame.filter(pl.col("kind") == "train")
    if train.is_empty():
        return None
    events = list(_loader_events(tables))
    feeding = feeding_loader(tables, labelled)
    wall_ns = float(train["wall_ns"].sum()) + sum(_between(event, frame) for event in events if _during(event, train))
    total_ms = wall_ns / train.height / 1e6
    found = []
    for loader_id in sorted({event["id"] for event in events if event["id"] is not None}):
        own = [event for event in events if event["id"] == loader_id]
        feeds = feeding is not None and feeding.get("id") == loader_id
        batch_ms = loader.load_ms if feeds and loader is not None else None
        fact = _of_loader(tables, frame, own, events, batch_ms, total_ms)
        if fact is not None:
            found.append(fact)
    return tuple(found) or None


def periodic_waits(tables: Tables, labelled: LabelledSteps) -> WaveFacts | None:
    """Of the first rank. None with fewer than two workers, or too few steps for `MIN_WAVES` waves."""
    event = feeding_loader(tables, labelled)
    period = event.get("num_workers") if event else None
    if not isinstance(period, int) or period < 2:
        return None
    steady = labelled.steady().filter(pl.col("data_wait_ns").is_not_null()).sort("process", "step")
    if steady.is_empty():
        return None
    own = steady.filter(pl.col("process") == steady["process"][0])
    count = own.height // period
    if count < MIN_WAVES:
        return None
    wait, step = own["data_wait_ns"].to_numpy(), own["step"].to_numpy()
    order = np.argsort(-wait, kind="stable")
    highest, others = np.sort(order[:count]), order[count:]
    total = float(wait.sum())
    distances = [int(step[after] - step[before]) for before, after in pairwise(highest)]
    return WaveFacts(
        period=period,
        waves=count,
        share=float(wait[highest].sum()) / total if total > 0 else 0.0,
        regular=sum(distance == period for distance in distances) / len(distances),
        wave_wait_ms=float(np.median(wait[highest])) / 1e6,
        other_wait_ms=float(np.median(wait[others])) / 1e6,
    )


def _loader_events(tables: Tables) -> Iterator[_Event]:
    for row, data in event_data(tables, "loader"):
        if row["time_ns"] is not None:
            own = {"process": row["process"], "time_ns": row["time_ns"], "ns": row["duration_ns"]}
            own.update(_process=row["process"], _time=row["time_ns"])
            yield {**data, **own, "id": data.get("id") if isinstance(data.get("id"), int) else None}


def _during(event: _Event, train: pl.DataFrame) -> bool:
    """Whether an iterator was made after the first training step of its process and before the end of the last."""
    own = train.filter(pl.col("process") == event["process"])
    if own.is_empty():
        return False
    return bool(own["start_ns"][0] < event["time_ns"] < own["start_ns"][-1] + own["wall_ns"][-1])


def _of_loader(
    tables: Tables,
    frame: pl.DataFrame,
    own: list[_Event],
    events: list[_Event],
    batch_ms: float | None,
    total_ms: float,
) -> EpochFacts | None:
    train = frame.filter(pl.col("kind") == "train")
    workers = own[0].get("num_workers")
    again = [
        event
        for process in sorted({event["process"] for event in own})
        for event in [each for each in own if each["process"] == process][1:]
        if _during(event, train) and event["ns"] is not None
    ]
    if not isinstance(workers, int) or workers < 1 or not again:
        return None
    fed = [_fed(frame, event, events) for event in again]
    firsts = [steps["data_wait_ns"][0] for steps in fed if steps.height and steps["first_batch"][0]]
    firsts = [ns for ns in firsts if ns is not None]
    rest = [ns for steps in fed for ns in steps.filter(~pl.col("first_batch"))["data_wait_ns"].drop_nulls()]
    usual_ns = float(np.median(rest)) if rest else 0.0
    lost_ns = float(sum(event["ns"] for event in again))
    waited_ns = 0.0
    if batch_ms is not None:
        waited_ns = sum(max(0.0, ns - usual_ns - batch_ms * 1e6) for ns in firsts)
    at_most_ns = sum(_between(event, frame) for event in again) + max(waited_ns, _slower(fed))
    lost_ns += waited_ns
    site = site_of(tables, own[0])
    kinds = Counter(kind for steps in fed for kind in steps["kind"])
    arguments = (site or {}).get("arguments") or {}
    return EpochFacts(
        site=place_of(site),
        num_workers=workers,
        persistent=str(arguments.get("persistent_workers", False)) == "True" if site else None,
        kind=kinds.most_common(1)[0][0] if kinds else "train",
        restarts=len(again),
        make_ms=float(np.median([event["ns"] for event in again])) / 1e6,
        first_wait_ms=float(np.median(firsts)) / 1e6 if firsts else 0.0,
        usual_wait_ms=usual_ns / 1e6,
        batch_ms=batch_ms,
        lost_ms_per_step=lost_ns / train.height / 1e6,
        at_most_ms_per_step=at_most_ns / train.height / 1e6,
        total_ms_per_step=total_ms,
    )


def _between(event: _Event, frame: pl.DataFrame) -> float:
    """ns between two steps for a new iterator: making it and, before that, ending the old workers.

    Ending them is counted up to a time that goes by how long starting them took: the rest is other work between epochs.
    """
    own = frame.filter((pl.col("process") == event["process"]) & (pl.col("start_ns") < event["time_ns"]))
    made = float(event["ns"] or 0)
    if own.is_empty():
        return made
    return made + min(ENDING * made, max(0.0, float(event["time_ns"] - own["start_ns"][-1] - own["wall_ns"][-1])))


def _slower(fed: list[pl.DataFrame]) -> float:
    """ns by which the first steps of these epochs took longer than the faster quarter of the second halves, at most.

    The quarter, since what a fork leaves behind (pages to copy, cold caches) may last for all of a short epoch.
    """
    epochs = [steps.filter(~pl.col("in_window").fill_null(False))["wall_ns"].to_numpy() for steps in fed]
    epochs = [wall for wall in epochs if len(wall) > 1]
    if not epochs:
        return 0.0
    level = float(np.quantile(np.concatenate([wall[len(wall) // 2 :] for wall in epochs]), FASTER))
    firsts = np.concatenate([wall[:FIRST_STEPS] for wall in epochs])
    return max(0.0, float(firsts.sum()) - level * len(firsts))


def _fed(frame: pl.DataFrame, event: _Event, events: list[_Event]) -> pl.DataFrame:
    """The steps after an iterator was made, up to the next one of any loader of the process."""
    later = [each["time_ns"] for each in events if each["process"] == event["process"]]
    end = min((time for time in later if time > event["time_ns"]), default=None)
    inside = (pl.col("process") == event["process"]) & (pl.col("start_ns") >= event["time_ns"])
    return frame.filter(inside if end is None else inside & (pl.col("start_ns") < end)).with_columns(
        pl.col("first_batch").fill_null(False)
    )


SINGLE, MULTI = "_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"
MAX_ENTRIES = 5
_Weights = dict[Place, int]


def trace_loaders(base: Base) -> tuple[TraceLoader, ...]:
    """One per run of traces in which a loader's range was recorded."""
    runs: dict[str, list[Span]] = {}
    for span in base.spans:
        runs.setdefault(span.ref.run, []).append(span)
    found = (_of_run(base, run, spans) for run, spans in sorted(runs.items()))
    return tuple(one for one in found if one is not None)


def _of_run(base: Base, run: str, spans: list[Span]) -> TraceLoader | None:
    names: set[str] = set()
    calls: _Weights = {}
    entries: _Weights = {}
    fetches = total = 0
    for span in spans:
        rows = _ranges(span)
        if not len(rows):
            continue
        codes = np.unique(span.names.codes[rows])
        names.update(span.names.values[code] for code in codes)
        fetches += len(rows)
        total += int(span.duration_ns[rows].sum())
        for caller in heaviest_lines([(base, span, rows, span.duration_ns[rows])], 1):
            calls[caller.place] = calls.get(caller.place, 0) + len(rows)
        for where, ns in _entries(base, span, rows).items():
            entries[where] = entries.get(where, 0) + ns
    if not fetches:
        return None
    longest = sorted(entries, key=lambda where: (-entries[where], where.file, where.line or 0))[:MAX_ENTRIES]
    return TraceLoader(
        run=run,
        workers=_workers(names),
        call=max(calls, key=lambda where: (calls[where], where.file), default=None),
        entries=tuple(
            Place(where.file, where.line, where.function, min(1.0, entries[where] / total) if total else None)
            for where in longest
        ),
        fetches=fetches,
        fetch_ms=total / fetches / 1e6,
    )


def _ranges(span: Span) -> Int64:
    """Rows of the ranges in which the training thread is in its loader."""
    named = span.names.like(LOADER_RANGE)
    return np.flatnonzero(named & ~span.on_device)


def _workers(names: set[str]) -> str | None:
    single, multi = (any(kind in name for name in names) for kind in (SINGLE, MULTI))
    if single == multi:  # neither, or both: a training and an evaluation loader
        return None
    return "none" if single else "some"


def _entries(base: Base, span: Span, ranges: Int64) -> _Weights:
    """ns of the user's functions inside the ranges, by place; only the outermost function of each call counts."""
    if not base.origins.places:
        return {}
    user = base.origins.user[span.first : span.first + len(span)]
    inside: Bools = np.zeros(len(span), bool)
    inside[ranges] = True
    candidates = np.flatnonzero((user >= 0) & span.is_function)
    met = climb(span.parent, span.parent[candidates], inside | (user >= 0))
    entered = (met >= 0) & inside[met]  # below another function of the user's it is part of that one
    below: _Weights = {}
    for index in np.unique(user[candidates[entered]]):
        rows = candidates[entered & (user[candidates] == index)]
        where = place(base, int(index))[0]
        below[where] = below.get(where, 0) + int(span.duration_ns[rows].sum())
    return below
