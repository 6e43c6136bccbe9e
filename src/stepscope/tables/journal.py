"""The tables that come from the journal's events and from telemetry: journal, counters, system.

The table of steps, the steps of a trace that comes without a journal, and the step each moment falls into.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import polars as pl

from stepscope.read.raw import RawHost, RawRank
from stepscope.read.text import integer, length_ns, moment_ns, number, string
from stepscope.schema import STEP_COLUMNS
from stepscope.tables.arrays import NONE, Int64, window_at
from stepscope.tables.categories import ANNOTATION, OPERATORS, STEP
from stepscope.tables.schema import SCHEMAS

Steps = tuple[int, int]  # the first and the last, both included
_COLUMNS = ("kind", "time_ns", "duration_ns", "step")


def journal_tables(ranks: Iterable[RawRank]) -> dict[str, pl.DataFrame]:
    """`journal`: all events, `data` is the JSON text of an event's own fields; of metrics a row for each series.

    `counters`: a compiler's own report, one row each, as of each such event.
    """
    rows: dict[str, list[dict[str, Any]]] = {"journal": [], "counters": []}
    for rank in ranks:
        for event in rank.journal:
            own = {key: value for key, value in event.items() if key not in _COLUMNS}
            row = {"rank": rank.rank, "process": rank.name, **{key: event[key] for key in _COLUMNS}}
            rows["journal"].append({**row, "data": msgspec.json.encode(own).decode()})
            if event["kind"] == "counters":
                rows["counters"] += (row | counter for counter in _counters(event))
        rows["journal"] += _series(rank)
    return {name: pl.DataFrame(found, schema=SCHEMAS[name]) for name, found in rows.items()}


def _series(rank: RawRank) -> Iterator[dict[str, Any]]:
    found: dict[bytes, tuple[dict[str, Any], int, int]] = {}
    for series in rank.metrics:
        about = {"name": series.name, "source": series.source, **series.about}
        key = msgspec.json.encode(about)
        _, first_ns, count = found.get(key, (about, int(series.times_ns[0]) if len(series.times_ns) else 0, 0))
        found[key] = about, first_ns, count + len(series.times_ns)
    for about, first_ns, count in found.values():
        data = msgspec.json.encode({**about, "values": count}).decode()
        yield {"rank": rank.rank, "process": rank.name, "kind": "metric_series", "time_ns": first_ns, "data": data}


def _counters(event: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    metrics, counters = event.get("metrics"), event.get("counters")
    for name, entry in metrics.items() if isinstance(metrics, dict) else ():
        total = number(entry.get("total")) if isinstance(entry, dict) else None
        if total is not None:
            percentiles = entry.get("percentiles")
            yield {
                "name": str(name),
                "kind": "metric",
                "unit": entry.get("unit") if entry.get("unit") in ("ns", "bytes") else "count",
                "samples": integer(entry.get("samples")),
                "total": total,
                "samples_per_second": number(entry.get("samples_per_second")),
                "value_per_second": number(entry.get("value_per_second")),
                "percentiles": msgspec.json.encode(percentiles).decode() if isinstance(percentiles, dict) else None,
            }
    for name, value in counters.items() if isinstance(counters, dict) else ():
        total = number(value)
        if total is not None:
            yield {"name": str(name), "kind": "counter", "unit": "count", "total": total}


def system_table(hosts: Iterable[RawHost]) -> pl.DataFrame:
    """Telemetry, one row per reading; a reading that is no finite number is left out."""
    lines = ((host.name, line) for host in hosts for line in host.system if isinstance(line.get("metrics"), list))
    rows = [
        (host, moment_ns(line.get("time_ns")), *reading)
        for host, line in lines
        for entry in line["metrics"]
        if (reading := _reading(entry)) is not None
    ]
    return pl.DataFrame(rows, schema=SCHEMAS["system"], orient="row")


def _reading(entry: Any) -> tuple[str, str | None, float, int | None, str | None] | None:
    """`[metric, unit, value, pid, device]`, the last two optional."""
    if not isinstance(entry, Sequence) or len(entry) < 3 or not isinstance(entry[0], str):
        return None
    value = number(entry[2])
    if value is None:
        return None
    pid = integer(entry[3]) if len(entry) > 3 else None
    device = entry[4] if len(entry) > 4 else None
    return entry[0], string(entry[1]), value, pid, None if device is None else str(device)


_NAME = re.compile(rf"{STEP}([0-9]{{1,18}})")
_HOST = OPERATORS | {ANNOTATION}


def steps_table(ranks: Iterable[RawRank]) -> pl.DataFrame:
    """All steps; `device_ns` also from `device_step` events, which arrive after the step's row was written."""
    schema = SCHEMAS["steps"]
    tables = [pl.DataFrame(schema=schema)]
    for rank in ranks:
        on_device = _device_steps(rank)
        # by columns, not a row more of each step: there may be millions
        columns: dict[str, Any] = {name: [step.get(name) for step in rank.steps] for name in schema}
        times = zip(columns["step"], columns["device_ns"], strict=True)
        columns["device_ns"] = [on_device.get(step) if time is None else time for step, time in times]
        columns |= {"rank": [rank.rank] * len(rank.steps), "process": [rank.name] * len(rank.steps)}
        tables.append(pl.DataFrame(columns, schema=schema, strict=False))
    return pl.concat(tables, rechunk=True)


