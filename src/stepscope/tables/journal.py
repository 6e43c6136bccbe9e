"""The tables that come from the journal's events and from telemetry: journal, scalars, counters, system."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import polars as pl

from stepscope.read.raw import RawHost, RawRank
from stepscope.read.text import integer, moment_ns, number, string
from stepscope.tables.schema import SCHEMAS

_COLUMNS = ("kind", "time_ns", "duration_ns", "step")


def journal_table(ranks: Iterable[RawRank]) -> pl.DataFrame:
    """All events; `data` is the JSON text of an event's own fields."""
    rows = []
    for rank in ranks:
        for event in rank.journal:
            own = {key: value for key, value in event.items() if key not in _COLUMNS}
            columns = {key: event[key] for key in _COLUMNS}
            rows.append({"rank": rank.rank, "process": rank.name, **columns, "data": msgspec.json.encode(own).decode()})
    return pl.DataFrame(rows, schema=SCHEMAS["journal"])


def scalars_table(ranks: Iterable[RawRank]) -> pl.DataFrame:
    """Values the user logged; one that is no finite number is null."""
    rows = [
        {
            "rank": rank.rank,
            "process": rank.name,
            "step": event["step"],
            "time_ns": event["time_ns"],
            "name": string(event.get("name")),
            "value": number(event.get("value")),
        }
        for rank in ranks
        for event in rank.journal
        if event["kind"] == "scalar"
    ]
    return pl.DataFrame(rows, schema=SCHEMAS["scalars"])


def counters_table(ranks: Iterable[RawRank]) -> pl.DataFrame:
    """Metrics and counters of a compiler's own report, one row each, as of each `counters` event."""
    rows = [
        {"rank": rank.rank, "process": rank.name, "step": event["step"], **row}
        for rank in ranks
        for event in rank.journal
        if event["kind"] == "counters"
        for row in _counters(event)
    ]
    return pl.DataFrame(rows, schema=SCHEMAS["counters"])


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
    rows: list[tuple[Any, ...]] = []
    for host in hosts:
        for line in host.system:
            time_ns = moment_ns(line.get("time_ns"))
            metrics = line.get("metrics")
            if isinstance(metrics, list):
                rows += [
                    (host.name, time_ns, *reading) for entry in metrics if (reading := _reading(entry)) is not None
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
