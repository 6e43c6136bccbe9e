"""Views of traces as they are asked for: one table in full, and all of them as the report shows them.

A table's rows are those of a view in the grouping, span, device or step that was asked for: records or mappings of one
level, so that each is a line of a CSV file. Where there is none, a reason says what to record: an empty table says
nothing. `LazyViews` makes each view of the report when it is asked for, the TensorBoard plugin's own too, in its units
and under its names, worker by worker and span by span.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from stepscope.analyze import curves
from stepscope.analyze.context import Context
from stepscope.analyze.views import allocated_memory, communication, kernels, operators, overview
from stepscope.analyze.views.kernels import plugin_kernels
from stepscope.analyze.views.operators import plugin_operators
from stepscope.analyze.views.overview import plugin_rows
from stepscope.engine.spans import Base
from stepscope.engine.user_code import UserCode
from stepscope.errors import UsageError
from stepscope.model.compilers import CompilersView
from stepscope.model.findings import Place
from stepscope.model.machine import EnergyFacts
from stepscope.model.memory import MemoryRecording, MemoryView
from stepscope.model.ranks import HangRank, HangVerdict
from stepscope.model.trace import SpanRef
from stepscope.model.views import OperatorRow, Overview, SpanViews, Views
from stepscope.tables.arrays import return_freed_memory

ENERGY = "energy"
NO_TRACE = "no trace of torch.profiler was read"
NO_DEVICE = (
    "no trace holds work of a device: recorded on a CPU, without ProfilerActivity.CUDA or leave for CUPTI, or cut off"
)
NO_OPERATORS = "no trace holds operators: record with ProfilerActivity.CPU"
NO_MEMORY = "no trace holds allocations: record with profile_memory=True"
NO_MODULES = "no trace holds modules: record with with_stack=True"
NO_COMPILER = (
    "no compiler was seen: record with `stepscope run` a script that uses torch.compile or torch_xla, or give a report "
    "of torch_xla"
)
NO_STEPS = "no step is known in which something was compiled"
NO_CURVES = "neither steps nor metrics nor telemetry were recorded"


class Selection(Struct, frozen=True):
    """Which part of a view. `group` is one of the table's groupings, the first by default."""

    worker: str | None = None
    span: int | None = None
    device: int | None = None
    step: int | None = None
    group: str | None = None
    name: str | None = None  # of the operator whose call stacks are asked for; a pattern for names of metrics
    top: int | None = None  # of metrics, the first rows alone


class Rows(Struct, frozen=True):
    """Rows as records or mappings, all of one kind; `absent` says why there is none."""

    rows: Sequence[Any]
    absent: str | None = None
    notes: tuple[str, ...] = ()


class FirstRows(Rows, frozen=True):
    """The first of `total` rows."""

    total: int = 0


class Source(Struct, frozen=True):
    """What tables are made from: the run, recordings of memory beside it, what compilers did, and what it drew.

    `compilers` is only asked for by `COMPILER_TABLES`, `energy` by the table of that name, `hang` by
    `HANG_TABLES`.
    """

    context: Context
    recordings: Sequence[MemoryRecording] = ()
    compilers: CompilersView | None = None
    energy: EnergyFacts | None = None
    hang: HangVerdict | None = None

    @property
    def base(self) -> Base:
        return self.context.base

    def chosen(self, selection: Selection) -> tuple[SpanRef, ...]:
        """The spans that are asked for; raises `UsageError` where there is none such."""
        refs = tuple(span.ref for span in self.base.spans)
        found = tuple(
            ref for ref in refs if selection.worker in (None, ref.worker) and selection.span in (None, ref.span)
        )
        if refs and not found:
            known = ", ".join(ref.label for ref in refs[:8]) + (" …" if len(refs) > 8 else "")
            raise UsageError(f"no such worker or span; there are {known}")
        return found

    def only(self, selection: Selection) -> SpanRef | None:
        """The one span that is asked for, None for all together; raises `UsageError` for several but not all."""
        found = self.chosen(selection)
        if len(found) == len(self.base.spans):
            return found[0] if len(found) == 1 else None
        if len(found) > 1:
            raise UsageError(f"{len(found)} spans of that name; give --worker and --span")
        return found[0]


_Make = Callable[[Source, Selection], Rows | Sequence[Any]]


class Table(Struct, frozen=True):
    """One line of the list of tables: what makes its rows, and why there are none where nothing else says it."""

    make: _Make
    absent: str | None = None
    groups: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()  # device, step; of tables that are not made from traces worker


