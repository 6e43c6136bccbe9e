"""What Python's garbage collector took of the steady steps, and at which lines it struck."""

from __future__ import annotations

from typing import Any

import polars as pl

from stepscope.analyze.windows import event_data
from stepscope.engine.step_labels import LabelledSteps
from stepscope.model import Place
from stepscope.model.machine import PauseFacts, PauseLine
from stepscope.tables.schema import Tables

FULL = 2  # generation of a collection that looks at every object


def facts(tables: Tables, labelled: LabelledSteps) -> PauseFacts | None:
    """None without steady training steps whose time is known; a count of 0 where none was struck."""
    steady = labelled.steady().filter(pl.col("start_ns").is_not_null()).sort("start_ns")
    if steady.is_empty():
        return None
    struck = _inside(tables, steady)
    lines: dict[Place, list[int]] = {}
    for row in struck:
        if row["place"] is not None:
            lines.setdefault(row["place"], []).append(row["ns"])
    per_step = 1e6 * steady.height
    collected = [row["collected"] for row in struck if isinstance(row["collected"], int)]
    found = [PauseLine(place, len(ns), sum(ns) / per_step) for place, ns in lines.items()]
    return PauseFacts(
        count=len(struck),
        full=sum(row["generation"] == FULL for row in struck),
        collected=sum(collected) if collected else None,
        steps=steady.height,
        steps_struck=len({(row["process"], row["step"]) for row in struck}),
        ms_per_step=sum(row["ns"] for row in struck) / per_step,
        longest_ms=max((row["ns"] for row in struck), default=0) / 1e6,
        lines=tuple(sorted(found, key=lambda line: (-line.ms_per_step, line.place.file, line.place.line or 0))),
    )


def _inside(tables: Tables, steady: pl.DataFrame) -> list[dict[str, Any]]:
    """The collections that began in a steady step, with what of each lies in it; one that ends later ends with it."""
    found = [
        {
            "process": row["process"],
            "time_ns": row["time_ns"],
            "duration_ns": row["duration_ns"],
            "generation": data.get("generation"),
            "collected": data.get("collected"),
            "place": _place(data),
        }
        for row, data in event_data(tables, "gc")
        if row["time_ns"] is not None and (row["duration_ns"] or 0) > 0
    ]
    result = []
    for process in sorted({row["process"] for row in found}):
        own = steady.filter(pl.col("process") == process)
        starts, ends = own["start_ns"], own["start_ns"] + own["wall_ns"]
        for row in (row for row in found if row["process"] == process):
            index = int(starts.search_sorted(row["time_ns"], side="right")) - 1
            if index >= 0 and row["time_ns"] < ends[index]:
                ns = min(row["duration_ns"], ends[index] - row["time_ns"])
                result.append({**row, "ns": ns, "step": own["step"][index]})
    return result


def _place(data: dict[str, Any]) -> Place | None:
    file, line = data.get("file"), data.get("line")
    if not isinstance(file, str):
        return None
    return Place(file, line if isinstance(line, int) else None, data.get("function"))
