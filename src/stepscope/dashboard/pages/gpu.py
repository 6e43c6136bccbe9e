"""GPU summary: how well each device was used, over time and in figures, and what ranks exchange and wait for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import PageContext, traced
from stepscope.model.views import Counter, GpuSummary, Views, WorkerShare
from stepscope.report import sentences, words
from stepscope.report.escape import plain

MAX_WORKERS = 64  # in one picture
# parts of a worker's mean step, by chart: name, key, role
_WORKERS = {
    "workers-step": (
        ("computation", "computation_ns", "compute"),
        ("computation and communication at once", "overlap_ns", "overlap"),
        ("communication alone", "communication_ns", "communication"),
        ("other", "other_ns", "other"),
    ),
    "workers-waiting": (
        ("transferring", "transferring_ns", "communication"),
        ("waiting for others", "synchronizing_ns", "sync"),
    ),
}
TITLE = "GPU summary"
CHARTS = ("gpu-use", "gpu-queue", "gpu-copies")


def empty(context: PageContext) -> bool:
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
    items = [*blocks.measures(one, "gpu"), *blocks.measures(one.gpu, "gpu-device")]
    eligible = [row for row in found.known(context, "operators") if row.tensor_core_eligible and row.device_self_ns]
    own = [each for each in views.counters if each.span == one.span and each.device == one.gpu.device]
    return [
        *traced.choice(context, "GPU", "gpu", _key(one), [(_key(gpu), _label(gpu, several=several)) for gpu in gpus]),
        blocks.figures(items, _label(one, several=several)),
        *_charts(own),
        *_compared(context, gpus),
        *_times(context, {item.span.trace for item in found.spans}),
        *([traced.block(context, "eligible", eligible)] if eligible else ()),
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
    for name in CHARTS:
        metrics = (each.split(" ", 2) for each in blocks.LAYOUT.charts[name].metrics.split("; "))
        known = [(by_metric[metric], label, role) for metric, role, label in metrics if metric in by_metric]
        if known:
            first = known[0][0]
            since = [at * first.bucket_ns for at in range(len(first.values))]
            drawn = [(label, each.values, role) for each, label, role in known]
            yield blocks.drawn(name, _sentence([(label, each) for each, label, _ in known]), since, drawn)


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
    yield blocks.drawn(
        "gpu-cores",
        f"Kernel time on tensor cores, and what could be on them, of {len(top)} of {len(gpus)} GPUs.",
        [f"{gpu.span.label} GPU {gpu.gpu.device}" for gpu in top],
        [
            ("on tensor cores", [gpu.tensor_core_pct for gpu in top], None),
            ("below operators that could", [gpu.tensor_core_eligible_pct for gpu in top], None),
        ],
    )
    yield traced.block(context, "gpus", gpus)


def _times(context: PageContext, traces: set[str] | None) -> Iterator[Block]:
    rows = sentences.device_rows(context.run.report(source=context.source))
    yield from blocks.rows_table(
        context, "device-time", (row for row in rows if traces is None or row["trace"] in traces)
    )


def _exchange(context: PageContext, views: Views) -> Iterator[Block]:
    refs = {item.span for item in traced.of_scope(context, views)}
    distributed = views.distributed
    if distributed is not None and distributed.workers:
        yield from _workers(distributed.workers[:MAX_WORKERS])
        yield traced.block(context, "distributed", distributed.workers)
    elif distributed is None and len({ref.rank for ref in refs}) > 1:
        yield from traced.paragraphs([views.absent.get("distributed")])
    rows = [row for row in views.communication if row.span in refs]
    if rows:
        yield traced.block(context, "communication", rows)
    if distributed is not None:
        if distributed.collectives:
            yield traced.block(context, "distributed-collectives", distributed.collectives)
        yield from traced.paragraphs(distributed.notes)


def _workers(rows: Sequence[WorkerShare]) -> Iterator[Block]:
    """A mean step of each worker; waiting beside transferring, where collectives were matched."""
    slowest, fastest = max(rows, key=lambda row: row.wall_ns), min(rows, key=lambda row: row.wall_ns)
    said = {
        "workers-step": f"{slowest.span.label} has the longest mean step, {words.nanoseconds(slowest.wall_ns)}; "
        f"{fastest.span.label} the shortest, {words.nanoseconds(fastest.wall_ns)}.",
        "workers-waiting": "Time of each worker in collectives: what the fastest needed for them, "
        "and waiting for others.",
    }
    for name, parts in _WORKERS.items():
        if name == "workers-step" or any(row.synchronizing_ns is not None for row in rows):
            drawn = [(label, [getattr(row, key) for row in rows], role) for label, key, role in parts]
            yield blocks.drawn(name, said[name], [row.span.label for row in rows], drawn)