def rows(source: Source, table: str, selection: Selection) -> Rows:
    """The rows of `table`; raises `UsageError` for a grouping or choice the table does not have."""
    found = TABLES[table]
    if selection.group is not None and selection.group not in found.groups:
        known = " or ".join(found.groups)
        raise UsageError(f"--group {selection.group}: " + (f"{table} knows {known}" if known else f"none for {table}"))
    for name in ("device", "step"):
        if getattr(selection, name) is not None and name not in found.takes:
            raise UsageError(f"--{name}: not for the table {table}")
    if table in UNTRACED:
        for name in ("worker", "span"):
            if getattr(selection, name) is not None and name not in found.takes:
                raise UsageError(f"--{name}: not for the table {table}, which is not made from traces")
    elif not source.base.spans and not (source.recordings and table.startswith(("memory", "out-of-memory"))):
        return Rows((), NO_TRACE)
    made = found.make(source, selection)
    made = made if isinstance(made, Rows) else Rows(made)
    why = found.absent if selection.step is None else f"nothing of step {selection.step} was profiled"
    return made if made.rows or made.absent else replace(made, absent=why)


def reasons(base: Base, views: Views) -> dict[str, str]:
    """A reason for each of `views` that is empty."""
    found = {
        "overview": (any(span.overview and span.overview.steps for span in views.spans), NO_TRACE),
        "gpus": (any(span.gpus for span in views.spans), NO_DEVICE),
        "operators": (bool(views.operators), NO_OPERATORS),
        "kernels": (bool(views.kernels), NO_DEVICE),
        "memory": (views.memory is not None, NO_MEMORY),
        "modules": (views.modules is not None, NO_MODULES),
        "counters": (bool(views.counters), NO_DEVICE),
        "communication": (bool(views.communication), communication.why_absent(base) or communication.NO_COLLECTIVES),
    }
    absent = {name: why if base.spans else NO_TRACE for name, (there, why) in found.items() if not there}
    if views.distributed is None:
        absent["distributed"] = communication.why_not_distributed(base) or communication.NO_COLLECTIVES
    return absent


