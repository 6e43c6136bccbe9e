"""The user's lines by the device time they cause; where there is no device, by the time of the operators they call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from stepscope.dashboard import blocks
from stepscope.dashboard.blocks import Block

if TYPE_CHECKING:
    from stepscope.dashboard.pages import PageContext

DEVICE, HOST = "device", "cpu_op"  # whose time it is


def made(context: PageContext, basis: str) -> Iterator[Block]:
    """The table by this time, `DEVICE` or `HOST`, of all traces together; or why no line could be found."""
    found = context.run.analysis.device_lines
    if found is None or found.basis != basis or not found.total_ns:
        return
    from stepscope.report import sentences, words

    view: dict[str, Any] = context.run.report(source=context.source).views["device_lines"]
    without = [f"{words.percent(share)} {why}" for why, share in sentences.unattributed(view)]
    if not found.lines:
        yield blocks.empty(sentences.DEVICE_LINES[basis], f"No line could be found. {', '.join(without)}")
        return
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
    notes = [sentences.line_footer(view), *without]
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
        total=len(found.lines),
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
