"""The user's lines by the device time they cause; where there is no device, by the time of the operators they call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block

if TYPE_CHECKING:
    from stepscope.dashboard.pages import PageContext

DEVICE, HOST = "device", "cpu_op"  # whose time it is


def known(context: PageContext, basis: str) -> bool:
    """Whether lines are known by this time, `DEVICE` or `HOST`."""
    lines = context.run.analysis.device_lines
    return lines is not None and lines.basis == basis and bool(lines.lines)


def made(context: PageContext, basis: str) -> Iterator[Block]:
    """The table, where lines are known by this time. It is of all traces together."""
    if not known(context, basis):
        return
    from stepscope.report import sentences, words

    view: dict[str, Any] = context.run.report(source=context.source).views["device_lines"]
    rows = [
        {
            "place": _place(context, row),
            **{key: row[key] for key in ("ns", "share", "ms_per_step", "events")},
            "code": row.get("code"),
            "note": sentences.line_notes({**row, "ms_per_step": None}) or None,
            "mostly": ", ".join(f"{name} {words.nanoseconds(ns)}" for name, ns in row["top"]),
        }
        for row in view["lines"]
    ]
    whose = "" if context.scope.worker is None and context.scope.span is None else ", all traces together"
    notes = [sentences.line_footer(view)]
    notes += [f"{words.percent(share)}: {why}" for why, share in sentences.unattributed(view)]
    yield blocks.table(
        "device-lines",
        f"{sentences.DEVICE_LINES[view['basis']]}{whose}",
        [
            blocks.column("place", "Line", place=True),
            *(
                blocks.column(key, label, unit, help=blocks.meaning("DeviceLine", key), bar=key == "ns")
                for key, label, unit in (
                    ("ns", "Time", "ns"),
                    ("share", "Share", "share"),
                    ("ms_per_step", "A step", "ms"),
                    ("events", "Slices", "count"),
                )
            ),
            blocks.column("note", "Note", "text"),
            blocks.column("mostly", "Mostly", "text"),
        ],
        rows,
        limit=context.limit,
        total=len(context.run.analysis.device_lines.lines) if context.run.analysis.device_lines else None,
        sorted_by="ns",
        notes=[note for note in notes if note],
    )


def _place(context: PageContext, row: dict[str, Any]) -> dict[str, Any]:
    where = row["place"]
    return blocks.place(
        where["file"],
        where["line"],
        where["function"],
        shown=context.shorten(where["file"], where["line"]),
        guess=row["guess"] or not row["exact_line"],
        code=row.get("code"),
    )