def _fields(record: object, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def _chosen(source: Source, selection: Selection, found: Iterable[Any]) -> list[Any]:
    """The records of the spans and the device that are asked for; those of no span are of all."""
    spans, device = {None, *source.chosen(selection)}, selection.device
    own = (row for row in found if getattr(row, "span", None) in spans)
    return [row for row in own if device is None or getattr(row, "gpu", row).device == device]


def _overview(source: Source, selection: Selection) -> Rows:
    found = [
        {"span": item.span, "partition": partition, "part": part, "summary": summary}
        for item in _chosen(source, selection, overview.overviews(source.base))
        for partition, parts in (("step", {"all": item.wall}), ("stepscope", item.parts), ("tensorboard", item.plugin))
        for part, summary in parts.items()
    ]
    bare = [item.span.label for item in overview.overviews(source.base) if not item.has_steps]
    return Rows(
        found,
        notes=(f"no step is marked in {', '.join(bare[:4])}: its whole length counts as one",) if bare else (),
    )


def _steps(source: Source, selection: Selection) -> list[dict[str, Any]]:
    return [
        {
            "span": item.span,
            "step": step.step,
            "wall_ns": step.wall_ns,
            **{f"{part}_ns": ns for part, ns in step.parts_ns.items()},
            **{f"tensorboard_{part.lower().replace(' ', '_')}_ns": ns for part, ns in step.plugin_ns.items()},
        }
        for item in _chosen(source, selection, overview.overviews(source.base))
        for step in item.steps
    ]


def _stacks(source: Source, selection: Selection) -> list[dict[str, Any]]:
    if selection.name is None:
        raise UsageError("--table stacks: of which operator? add --filter NAME with its full name")
    found = operators.stacks(source.base, selection.name, span=source.only(selection), code=source.context.code)
    frames = [[f"{frame.file}:{frame.line} {frame.function or ''}".rstrip() for frame in one.frames] for one in found]
    return [
        {**_fields(stack, "calls", "host_self_ns", "device_self_ns"), "stack": " < ".join(texts)}
        for stack, texts in zip(found, frames, strict=True)
    ]


def _counters(source: Source, selection: Selection) -> list[dict[str, Any]]:
    return [
        {
            **_fields(item, "span", "device", "metric", "unit"),
            "time_ns": item.start_ns + at * item.bucket_ns,
            "since_start_ns": at * item.bucket_ns,
            "value": value,
        }
        for item in _chosen(source, selection, overview.counters(source.base))
        for at, value in enumerate(item.values)
    ]


def _communication(source: Source, selection: Selection) -> Rows:
    found = _chosen(source, selection, communication.collectives(source.base))
    return Rows(found, None if found else communication.why_absent(source.base))


def _distributed_part(part: str) -> Table:
    def make(source: Source, selection: Selection) -> Rows:
        source.chosen(selection)  # raises for what there is not, also where no view is made
        view = communication.distributed(source.base)
        if view is None:
            return Rows((), communication.why_not_distributed(source.base))
        return Rows(_chosen(source, selection, getattr(view, part)), notes=view.notes)

    return Table(make, communication.NO_COLLECTIVES)


def _memory_part(part: Callable[[MemoryView], Sequence[Any]], absent: str | None = None) -> Table:
    def make(source: Source, selection: Selection) -> Rows:
        view = allocated_memory.view(source.base, source.recordings, source.context.code)
        if view is None:
            return Rows((), NO_MEMORY)
        found = part(view)
        for name, wanted in (("worker", selection.worker), ("span", selection.span)):
            if wanted is not None:
                has = [row.get(name) if isinstance(row, dict) else getattr(row, name, None) for row in found]
                found = [row for row, value in zip(found, has, strict=True) if value in (None, wanted)]
        return Rows(found, notes=view.notes)

    return Table(make, absent or "the recording of memory does not tell")


def _curve_points(view: MemoryView) -> list[dict[str, Any]]:
    return [
        {
            **_fields(curve, "source", "worker", "span", "device"),
            "time_ns": time,
            "since_start_ns": time - curve.times_ns[0],
            "allocated_bytes": allocated,
            "reserved_bytes": reserved,
            **{f"{name}_bytes": values[at] for name, values in curve.by_category.items()},
        }
        for curve in view.curves
        for at, (time, allocated, reserved) in enumerate(
            zip(curve.times_ns, curve.allocated_bytes, curve.reserved_bytes, strict=True)
        )
    ]


def _compiler_part(
    part: Callable[[CompilersView], Sequence[Any]], absent: str, figure: str = "", unseen: str = ""
) -> _Make:
    """Where it is empty there is `absent`; or `unseen`, where no backend knows `figure`."""

    def make(source: Source, _: Selection) -> Rows:
        view = source.compilers
        if view is None:
            return Rows((), NO_COMPILER)
        found = part(view)
        seen = not figure or any(getattr(facts, figure) is not None for facts in view.backends)
        return Rows(found, None if found else absent if seen else unseen, view.notes)

    return make


def _causes(*kinds: str) -> Callable[[CompilersView], list[dict[str, Any]]]:
    def part(view: CompilersView) -> list[dict[str, Any]]:
        return [
            {
                **_fields(cause, "backend", "kind", "cause", "subject"),
                "old": cause.changes[0].old if cause.changes else None,
                "new": cause.changes[-1].new if cause.changes else None,
                **_fields(cause, "operator", "count", "total_ms", "longest_ms", "in_main_steps_ms"),
                **_fields(cause, "step_count", "first_step", "last_step"),
                "steps_of": ", ".join(cause.kinds) or None,
                **_place("", cause.place),
                "function": cause.function,
                **_place("definition_", cause.definition),
                **_place("call_", cause.call),
                **_fields(cause, "cache_entries", "limit"),
                "ranks": ", ".join(str(rank) for rank in cause.ranks),
                **_fields(cause, "text", "hint", "source", "id"),
            }
            for cause in view.causes
            if cause.kind in kinds
        ]

    return part


def _place(prefix: str, place: Place | None) -> dict[str, Any]:
    return {f"{prefix}file": place.file if place else None, f"{prefix}line": place.line if place else None}


def _changes(view: CompilersView) -> list[dict[str, Any]]:
    return [
        {
            **_fields(cause, "backend", "kind", "cause"),
            "step": change.step,
            "subject": change.subject or cause.subject,
            **_fields(change, "old", "new"),
            **_place("", cause.place),
            "function": cause.function,
        }
        for cause in view.causes
        for change in cause.changes
    ]


def _metrics(view: CompilersView) -> list[dict[str, Any]]:
    names = ("rank", "name", "kind", "unit", "samples", "total", "per_second", "value_per_second")
    return [
        {**_fields(metric, *names), **{f"p{percent:g}": value for percent, value in metric.percentiles}}
        for metric in view.metrics
    ]


def _hang_part(part: Callable[[HangVerdict], Sequence[Any]], absent: str) -> Table:
    def make(source: Source, _: Selection) -> Rows:
        verdict = source.hang
        if verdict is None:
            return Rows((), "no dump of a flight recorder and no report of `ncclras -f json` was given")
        return Rows(part(verdict), notes=(verdict.sentence, *verdict.notes))

    return Table(make, absent)


def _rank(row: HangRank) -> dict[str, Any]:
    """A row of a rank on one level: `file` and `line` made its last call, in `stands_file` its main thread stood."""
    names = [name for name in HangRank.__struct_fields__ if name not in ("place", "stands")]
    return {**_fields(row, *names), **_place("", row.place), **_place("stands_", row.stands)}


def _energy(source: Source, _: Selection) -> Rows:
    found = source.energy
    if found is None:
        return Rows((), "no telemetry was recorded, and so no energy: record with `stepscope run`")
    return Rows(found.domains, found.absent, (*found.warnings, *found.notes))


def _metric_values(source: Source, selection: Selection) -> Rows:
    tables = source.base.tables
    known = curves.processes(tables)
    if selection.worker is not None and selection.worker not in known:
        raise UsageError(f"no such worker; there are {', '.join(known[:8])}")
    found = curves.rows(tables, source.context.labelled).drop_nulls("value")
    for column, wanted in (("process", selection.worker), ("step", selection.step)):
        if wanted is not None:
            found = found.filter(pl.col(column) == wanted)
    if selection.name is not None:
        found = curves.matching(found, selection.name)
    if selection.group == "curve":
        return Rows(list(map(curves.summary, curves.made(tables, found))))
    found = found.sort("time_ns", maintain_order=True)
    if found.is_empty():
        some = known or tables.system.height
        none = "no metric has a value there: its names are those of --table metrics --group curve"
        return Rows((), none if some else None)
    origin = tables.run.started_ns or found["time_ns"][0]
    since = (pl.col("time_ns") - origin).alias("since_start_ns")
    columns = found.head(selection.top or found.height).select(
        "step", "time_ns", since, "name", "value", "source", "rank", "process"
    )
    return FirstRows(columns.to_dicts(), total=found.height)


def _by_group(**makers: _Make) -> Table:
    names = tuple(makers)
    return Table(lambda source, selection: makers[selection.group or names[0]](source, selection), groups=names)


TABLES: dict[str, Table] = {
    "overview": Table(_overview),
    "steps": Table(_steps),
    "gpus": Table(
        lambda source, by: _chosen(source, by, overview.summaries(source.base, overview.overviews(source.base))),
        NO_DEVICE,
        takes=("device",),
    ),
    "operators": Table(
        lambda source, by: operators.table(source.base, span=source.only(by), by=by.group or "name", step=by.step),
        NO_OPERATORS,
        ("name", "shapes"),
        ("step",),
    ),
    "stacks": Table(_stacks, "no call stack behind that operator: check its name, or record with with_stack=True"),
    "kernels": Table(
        lambda source, by: kernels.table(source.base, span=source.only(by), by=by.group or "name", device=by.device),
        NO_DEVICE,
        ("name", "launch"),
        ("device",),
    ),
    "memory": _memory_part(lambda view: view.curves),
    "memory-curve": _memory_part(_curve_points),
    "memory-operators": _memory_part(lambda view: view.operators),
    "memory-lines": _memory_part(lambda view: view.lines),
    "memory-blocks": _memory_part(lambda view: view.blocks),
    "memory-states": _memory_part(
        lambda view: view.states,
        "no memory snapshot was given: write one with torch.cuda.memory._dump_snapshot",
    ),
    "out-of-memory": _memory_part(lambda view: view.out_of_memory, "no allocation failed while memory was recorded"),
    "modules": Table(
        lambda source, by: getattr(operators.module_tree(source.base, source.only(by)), "nodes", ()), NO_MODULES
    ),
    "counters": Table(_counters, NO_DEVICE, takes=("device",)),
    "communication": Table(_communication, communication.NO_COLLECTIVES),
    "distributed": _distributed_part("workers"),
    "distributed-collectives": _distributed_part("collectives"),
    "compiles": _by_group(
        cause=_compiler_part(_causes("compile", "recompile", "limit_hit", "failure"), "nothing was compiled"),
        change=_compiler_part(_changes, "the compiler told of no change of a value, shape or type"),
    ),
    "compile-steps": _by_group(
        kind=_compiler_part(lambda view: view.steps, NO_STEPS),
        step=_compiler_part(lambda view: view.points, NO_STEPS),
    ),
    "graph-breaks": Table(
        _compiler_part(
            _causes("graph_break"),
            "no graph broke",
            "graph_breaks",
            "graph breaks were not watched: they are told by torch.compile in a recording of `stepscope run`",
        )
    ),
    "transfers": Table(
        _compiler_part(
            _causes("transfer", "fallback"),
            "nothing was moved to the host by what was watched",
            "transfers",
            "transfers were not watched: they are told by traces and by reports of torch_xla",
        )
    ),
    "xla-metrics": Table(
        _compiler_part(_metrics, "no report of torch_xla was read, and torch_xla was not used in the run")
    ),
    ENERGY: Table(_energy),
    "pending-calls": _hang_part(lambda verdict: verdict.calls, "no call is open in the dumps"),
    "hang-ranks": _hang_part(lambda verdict: [*map(_rank, verdict.ranks)], "no rank is named by what was given"),
    "metrics": Table(_metric_values, NO_CURVES, ("value", "curve"), ("step", "worker")),
}
COMPILER_TABLES = frozenset({"compiles", "compile-steps", "graph-breaks", "transfers", "xla-metrics"})
HANG_TABLES = frozenset({"pending-calls", "hang-ranks"})
UNTRACED = frozenset({*COMPILER_TABLES, *HANG_TABLES, ENERGY, "metrics"})  # not made from traces


_made: Callable[[Callable[[Any], Any]], Any] = cached_property


class _SpanViews(SpanViews):
    def __init__(self, views: LazyViews, span: SpanRef) -> None:
        self.__dict__.update(_views=views, span=span)  # what it inherits from is frozen

    overview = _made(lambda one: one._views.overviews.get(one.span))
    gpus = _made(lambda one: tuple(item for item in one._views.summaries if item.span == one.span))
    operators = _made(lambda one: operators.table(one._views.base, span=one.span))
    kernels = _made(lambda one: kernels.table(one._views.base, span=one.span))


class LazyViews(Views):
    """All views of traces, and of recordings of memory, of which there is one or the other."""

    def __init__(self, base: Base, recordings: Sequence[MemoryRecording], code: UserCode) -> None:
        self.__dict__.update(base=base, _recordings=recordings, _code=code)  # what it inherits from is frozen

    base: Base
    _recordings: Sequence[MemoryRecording]
    _code: UserCode

    @cached_property
    def memory(self) -> MemoryView | None:
        found = allocated_memory.view(self.base, self._recordings, self._code)
        return_freed_memory(self.base.tables.events.height)
        return found

    @cached_property
    def overviews(self) -> Mapping[SpanRef, Overview]:
        """Of the spans that have one."""
        self.memory  # noqa: B018 - needs most memory for itself, so while others hold none yet
        return {item.span: item for item in overview.overviews(self.base)}

    @cached_property
    def operators(self) -> tuple[OperatorRow, ...]:
        return_freed_memory(self.base.tables.events.height)
        found = self.spans[0].operators if len(self.spans) == 1 else operators.table(self.base)
        for span in self.base.spans:
            vars(span).pop("memory", None)  # of what a report holds nothing asks for it after this
        return_freed_memory(self.base.tables.events.height)
        return found

    summaries = _made(lambda views: overview.summaries(views.base, tuple(views.overviews.values())))
    spans = _made(lambda views: tuple(_SpanViews(views, span.ref) for span in views.base.spans))
    kernels = _made(lambda views: views.spans[0].kernels if len(views.spans) == 1 else kernels.table(views.base))
    modules = _made(lambda views: operators.module_tree(views.base))
    counters = _made(lambda views: overview.counters(views.base))
    communication = _made(lambda views: communication.collectives(views.base))
    distributed = _made(lambda views: communication.distributed(views.base))
    tensorboard = _made(lambda views: tensorboard(views.spans))
    absent = _made(lambda views: reasons(views.base, views))


MAX_ROWS = 500  # of operators and of kernels
MAX_SPANS = 64
_GPU_FIGURES = ("utilization_pct", "sm_efficiency_pct", "achieved_occupancy_pct", "tensor_core_pct")


def tensorboard(spans: Sequence[SpanViews]) -> dict[str, Any]:
    """{"workers": {worker: {"spans": {number: {...}}}}}; numbers of spans are texts, from "1" on."""
    workers: dict[str, Any] = {}
    for views in spans[:MAX_SPANS]:
        own = workers.setdefault(views.span.worker, {"spans": {}})
        gpus_of = {
            str(gpu.gpu.device): {
                name: None if (value := getattr(gpu, name)) is None else round(value, 2) for name in _GPU_FIGURES
            }
            for gpu in views.gpus
        }
        own["spans"][str(views.span.span)] = {
            **(plugin_rows(views.overview) if views.overview is not None else {}),
            "gpu": gpus_of,
            "operators": plugin_operators(views.operators[:MAX_ROWS]),
            "kernels": plugin_kernels(views.kernels[:MAX_ROWS]),
        }
    return {"workers": workers}
