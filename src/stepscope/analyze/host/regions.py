"""Ranges the user named: `stepscope.region` from the journal, `record_function` and NVTX ranges from the window."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import polars as pl

from stepscope.engine.host_calls import ProfiledCalls
from stepscope.engine.journal import parse_json
from stepscope.engine.step_labels import LabelledSteps
from stepscope.tables.categories import ANNOTATION
from stepscope.tables.schema import Tables

_OWN_TO_TORCH = re.compile(
    r"^(ProfilerStep|Optimizer\.|enumerate\(DataLoader\)|## |Torch-Compiled|TorchDynamo|DistributedDataParallel\."
    r"|nn\.Module|PyTorch Profiler)"
)


def facts(tables: Tables, labelled: LabelledSteps, window: ProfiledCalls | None) -> tuple[dict[str, Any], ...]:
    """{"name", "calls", "calls_per_step", "ms_per_step", "source"}, costliest first; per steady (or window) step."""
    found = [*_journal(tables, labelled), *_window(window)]
    return tuple(sorted(found, key=lambda region: (-region["ms_per_step"], region["name"])))


def _journal(tables: Tables, labelled: LabelledSteps) -> list[dict[str, Any]]:
    steady = labelled.steady("train")
    rows = tables.journal.filter((pl.col("kind") == "region") & pl.col("duration_ns").is_not_null())
    if rows.is_empty() or steady.is_empty():
        return []
    rows = rows.join(steady.select("process", "step"), on=["process", "step"])
    names = [parse_json(text) for text in rows["data"].to_list()]
    rows = rows.with_columns(
        pl.Series("name", [str(n.get("name", "?")) if isinstance(n, dict) else "?" for n in names], dtype=pl.String)
    )
    counts = [n.get("count", 1) if isinstance(n, dict) else 1 for n in names]
    rows = rows.with_columns(pl.Series("calls", [n if isinstance(n, int) else 1 for n in counts], dtype=pl.Int64))
    grouped = rows.group_by("name").agg(calls=pl.col("calls").sum(), total=pl.col("duration_ns").sum())
    return [_region(name, calls, total, steady.height, "events.jsonl") for name, calls, total in grouped.rows()]


def _window(window: ProfiledCalls | None) -> list[dict[str, Any]]:
    if window is None:
        return []
    sums: dict[str, list[int]] = {}  # calls, ns
    for part in window.parts:
        ranges = part.span.categories.where([ANNOTATION, "gpu_user_annotation"])[part.rows]
        among = ranges & ~part.in_loader & part.inside
        own = np.flatnonzero(part.named(lambda name: _OWN_TO_TORCH.match(name) is None, among))
        for position, ns in zip(own.tolist(), part.duration_ns[own].tolist(), strict=True):
            calls = sums.setdefault(part.name(position), [0, 0])
            calls[0], calls[1] = calls[0] + 1, calls[1] + ns
    return [_region(name, calls, total, window.steps, window.source) for name, (calls, total) in sums.items()]


def _region(name: str, calls: int, total_ns: int, steps: int, source: str) -> dict[str, Any]:
    return {
        "name": name,
        "calls": calls,
        "calls_per_step": calls / steps,
        "ms_per_step": total_ns / steps / 1e6,
        "source": source,
    }
