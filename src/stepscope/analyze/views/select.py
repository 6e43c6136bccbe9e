"""One table in full: the rows of a view in the grouping, span, device or step that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from msgspec import Struct, field

from stepscope.analyze.views import (
    call_stacks,
    communication,
    compiler_tables,
    counters,
    distributed,
    gpus,
    kernels,
    memory,
    modules,
    operators,
    overview,
)
from stepscope.analyze.views.absent import (
    NO_BLOCKS,
    NO_COLLECTIVES,
    NO_DEVICE,
    NO_FAILURE,
    NO_MEMORY,
    NO_MODULES,
    NO_OPERATORS,
    NO_SNAPSHOT,
    NO_STACKS,
    NO_TRACE,
)
from stepscope.engine.spans import Base
from stepscope.engine.user_code import UserCode
from stepscope.errors import UsageError
from stepscope.model.compilers import CompilersView
from stepscope.model.memory import MemoryRecording, MemoryView
from stepscope.model.trace import SpanRef
from stepscope.model.views import Overview

MEMORY_TABLES = ("memory", "out-of-memory")


class Selection(Struct, frozen=True):
    """Which part of a view. `group` is one of the table's groupings, the first by default."""

    worker: str | None = None
    span: int | None = None
    device: int | None = None
    step: int | None = None
    group: str | None = None
    name: str | None = None  # of the operator whose call stacks are asked for


class Rows(Struct, frozen=True):
    """Rows as dataclasses or mappings, all of one kind; `absent` says why there is none."""

    rows: Sequence[Any]
    absent: str | None = None
    notes: tuple[str, ...] = ()


class Source(Struct, frozen=True):
    """What tables are made from: the traces, recordings of memory beside them, and what compilers did.

    `compilers` is only asked for by `COMPILER_TABLES`.
    """

    base: Base
    code: UserCode
    recordings: Sequence[MemoryRecording] = ()
    compilers: CompilersView | None = None

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


class Table(Struct, frozen=True):
    """One line of the list of tables."""

    make: Callable[[Source, Selection], Rows]
    groups: tuple[str, ...] = ()
    takes: frozenset[str] = field(default_factory=frozenset)  # device, step, name


def rows(source: Source, table: str, selection: Selection) -> Rows:
    """The rows of `table`; raises `UsageError` for a grouping or choice the table does not have."""
    found = TABLES[table]
    if selection.group is not None and selection.group not in found.groups:
        known = " or ".join(found.groups)
        raise UsageError(f"--group {selection.group}: " + (f"{table} knows {known}" if known else f"none for {table}"))
    for name in ("device", "step"):
        if getattr(selection, name) is not None and name not in found.takes:
            raise UsageError(f"--{name}: not for the table {table}")
    if table in COMPILER_TABLES:
        return _compiler_rows(source, table, selection)
    if not source.base.spans and not (source.recordings and table.startswith(MEMORY_TABLES)):
        return Rows((), NO_TRACE)
    return found.make(source, selection)


def _compiler_rows(source: Source, table: str, selection: Selection) -> Rows:
    """Tables of all ranks together; raises `UsageError` where a part of the traces is asked for."""
    for name in ("worker", "span"):
        if getattr(selection, name) is not None:
            raise UsageError(f"--{name}: not for the table {table}, which is not made from traces")
    return TABLES[table].make(source, selection)


def _overviews(source: Source, selection: Selection) -> tuple[Overview, ...]:
    chosen = set(source.chosen(selection))
    return tuple(item for item in overview.overviews(source.base) if item.span in chosen)


def _overview(source: Source, selection: Selection) -> Rows:
    return Rows([row for item in _overviews(source, selection) for row in _parts(item)], notes=_step_notes(source))


def _parts(item: Overview) -> Iterator[dict[str, Any]]:
    """The step as a whole, then each part of both partitions."""
    for partition, parts in (("step", {"all": item.wall}), ("stepscope", item.parts), ("tensorboard", item.plugin)):
        for part, summary in parts.items():
            yield {"span": item.span, "partition": partition, "part": part, "summary": summary}


