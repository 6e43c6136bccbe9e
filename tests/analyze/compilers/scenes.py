"""Runs of compiled models as small tables: rows of `compiles` and `counters`, and the view that is made of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from stepscope.analyze.compilers import build
from stepscope.analyze.context import Context
from stepscope.model.compilers import CompilersView
from stepscope.tables.schema import Tables
from tests.builders import MS, T0, make_tables, step_rows
from tests.records import some

TRAIN = "/home/user/project/train.py"
TORCH = "/venv/lib/python3.11/site-packages/torch/nn/modules/linear.py"
STEP_MS = 10
METRICS = "CompilationMetrics, torch 2.13.0"

Row = dict[str, Any]


def view_of(tables: Tables) -> CompilersView:
    """The view of tables that hold something of compilers."""
    context = Context(tables)
    return some(build(context))


def view(**tables: Any) -> CompilersView:
    return view_of(make_tables(**tables))


def compile_row(step: int | None, *, ms: float | None = 4, at_ms: float = 1, **columns: Any) -> Row:
    """A compilation of `forward` that begins `at_ms` into `step`, of steps of `STEP_MS` back to back."""
    return {
        "step": step,
        "step_source": "context",
        "time_ns": None if step is None else T0 + round((step * STEP_MS + at_ms) * MS),
        "duration_ns": None if ms is None else round(ms * MS),
        "kind": "compile",
        "direction": "forward",
        "function": "forward",
        "def_file": TRAIN,
        "def_line": 12,
        "call_file": TRAIN,
        "call_line": 40,
        "source": METRICS,
        **columns,
    }


def growing(first: int, count: int, **columns: Any) -> list[Row]:
    """A recompilation in each of `count` steps, because a dimension grew by 4."""
    return [
        compile_row(
            first + number,
            kind="recompile",
            cause="shape",
            subject="x.size(0)",
            old=str(8 + 4 * number),
            new=str(12 + 4 * number),
            reason=f"tensor 'x' size mismatch at index 0. expected {8 + 4 * number}, actual {12 + 4 * number}",
            graph=f"0/{number + 1}",
            cache_entries=number + 1,
            limit=8,
            **columns,
        )
        for number in range(count)
    ]


def sequence(steps: int, compiled: Iterable[int]) -> dict[str, list[Row]]:
    """Steps and one compilation in each of the `compiled`."""
    return {"steps": step_rows(steps), "compiles": [compile_row(step) for step in compiled]}


def metric(name: str, samples: int, total: float, **columns: Any) -> Row:
    return {"name": name, "kind": "metric", "unit": "ns", "samples": samples, "total": total, **columns}


def counter(name: str, value: float, **columns: Any) -> Row:
    return {"name": name, "kind": "counter", "unit": "count", "total": value, **columns}


def percentiles(values: dict[int, float]) -> str:
    return json.dumps({str(percent): value for percent, value in values.items()})


def xla_compiles(per_step: Sequence[int], **columns: Any) -> list[Row]:
    """A log with steps: in each step so many compilations of 300 ms, told together, without a time."""
    return [
        {
            "step": step,
            "step_source": "file",
            "time_ns": None,
            "duration_ns": count * 300 * MS,
            "backend": "torch_xla",
            "count": count,
            "source": "XLA_METRICS_FILE",
            **columns,
        }
        for step, count in enumerate(per_step)
        if count
    ]


def xla_counters(per_step: Sequence[int], step: int | None = None) -> list[Row]:
    """The report at the end of it; ten executions a second."""
    count, steps = sum(per_step), len(per_step)
    return [
        *([metric("CompileTime", count, count * 300e6, step=step)] if count else []),
        metric("ExecuteTime", steps, steps * 1e6, samples_per_second=2.0, step=step),
        counter("MarkStep", steps, step=step),
    ]
