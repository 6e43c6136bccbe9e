"""How often a backend compiled: over the whole run as the article counts, in the last steps, and late.

The whole-run rate holds the compilations of warm-up for ever, so it speaks of runs whose compiling is long over and
misses a storm that begins late. The windowed count asks the last steps after warm-up alone. Both are made here; what
they are worth is the rules' business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct

from stepscope.analyze.compilers.constants import (
    COMPILERS,
    PER_STEP,
    QUIET_STEPS,
    TORCH_XLA,
    WARMUP_STEPS,
    WINDOW_COMPILES,
    WINDOW_STEPS,
)
from stepscope.analyze.compilers.per_step import table
from stepscope.analyze.compilers.prepared import Prepared, counted
from stepscope.analyze.compilers.reports import Report
from stepscope.model.compilers import CompilerSteps, CompileStorm
from stepscope.tables.arrays import Int64


class Rate(Struct, frozen=True):
    """Compilations and steps of one process, warm-up included, as the article counts them."""

    process: str
    compiles: int
    steps: int

    @property
    def too_frequent(self) -> bool:
        """The article's rule."""
        return self.steps > WARMUP_STEPS and self.compiles / self.steps > PER_STEP


class Series(Struct, frozen=True):
    """Step by step whether one kind of step of one process compiled."""

    kind: str | None
    steps: Int64
    compiled: npt.NDArray[np.bool_]


class _Recent(Struct, frozen=True):
    """What the windowed rule and the late one find in a sequence."""

    kind: str | None
    windows: int
    first_window_step: int | None
    late_step: int | None
    quiet_before: int | None
    late_steps: int


def storm(
    prepared: Prepared,
    backend: str,
    reports: Sequence[Report],
    processes: Iterable[str],
    steps: Iterable[CompilerSteps],
) -> CompileStorm | None:
    """The rates of one compiler; None where nothing counts steps."""
    if backend not in COMPILERS:
        return None
    own = prepared.of(backend)
    rate = article_rate(prepared, backend, reports, processes)
    if rate is None:
        return None
    found = [_recent(sequence) for sequence in _sequences(own, reports, processes)]
    worst = max(found, key=lambda one: (one.windows, one.quiet_before or 0, one.late_steps), default=None)
    late_ms, late_share = _late(steps)
    return CompileStorm(
        backend=backend,
        compiles=rate.compiles,
        steps=rate.steps,
        whole_run=rate.too_frequent,
        windows=worst.windows if worst else None,
        first_window_step=worst.first_window_step if worst else None,
        late_step=worst.late_step if worst else None,
        quiet_before=worst.quiet_before if worst else None,
        late_ms=late_ms,
        late_share=late_share,
        kind=worst.kind if worst else None,
        late_steps=worst.late_steps if worst else None,
    )


def article_rate(prepared: Prepared, backend: str, reports: Sequence[Report], processes: Iterable[str]) -> Rate | None:
    """The rate of the process that compiled most.

    torch_xla: samples of CompileTime by MarkStep, of the process's report. torch.compile, and torch_xla without a
    report: compilations that events tell (of torch.compile, frames) by steps of all kinds. None without steps.
    """
    by_process = {report.process: report for report in reports if report.marks and backend == TORCH_XLA}
    compiled = counted(prepared.of(backend).rows)
    rates = []
    for process in processes:
        report = by_process.get(process)
        if report is not None and report.complete:
            rates.append(Rate(process, report.samples("CompileTime"), report.marks or 0))
            continue
        marks = report.marks if report is not None else None
        steps = marks or prepared.steps.filter(pl.col("process") == process).height
        count = int(compiled.filter(pl.col("process") == process)["count"].sum())
        if steps:
            rates.append(Rate(process, count, steps))
    return max(rates, key=lambda rate: (rate.too_frequent, rate.compiles, rate.steps), default=None)


def _sequences(own: Prepared, reports: Iterable[Report], processes: Iterable[str]) -> Iterator[Series]:
    """Of each process and kind of step; of a report whose compilations name their steps, by these."""
    by_process = {report.process: report for report in reports}
    steps = table(own)
    for process in processes:
        mine = steps.filter(pl.col("process") == process)
        for part in mine.partition_by("kind", maintain_order=True):
            ordered = part.sort("index")
            compiled = (ordered["compiles"] > 0).to_numpy()
            yield Series(str(part["kind"][0]), ordered["step"].to_numpy(), compiled)
        report = by_process.get(process)
        if mine.is_empty() and report is not None and report.marks:
            sequence = _of_report(counted(own.rows).filter(pl.col("process") == process), report)
            if sequence is not None:
                yield sequence


def _of_report(rows: pl.DataFrame, report: Report) -> Series | None:
    named = rows.drop_nulls("step")
    if named.is_empty() and (rows.height or report.compiles()):
        return None  # it compiled, and nothing tells when
    first, steps = report.first_step(rows), report.marks or 0
    at = named["step"].to_numpy() - first
    compiled = np.zeros(steps, bool)
    compiled[at[(at >= 0) & (at < steps)]] = True
    return Series(None, first + np.arange(steps), compiled)


def _recent(sequence: Series) -> _Recent:
    compiled, steps = sequence.compiled, sequence.steps
    after = np.arange(len(compiled)) >= WARMUP_STEPS
    so_far = np.concatenate([[0], np.cumsum(compiled & after)])
    ends = np.arange(1, len(compiled) + 1)
    stormy = np.flatnonzero(so_far[ends] - so_far[np.maximum(ends - WINDOW_STEPS, 0)] >= WINDOW_COMPILES)
    at = np.flatnonzero(compiled)
    quiet = np.diff(np.concatenate([[-1], at])) - 1
    late = np.flatnonzero(quiet >= QUIET_STEPS)
    return _Recent(
        kind=sequence.kind,
        windows=len(stormy),
        first_window_step=int(steps[stormy[0]]) if len(stormy) else None,
        late_step=int(steps[at[late[0]]]) if len(late) else None,
        quiet_before=int(quiet[late[0]]) if len(late) else None,
        late_steps=int((compiled & after).sum()),
    )


def _late(steps: Iterable[CompilerSteps]) -> tuple[float | None, float | None]:
    """Compile time after warm-up and its share, of all kinds together."""
    told = [kind for kind in steps if kind.late_compile_ms is not None]
    if not told:
        return None, None
    late_ms = sum(kind.late_compile_ms or 0.0 for kind in told)
    shared = [kind for kind in told if kind.late_wall_ms]
    wall_ms = sum(kind.late_wall_ms or 0.0 for kind in shared)
    return late_ms, min(sum(kind.late_compile_ms or 0.0 for kind in shared) / wall_ms, 1.0) if wall_ms else None