def _step_notes(source: Source) -> tuple[str, ...]:
    bare = [item.span.label for item in overview.overviews(source.base) if not item.has_steps]
    return (f"no step is marked in {', '.join(bare[:4])}: its whole length counts as one",) if bare else ()


def _steps(source: Source, selection: Selection) -> Rows:
    return Rows(
        [
            {
                "span": item.span,
                "step": step.step,
                "wall_ns": step.wall_ns,
                **{f"{part}_ns": ns for part, ns in step.parts_ns.items()},
                **{f"tensorboard_{part.lower().replace(' ', '_')}_ns": ns for part, ns in step.plugin_ns.items()},
            }
            for item in _overviews(source, selection)
            for step in item.steps
        ]
    )


def _gpus(source: Source, selection: Selection) -> Rows:
    chosen = set(source.chosen(selection))
    found = [
        item
        for item in gpus.summaries(source.base, overview.overviews(source.base))
        if item.span in chosen and selection.device in (None, item.gpu.device)
    ]
    return Rows(found, None if found else NO_DEVICE)


def _operators(source: Source, selection: Selection) -> Rows:
    by = selection.group or "name"
    found = operators.table(source.base, span=source.only(selection), by=by, step=selection.step)
    return Rows(found, None if found else NO_OPERATORS)


def _stacks(source: Source, selection: Selection) -> Rows:
    if selection.name is None:
        raise UsageError("--table stacks: of which operator? add --filter NAME with its full name")
    found = call_stacks.stacks(source.base, selection.name, span=source.only(selection), code=source.code)
    return Rows(
        [{**_named(stack), "stack": " < ".join(_frame(frame) for frame in stack.frames)} for stack in found],
        None if found else NO_STACKS,
    )


def _named(stack: Any) -> dict[str, Any]:
    return {"calls": stack.calls, "host_self_ns": stack.host_self_ns, "device_self_ns": stack.device_self_ns}


def _frame(place: Any) -> str:
    return f"{place.file}:{place.line} {place.function or ''}".rstrip()


def _kernels(source: Source, selection: Selection) -> Rows:
    by = selection.group or "name"
    found = kernels.table(source.base, span=source.only(selection), by=by, device=selection.device)
    return Rows(found, None if found else NO_DEVICE)


def _memory_part(
    part: Callable[[MemoryView], Sequence[Any]], absent: str = NO_BLOCKS
) -> Callable[[Source, Selection], Rows]:
    def make(source: Source, selection: Selection) -> Rows:
        view = memory.view(source.base, source.recordings, source.code)
        if view is None:
            return Rows((), NO_MEMORY)
        found = [row for row in part(view) if _is_of(row, selection)]
        return Rows(found, None if found else absent, view.notes)

    return make


def _is_of(row: Any, selection: Selection) -> bool:
    """Whether a row about memory is of the worker and span that are asked for."""
    values = row if isinstance(row, dict) else {name: getattr(row, name, None) for name in ("worker", "span")}
    return all(
        wanted is None or values.get(name) is None or values[name] == wanted
        for name, wanted in (("worker", selection.worker), ("span", selection.span))
    )


