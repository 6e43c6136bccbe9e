"""What the selectors on every page offer: workers, spans and steps of a run.

A worker is what traces are of, by the name that the views use, or a training process that left a journal. All of this
needs the analysis of the run, and is quick once that is there.
"""

from __future__ import annotations

from typing import Any

from stepscope.api import Run
from stepscope.report.escape import plain


def workers(run: Run) -> list[dict[str, str]]:
    """(key, label) of each worker: those with traces first, in their order, then processes with nothing but steps."""
    refs = _refs(run)
    traced = {ref.worker: ref.rank for ref in refs}
    behind = {ref.process for ref in refs}
    steps = run.tables.steps.select("process", "rank").unique().sort("rank", "process")
    silent = {str(process): rank for process, rank in steps.rows() if process not in behind and process not in traced}
    return [{"key": plain(key), "label": _label(key, rank)} for key, rank in {**traced, **silent}.items()]


def spans(run: Run) -> list[dict[str, str]]:
    """(key, label, worker) of each span; the key is what `Scope.span` takes."""
    return [{"key": plain(ref.label), "label": f"span {ref.span}", "worker": plain(ref.worker)} for ref in _refs(run)]


def step_range(run: Run) -> dict[str, int] | None:
    """The first and the last step that can be chosen, None of a run without steps."""
    numbers = run.tables.steps["step"].drop_nulls()
    if numbers.is_empty():
        return None
    return {"first": int(numbers.min()), "last": int(numbers.max())}  # type: ignore[arg-type]


def processes(run: Run, worker: str | None) -> frozenset[str] | None:
    """The processes behind a worker, as the table of steps names them; None for all. A key is one of `workers`."""
    if worker is None:
        return None
    behind = {ref.process for ref in _refs(run) if worker in (ref.worker, plain(ref.worker))}
    own = run.tables.steps["process"].unique().drop_nulls().to_list()
    return frozenset(behind | {process for process in own if worker in (process, plain(process))})


def _refs(run: Run) -> list[Any]:
    views = run.analysis.views
    return [span.span for span in views.spans] if views is not None else []


def _label(worker: str, rank: int | None) -> str:
    name = plain(worker)
    return name if rank is None or name in (f"rank-{rank}", f"rank {rank}") else f"{name} (rank {rank})"
