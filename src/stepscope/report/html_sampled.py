"""The tables of report.html on what sampled stacks say beyond hot lines: waits, slow steps, ranks, stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stepscope.model import Report
from stepscope.report import words
from stepscope.report.html_columns import Column, Row, View, field, figure, place
from stepscope.report.sampled import KINDS, STAGES


def _part(name: str, key: str) -> Callable[[Report], Sequence[Row] | None]:
    """The rows `key` of the part `name`, where it is there."""

    def rows(report: Report) -> Sequence[Row] | None:
        part = (report.views.get("sampled") or {}).get(name)
        return part.get(key) if isinstance(part, dict) else None

    return rows


def _waits(report: Report) -> list[Row]:
    """A row per part of every rank's wait."""
    waits = (report.views.get("sampled") or {}).get("waits") or ()
    return [{**part, "rank": wait["rank"], "source": wait["source"]} for wait in waits for part in wait["parts"]]


def _stages(report: Report) -> Sequence[Row] | None:
    return (report.views.get("sampled") or {}).get("stages")


def _worded(key: str, texts: dict[str, str]) -> Callable[[Row, Any], str]:
    return lambda row, _: texts.get(str(row.get(key)), str(row.get(key)))


def _by_rank(row: Row, _: Any) -> str:
    figures = sorted(row["by_rank"].items(), key=lambda pair: -pair[1])[:8]
    return ", ".join(f"{rank}: {words.number(value)}" for rank, value in figures)


SAMPLED: tuple[View, ...] = (
    View(
        "Waiting for the loader",
        "What the sampled wait of each rank for its loader is made of; the parts exclude each other.",
        _waits,
        (
            Column("Rank", figure("rank", words.count), "right"),
            Column("Share of the wait", figure("share", words.percent), "right"),
            Column("Per step", figure("ms_per_step", words.milliseconds), "right"),
            Column("What", _worded("kind", KINDS)),
            Column("Line", place, "line"),
            Column("Samples", figure("samples", words.count), "right"),
            Column("From", field("source")),
        ),
    ),
    View(
        "Lines of slow steps",
        "Lines of your code in slow steps and in typical ones, sampled time of the main thread per step.",
        _part("slow_steps", "lines"),
        (
            Column("Extra", figure("extra_ms_per_step", words.milliseconds), "right"),
            Column("In slow steps", figure("slow_ms_per_step", words.milliseconds), "right"),
            Column("In typical ones", figure("typical_ms_per_step", words.milliseconds), "right"),
            Column("Line", place, "line"),
            Column("Phase", figure("phase", words.term)),
            Column("On top", field("leaf"), "source"),
            Column("Samples", figure("samples", words.count), "right"),
        ),
    ),
    View(
        "Lines in which ranks differ",
        "Sampled time of the main threads by rank, largest first.",
        _part("rank_lines", "lines"),
        (
            Column("Spread", figure("spread", words.number), "right"),
            Column("Line", place, "line"),
            Column("Phase", figure("phase", words.term)),
            Column("By rank", _by_rank, "code"),
            Column("On top", field("leaf"), "source"),
        ),
    ),
    View(
        "Stages of the run",
        "Sampled main threads of ranks: what came before the steady steps, and they.",
        _stages,
        (
            Column("Stage", _worded("stage", STAGES)),
            Column("Share", figure("share", words.percent), "right"),
            Column("Waiting", figure("waiting_share", words.percent), "right"),
            Column("Samples", figure("samples", words.count), "right"),
        ),
    ),
)
