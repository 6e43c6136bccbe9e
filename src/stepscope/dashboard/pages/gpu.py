"""GPU summary: how well each device was used, over time and in figures, and what ranks exchange and wait for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import traced
from stepscope.report import sentences, words
from stepscope.report.escape import plain
from stepscope.report.table import USE

if TYPE_CHECKING:
    from stepscope.dashboard.pages import PageContext
    from stepscope.model.views import Counter, Distributed, GpuSummary, OperatorRow, Views, WorkerShare

MAX_WORKERS = 64  # in one picture
_STEP = (
    ("computation", "computation_ns", "compute"),
    ("computation and communication at once", "overlap_ns", "overlap"),
    ("communication alone", "communication_ns", "communication"),
    ("other", "other_ns", "other"),
)
_WAITING = (("transferring", "transferring_ns", "communication"), ("waiting for others", "synchronizing_ns", "sync"))


def _exchange(context: PageContext, views: Views) -> Iterator[Block]:
    """The blocks; of a run of one process none."""
    refs = {item.span for item in traced.of_scope(context, views)}
    distributed = views.distributed
    if distributed is not None:
        yield from _workers(context, distributed)
    elif len({ref.rank for ref in refs}) > 1:
        yield from traced.paragraphs([views.absent.get("distributed")])
    rows = [row for row in views.communication if row.span in refs]
    if rows:
        yield traced.block(context, "communication", rows, bars=("total_ns", "exposed_ns"))
    if distributed is not None and distributed.collectives:
        bars = ("synchronizing_ns", "transferring_ns")
        yield traced.block(context, "distributed-collectives", distributed.collectives, bars=bars)
    if distributed is not None:
        yield from traced.paragraphs(distributed.notes)


def _workers(context: PageContext, found: Distributed) -> Iterator[Block]:
    """A mean step of each worker; waiting beside transferring, where collectives were matched."""
    shown = found.workers[:MAX_WORKERS]
    if not shown:
        return
    slowest, fastest = max(shown, key=lambda row: row.wall_ns), min(shown, key=lambda row: row.wall_ns)
    said = (
        f"{slowest.span.label} has the longest mean step, {words.nanoseconds(slowest.wall_ns)}; "
        f"{fastest.span.label} the shortest, {words.nanoseconds(fastest.wall_ns)}."
    )
    yield _chart(shown, "workers-step", "A mean step of each worker", _STEP, said)
    if any(row.synchronizing_ns is not None for row in shown):
        sentence = "Time of each worker in collectives: what the fastest needed for them, and waiting for others."
        yield _chart(shown, "workers-waiting", "Transferring and waiting in collectives", _WAITING, sentence)
    yield traced.block(context, "distributed", found.workers)


def _chart(
    rows: Sequence[WorkerShare], id: str, title: str, parts: Sequence[tuple[str, str, str]], sentence: str
) -> Block:
    shown = [blocks.series(label, "ns", [getattr(row, key) for row in rows], role=role) for label, key, role in parts]
    return blocks.chart(
        id,
        title,
        "stacked_bars",
        sentence=sentence,
        x=("worker", "text", [row.span.label for row in rows]),
        y=("mean step", "ns"),
        y_min=0,
        series=shown,
        help=blocks.meaning("WorkerShare", parts[0][1]),
    )


TITLE = "GPU summary"
SYNC = "gpu"
_FIGURES = (
    "Utilisation: utilization_pct; SM efficiency: sm_efficiency_pct; Achieved occupancy: achieved_occupancy_pct; "
    "Tensor cores: tensor_core_pct; Could use tensor cores: tensor_core_eligible_pct"
)
_MISSING = "the trace holds no launch configuration or no link that tells"
# chart -> (title, heading and unit of y, metrics with names and roles)
_CHARTS = (
    (
        "use",
        "Use over time",
        ("mean of the bucket", "pct"),
        (("utilization_pct", "utilisation", "utilisation"), ("sm_efficiency_pct", "SM efficiency", "sm_efficiency")),
    ),
    (
        "queue",
        "Launches that wait for the device",
        ("launches", "number"),
        (("queue_length", "queue length", "launch"),),
    ),
    ("copies", "Copies", ("bytes a second", "bytes_per_s"), (("copy_bytes_per_s", "copies", "copies"),)),
)
_ELIGIBLE = "operator: name; calls; device self: device_self_ns; on tensor cores: tensor_core_self_pct; line: file"
_TIMES = blocks.columns(
    "Trace: label; First to last: total_ns ns; Busy: busy_ns ns; Compute: compute_ns ns; "
    "Communication: communication_ns ns; Exposed communication: exposed_communication_ns ns; Copies: memcpy_ns ns; "
    "Exposed copies: exposed_memcpy_ns ns; Idle: idle_ns ns; Busy share: busy_share share; Slices: events count"
)


def empty(context: PageContext) -> bool:
    """Whether no trace holds work of a device, nor collectives."""
    views = context.run.analysis.views
    if views is None:
        return True
    return not (any(span.gpus for span in views.spans) or views.communication or views.distributed is not None)


def build(context: PageContext) -> list[Block]:
    """The page; raises `UsageError` for a scope that names no span."""
    found = traced.chosen(context, "gpus", TITLE)
    views = context.run.analysis.views
    exchange = [*_exchange(context, views)] if views is not None else []
    if found.absent is not None:
        return [found.absent, *_times(context, None), *exchange]
    gpus = [gpu for item in found.spans for gpu in item.gpus]
    if not gpus or views is None:
        why = traced.absent(context, "gpus", TITLE, "this trace holds no kernels of a device")
        return [why, *_times(context, None), *exchange]
    one = _one(context, gpus)
    several = len({gpu.span for gpu in gpus}) > 1
    options = [(_key(gpu), _label(gpu, several=several)) for gpu in gpus]
    refs = {item.span for item in found.spans}
    own = [each for each in views.counters if each.span == one.span and each.device == one.gpu.device]
    return [
        *traced.choice(context, "GPU", "gpu", _key(one), options),
        _figures(one, _label(one, several=several)),
        *_charts(own),
        *_compared(context, gpus),
        *_times(context, {ref.trace for ref in refs}),
        *_eligible(context, views.operators if found.single is None else found.single.operators),
        *exchange,
    ]


def _key(gpu: GpuSummary) -> str:
    return plain(f"{gpu.span.label}:{gpu.gpu.device}")


def _label(gpu: GpuSummary, *, several: bool) -> str:
    """The device, and the span where there are several."""
    name = f" {gpu.gpu.name}" if gpu.gpu.name else ""
    of = f" ({gpu.span.worker}, span {gpu.span.span})" if several else ""
    return f"GPU {gpu.gpu.device}{name}{of}"


def _one(context: PageContext, gpus: Sequence[GpuSummary]) -> GpuSummary:
    by_key = {_key(gpu): gpu for gpu in gpus}
    return by_key[context.choice("gpu", list(by_key))]


def _figures(gpu: GpuSummary, title: str) -> Block:
    items = blocks.measures(gpu, _FIGURES, missing=_MISSING)
    items += blocks.measures(gpu, "Kernels: kernels; Time looked at: window_ns")
    items += blocks.measures(gpu.gpu, "Memory: memory_bytes; Multiprocessors: multiprocessors")
    return blocks.figures(items, title)


def _charts(counters: Sequence[Counter]) -> Iterator[Block]:
    """The device over time."""
    by_metric = {each.metric: each for each in counters}
    for name, title, y, metrics in _CHARTS:
        known = [(by_metric[metric], label, role) for metric, label, role in metrics if metric in by_metric]
        if not known:
            continue
        first = known[0][0]
        percent = y[1] == "pct"
        yield blocks.chart(
            f"gpu-{name}",
            title,
            "line",
            sentence=_sentence([(label, each) for each, label, _ in known]),
            x=("since the start", "ns", [at * first.bucket_ns for at in range(len(first.values))]),
            y=y,
            y_min=0,
            y_max=100 if percent else None,
            series=[blocks.series(label, y[1], each.values, role=role) for each, label, role in known],
            help=blocks.meaning("GpuSummary", "utilization_pct")
            if percent
            else blocks.meaning("CounterPoint", "value"),
            notes=[USE] if percent else [],
            sync=SYNC,
        )


def _sentence(known: Sequence[tuple[str, Counter]]) -> str:
    """Where each series is highest."""
    said = []
    for label, each in known:
        top = max(range(len(each.values)), key=each.values.__getitem__, default=None)
        if top is not None:
            value, when = each.values[top], words.nanoseconds(top * each.bucket_ns)
            most = f"{words.size(value)}/s" if each.unit == "bytes/s" else f"{words.number(value)} {each.unit}"
            said.append(f"{label}: at most {most}, {when} after the start")
    return f"{'; '.join(said)}." if said else "No value."


def _compared(context: PageContext, gpus: Sequence[GpuSummary]) -> Iterator[Block]:
    """All devices beside each other, where there are several."""
    if len(gpus) < 2:
        return
    top = gpus[: traced.TOP * 2]
    names = [f"{gpu.span.label} GPU {gpu.gpu.device}" for gpu in top]
    yield blocks.chart(
        "gpu-cores",
        "Kernel time on tensor cores",
        "bars",
        sentence=f"Kernel time on tensor cores, and what could be on them, of {len(top)} of {len(gpus)} GPUs.",
        x=("GPU", "text", names),
        y=("share of kernel time", "pct"),
        y_min=0,
        y_max=100,
        series=[
            blocks.series("on tensor cores", "pct", [gpu.tensor_core_pct for gpu in top]),
            blocks.series("below operators that could", "pct", [gpu.tensor_core_eligible_pct for gpu in top]),
        ],
        help=blocks.meaning("GpuSummary", "tensor_core_pct"),
    )
    yield traced.block(context, "gpus", gpus, title="All GPUs")


def _times(context: PageContext, traces: set[str] | None) -> Iterator[Block]:
    """What the devices did in the traces, by kind; None is all traces."""
    report = context.run.report(source=context.source)
    rows = [row for row in sentences.device_rows(report) if traces is None or row["trace"] in traces]
    notes = ["Compute, exposed communication, exposed copies and idle sum to first to last."]
    yield from blocks.rows_table(
        context, "device-time", "Device time by kind", "DeviceTime", _TIMES, rows, notes=notes, whole=True
    )


def _eligible(context: PageContext, rows: Sequence[OperatorRow]) -> Iterator[Block]:
    """Operators that could use tensor cores, with how much of them does."""
    found = [row for row in rows if row.tensor_core_eligible and row.device_self_ns]
    if not found:
        return
    yield traced.block(
        context,
        "operators",
        found,
        id="eligible",
        title="Operators that could use tensor cores",
        own_notes=False,
        columns=_ELIGIBLE,
        bars=("device_self_ns",),
        links={"name": blocks.cell_link("operators", "operator", "name")},
    )
