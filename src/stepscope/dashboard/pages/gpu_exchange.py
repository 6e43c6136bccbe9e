"""What ranks exchange: collectives of each, and, with traces of several, who waits for whom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block
from stepscope.dashboard.pages import traced

if TYPE_CHECKING:
    from stepscope.dashboard.pages import PageContext
    from stepscope.model.views import Distributed, Views, WorkerShare

MAX_WORKERS = 64  # in one picture
_STEP = (
    ("computation", "computation_ns", "compute"),
    ("computation and communication at once", "overlap_ns", "overlap"),
    ("communication alone", "communication_ns", "communication"),
    ("other", "other_ns", "other"),
)
_WAITING = (("transferring", "transferring_ns", "communication"), ("waiting for others", "synchronizing_ns", "sync"))


def known(views: Views) -> bool:
    """Whether there is a collective."""
    return bool(views.communication) or views.distributed is not None


def made(context: PageContext, views: Views) -> Iterator[Block]:
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
    yield _chart(shown, "workers-step", "A mean step of each worker", _STEP, _slowest(shown))
    if any(row.synchronizing_ns is not None for row in shown):
        sentence = "Time of each worker in collectives: what the fastest needed for them, and waiting for others."
        yield _chart(shown, "workers-waiting", "Transferring and waiting in collectives", _WAITING, sentence)
    yield traced.block(context, "distributed", found.workers)


def _slowest(rows: Sequence[WorkerShare]) -> str:
    from stepscope.report import words

    slowest, fastest = max(rows, key=lambda row: row.wall_ns), min(rows, key=lambda row: row.wall_ns)
    return (
        f"{slowest.span.label} has the longest mean step, {words.nanoseconds(slowest.wall_ns)}; "
        f"{fastest.span.label} the shortest, {words.nanoseconds(fastest.wall_ns)}."
    )


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