def _device_steps(rank: RawRank) -> dict[int, int]:
    found: dict[int, int] = {}
    for event in (event for event in rank.journal if event["kind"] == "device_step"):
        steps, told = event.get("steps"), event.get("device_ns")
        if isinstance(steps, list) and isinstance(told, list):
            pairs = zip(map(integer, steps), map(length_ns, told), strict=False)
            found.update({step: time for step, time in pairs if step is not None and time is not None})
    return found


def step_at(times_ns: Int64, starts_ns: Int64, walls_ns: Int64, numbers: Int64) -> Int64:
    """The number of the step whose [start, start + wall) holds each time, else `NONE`; `starts_ns` is sorted."""
    return np.append(numbers, NONE)[window_at(starts_ns, starts_ns + walls_ns, times_ns)]


MARK_COLUMNS = ("category", "name", "track", "start_ns", "duration_ns")


def trace_steps(marks: pl.DataFrame) -> list[dict[str, Any]]:
    """Rows of the steps table of the host's `ProfilerStep#N` annotations, in order of time; one ends where the next
    begins. One inside another, or told twice, is no step, nor is one of another process than marks most.

    N may repeat within a rank, as every cycle of a schedule begins anew. Nothing is known of their phases.
    """
    found = [
        (start, start + duration, int(name[1]), (track or "").partition("/")[0])
        for category, text, track, start, duration in zip(
            *(marks[what].to_list() for what in MARK_COLUMNS), strict=True
        )
        if category in _HOST and (name := _NAME.fullmatch(text))
    ]
    processes = Counter(process for *_, process in found).most_common(1)
    outer: list[tuple[int, int, int, str]] = []
    for step in sorted(found, key=lambda step: (step[0], -step[1])):
        if step[3] == processes[0][0] and (not outer or step[1] > outer[-1][1]):
            outer.append(step)
    following = [*[start for start, *_ in outer[1:]], None]
    told = {"kind": "train", "first_batch": False, "in_window": True, "signal": "profiler_step"}
    row = {**dict.fromkeys(STEP_COLUMNS), **told}
    return [
        {**row, "step": number, "start_ns": start, "wall_ns": wall}
        for (start, end, number, _), after in zip(outer, following, strict=False)
        if (wall := (end if after is None else min(end, after)) - start) > 0
    ]


def chosen(steps: list[dict[str, Any]], wanted: Steps | None) -> list[dict[str, Any]]:
    return steps if wanted is None else [row for row in steps if wanted[0] <= row["step"] <= wanted[1]]