def _curve_points(view: MemoryView) -> list[dict[str, Any]]:
    return [
        {
            "source": curve.source,
            "worker": curve.worker,
            "span": curve.span,
            "device": curve.device,
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


def _modules(source: Source, selection: Selection) -> Rows:
    tree = modules.tree(source.base, source.only(selection))
    return Rows(tree.nodes) if tree is not None else Rows((), NO_MODULES)


def _counters(source: Source, selection: Selection) -> Rows:
    chosen = set(source.chosen(selection))
    found = [
        {
            "span": item.span,
            "device": item.device,
            "metric": item.metric,
            "unit": item.unit,
            "time_ns": item.start_ns + at * item.bucket_ns,
            "since_start_ns": at * item.bucket_ns,
            "value": value,
        }
        for item in counters.counters(source.base)
        if item.span in chosen and selection.device in (None, item.device)
        for at, value in enumerate(item.values)
    ]
    return Rows(found, None if found else NO_DEVICE)


def _communication(source: Source, selection: Selection) -> Rows:
    chosen = set(source.chosen(selection))
    found = [row for row in communication.collectives(source.base) if row.span in chosen]
    return Rows(found, None if found else communication.why_absent(source.base) or NO_COLLECTIVES)


def _distributed_part(part: str) -> Callable[[Source, Selection], Rows]:
    def make(source: Source, selection: Selection) -> Rows:
        chosen = set(source.chosen(selection))
        view = distributed.view(source.base)
        if view is None:
            return Rows((), distributed.why_absent(source.base) or NO_COLLECTIVES)
        found = [row for row in getattr(view, part) if getattr(row, "span", None) in (None, *chosen)]
        return Rows(found, None if found else NO_COLLECTIVES, view.notes)

    return make


def _compiler_part(
    part: Callable[[CompilersView], Sequence[Any]], absent: str | Callable[[CompilersView], str]
) -> Callable[[Source, Selection], Rows]:
    def make(source: Source, _: Selection) -> Rows:
        view = source.compilers
        if view is None:
            return Rows((), compiler_tables.NO_COMPILER)
        found = part(view)
        why = absent if isinstance(absent, str) else absent(view)
        return Rows(found, None if found else why, view.notes)

    return make


def _by_group(**makers: Callable[[Source, Selection], Rows]) -> Callable[[Source, Selection], Rows]:
    """The maker of the grouping that is asked for, the first by default."""

    def make(source: Source, selection: Selection) -> Rows:
        return makers[selection.group or next(iter(makers))](source, selection)

    return make


TABLES: dict[str, Table] = {
    "overview": Table(_overview),
    "steps": Table(_steps),
    "gpus": Table(_gpus, takes=frozenset({"device"})),
    "operators": Table(_operators, ("name", "shapes"), frozenset({"step"})),
    "stacks": Table(_stacks, takes=frozenset({"name"})),
    "kernels": Table(_kernels, ("name", "launch"), frozenset({"device"})),
    "memory": Table(_memory_part(lambda view: view.curves)),
    "memory-curve": Table(_memory_part(_curve_points)),
    "memory-operators": Table(_memory_part(lambda view: view.operators)),
    "memory-lines": Table(_memory_part(lambda view: view.lines)),
    "memory-blocks": Table(_memory_part(lambda view: view.blocks)),
    "memory-states": Table(_memory_part(lambda view: view.states, NO_SNAPSHOT)),
    "out-of-memory": Table(_memory_part(lambda view: view.out_of_memory, NO_FAILURE)),
    "modules": Table(_modules),
    "counters": Table(_counters, takes=frozenset({"device"})),
    "communication": Table(_communication),
    "distributed": Table(_distributed_part("workers")),
    "distributed-collectives": Table(_distributed_part("collectives")),
    "compiles": Table(
        _by_group(
            cause=_compiler_part(compiler_tables.causes, compiler_tables.NO_COMPILE),
            change=_compiler_part(compiler_tables.changes, compiler_tables.NO_CHANGE),
        ),
        ("cause", "change"),
    ),
    "compile-steps": Table(
        _by_group(
            kind=_compiler_part(lambda view: view.steps, compiler_tables.NO_STEPS),
            step=_compiler_part(lambda view: view.points, compiler_tables.NO_STEPS),
        ),
        ("kind", "step"),
    ),
    "graph-breaks": Table(_compiler_part(compiler_tables.breaks, compiler_tables.breaks_absent)),
    "transfers": Table(_compiler_part(compiler_tables.transfers, compiler_tables.transfers_absent)),
    "xla-metrics": Table(_compiler_part(compiler_tables.metrics, compiler_tables.NO_METRICS)),
}
COMPILER_TABLES = frozenset({"compiles", "compile-steps", "graph-breaks", "transfers", "xla-metrics"})
