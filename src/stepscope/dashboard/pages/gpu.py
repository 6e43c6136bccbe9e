"""GPU summary: how well each device was used, over time and in figures, and what ranks exchange and wait for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import PageContext, traced
from stepscope.model.views import Counter, GpuSummary, OperatorRow, Views, WorkerShare
from stepscope.report import sentences, words
from stepscope.report.escape import plain
from stepscope.report.table import USE

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
    if distributed is not None and distributed.workers:
        yield from _workers(distributed.workers[:MAX_WORKERS])
        yield traced.block(context, "distributed", distributed.workers)
    elif distributed is None and len({ref.rank for ref in refs}) > 1:
        yield from traced.paragraphs([views.absent.get("distributed")])
    rows = [row for row in views.communication if row.span in refs]
    if rows:
        yield traced.block(context, "communication", rows, bars=("total_ns", "exposed_ns"))
    if distributed is not None and distributed.collectives:
        bars = ("synchronizing_ns", "transferring_ns")
        yield traced.block(context, "distributed-collectives", distributed.collectives, bars=bars)
    if distributed is not None:
        yield from traced.paragraphs(distributed.notes)


def _workers(rows: Sequence[WorkerShare]) -> Iterator[Block]:
    """A mean step of each worker; waiting beside transferring, where collectives were matched."""
    slowest, fastest = max(rows, key=lambda row: row.wall_ns), min(rows, key=lambda row: row.wall_ns)
    said = (
        f"{slowest.span.label} has the longest mean step, {words.nanoseconds(slowest.wall_ns)}; "
        f"{fastest.span.label} the shortest, {words.nanoseconds(fastest.wall_ns)}."
    )
    waited = "Time of each worker in collectives: what the fastest needed for them, and waiting for others."
    for id, title, parts, sentence in (
        ("workers-step", "A mean step of each worker", _STEP, said),
        ("workers-waiting", "Transferring and waiting in collectives", _WAITING, waited),
    ):
        if parts is _STEP or any(row.synchronizing_ns is not None for row in rows):
            x, y = ("worker", "text", [row.span.label for row in rows]), ("mean step", "ns")
            drawn = [(label, [getattr(row, key) for row in rows], role) for label, key, role in parts]
            yield blocks.drawn(id, title, "stacked_bars", sentence, x, y, drawn, ("WorkerShare", parts[0][1]))


TITLE = "GPU summary"
SYNC = "gpu"
_FIGURES = (
    "Utilisation: utilization_pct; SM efficiency: sm_efficiency_pct; Achieved occupancy: achieved_occupancy_pct; "
    "Tensor cores: tensor_core_pct; Could use tensor cores: tensor_core_eligible_pct"
)
_MISSING = "the trace holds no launch configuration or no link that tells"
_USE = (("utilization_pct", "utilisation", "utilisation"), ("sm_efficiency_pct", "SM efficiency", "sm_efficiency"))
# chart, title, heading and unit of y, metrics with names and roles
_CHARTS: tuple[tuple[str, str, tuple[str, str], tuple[tuple[str, str, str], ...]], ...] = (
    ("use", "Use over time", ("mean of the bucket", "pct"), _USE),
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
    exchange = _exchange(context, views) if views is not None else ()
    gpus = [gpu for item in found.spans for gpu in item.gpus]
    if views is None or found.absent is not None or not gpus:
        why = found.absent or traced.absent(context, "gpus", TITLE, "this trace holds no kernels of a device")
        return [why, *_times(context, None), *exchange]
    by_key = {_key(gpu): gpu for gpu in gpus}
    one = by_key[context.choice("gpu", list(by_key))]
    several = len({gpu.span for gpu in gpus}) > 1
    items = blocks.measures(one, _FIGURES, missing=_MISSING)
    items += blocks.measures(one, "Kernels: kernels; Time looked at: window_ns")
    items += blocks.measures(one.gpu, "Memory: memory_bytes; Multiprocessors: multiprocessors")
    own = [each for each in views.counters if each.span == one.span and each.device == one.gpu.device]
    return [
        *traced.choice(context, "GPU", "gpu", _key(one), [(_key(gpu), _label(gpu, several=several)) for gpu in gpus]),
        blocks.figures(items, _label(one, several=several)),
        *_charts(own),
        *_compared(context, gpus),
        *_times(context, {item.span.trace for item in found.spans}),
        *_eligible(context, found.known(context, "operators")),
        *exchange,
    ]


def _key(gpu: GpuSummary) -> str:
    return plain(f"{gpu.span.label}:{gpu.gpu.device}")


def _label(gpu: GpuSummary, *, several: bool) -> str:
    name = f" {gpu.gpu.name}" if gpu.gpu.name else ""
    of = f" ({gpu.span.worker}, span {gpu.span.span})" if several else ""
    return f"GPU {gpu.gpu.device}{name}{of}"


def _charts(counters: Sequence[Counter]) -> Iterator[Block]:
    by_metric = {each.metric: each for each in counters}
    for name, title, y, metrics in _CHARTS:
        known = [(by_metric[metric], label, role) for metric, label, role in metrics if metric in by_metric]
        if not known:
            continue
        first = known[0][0]
        percent = y[1] == "pct"
        yield blocks.drawn(
            f"gpu-{name}",
            title,
            "line",
            _sentence([(label, each) for each, label, _ in known]),
            ("since the start", "ns", [at * first.bucket_ns for at in range(len(first.values))]),
            y,
            [(label, each.values, role) for each, label, role in known],
            ("GpuSummary", "utilization_pct") if percent else ("CounterPoint", "value"),
            y_max=100 if percent else None,
            notes=[USE] if percent else [],
            sync=SYNC,
        )


def _sentence(known: Sequence[tuple[str, Counter]]) -> str:
    said = []
    for label, each in known:
        top = max(range(len(each.values)), key=each.values.__getitem__, default=None)
        if top is not None:
            value, when = each.values[top], words.nanoseconds(top * each.bucket_ns)
            most = f"{words.size(value)}/s" if each.unit == "bytes/s" else f"{words.number(value)} {each.unit}"
            said.append(f"{label}: at most {most}, {when} after the start")
    return f"{'; '.join(said)}." if said else "No value."


def _compared(context: PageContext, gpus: Sequence[GpuSummary]) -> Iterator[Block]:
    if len(gpus) < 2:
        return
    top = gpus[: traced.TOP * 2]
    names = [f"{gpu.span.label} GPU {gpu.gpu.device}" for gpu in top]
    eligible = [gpu.tensor_core_eligible_pct for gpu in top]
    yield blocks.drawn(
        "gpu-cores",
        "Kernel time on tensor cores",
        "bars",
        f"Kernel time on tensor cores, and what could be on them, of {len(top)} of {len(gpus)} GPUs.",
        ("GPU", "text", names),
        ("share of kernel time", "pct"),
        [
            ("on tensor cores", [gpu.tensor_core_pct for gpu in top], None),
            ("below operators that could", eligible, None),
        ],
        ("GpuSummary", "tensor_core_pct"),
        y_max=100,
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
    found = [row for row in rows if row.tensor_core_eligible and row.device_self_ns]
    title = "Operators that could use tensor cores"
    links, bars = {"name": blocks.cell_link("operators", "operator", "name")}, ("device_self_ns",)
    if found:
        yield traced.block(
            context,
            "operators",
            found,
            id="eligible",
            title=title,
            own_notes=False,
            columns=_ELIGIBLE,
            bars=bars,
            links=links,
        )
