"""What reading the traces cost and how far their device slices could be linked, in words.

Shares are of device time: the summed duration of kernels, copies and fills.
"""

from __future__ import annotations

from stepscope.model import Note
from stepscope.tables.events import EventsTable
from stepscope.tables.links import METHODS

INFO, WARNING = "info", "warning"
EVENT_COUNTS = (
    "trace_events",
    "trace_events_lost",
    "trace_events_salvaged",
    "clipped_overlaps",
    "repaired_durations",
    "missing_steps",
    "unreadable_traces",
    "device_slices",
    "device_ns",
    *(f"linked_by_{method}_ns" for method in METHODS),
    "before_recording_ns",
    "graph_ns",
    "unlinked_ns",
)
_SAID_AS = {
    "correlation": "by correlation",
    "flow": "by an arrow from the launch",
    "external_id": "by External id",
    "containment": "by time on the launch's thread",
}
_MAX_NAMED = 3


def trace_notes(events: EventsTable) -> list[Note]:
    """Notes on the traces of a run; none for sound traces without device slices."""
    return [
        *_unreadable(events),
        *_read(events),
        *_clocks(events),
        *_links(events),
    ]


def _unreadable(events: EventsTable) -> list[Note]:
    notes = [Note(WARNING, f"a trace could not be read: {why}", name) for name, why in events.unreadable.items()]
    more = len(notes) - _MAX_NAMED
    if more <= 0:
        return notes
    return [*notes[:_MAX_NAMED], Note(WARNING, f"{more} more trace(s) could not be read", "traces")]


def _read(events: EventsTable) -> list[Note]:
    notes: list[Note] = []
    for trace in events.read:
        index, source = trace.index, f"{trace.rank.name}/{trace.name}"
        said = "".join(f"; {problem}" for problem in index.problems)
        if index.lost:
            text = f"{index.lost:,} of {index.events:,} events of a trace could not be read{said}"
            notes.append(Note(WARNING, text, source))
        elif index.problems:
            notes.append(Note(WARNING, f"a trace is damaged{said}", source))
        if index.salvaged:
            text = f"{index.salvaged:,} of {index.events:,} events of a trace are no valid JSON and were mended"
            notes.append(Note(INFO, text, source))
        if index.repaired:
            text = (
                f"{index.repaired:,} slices had impossible durations (negative, over a week, or on a stream over later "
                "work) and were cut"
            )
            notes.append(Note(WARNING, text, source))
    missing = events.counts["missing_steps"]
    if missing:
        notes.append(Note(INFO, f"{missing} step(s) between the first and the last are in no trace", "traces"))
    return notes


def _clocks(events: EventsTable) -> list[Note]:
    return [
        Note(INFO, f"the trace's clock was {-offset / 1e6:.1f} ms ahead of the journal's and has been moved", source)
        if offset < 0
        else Note(INFO, f"the trace's clock was {offset / 1e6:.1f} ms behind the journal's and has been moved", source)
        for source, offset in events.offsets.items()
    ]


def _links(events: EventsTable) -> list[Note]:
    counts, source = events.counts, "traces"
    total = counts["device_ns"]
    if not total:
        return []
    before, graph = counts["before_recording_ns"], counts["graph_ns"]
    launched = total - before
    if not launched:
        text = "no launch of a kernel or copy was recorded, so device time cannot be linked to operators or lines"
        return [Note(WARNING, text, source)]
    by_method = {method: counts[f"linked_by_{method}_ns"] for method in METHODS}
    linked = sum(by_method.values())
    ways = ", ".join(f"{_share(ns, launched)} {_SAID_AS[method]}" for method, ns in by_method.items() if ns)
    text = f"{_share(linked, launched)} of the device time whose launch was recorded is linked to an operator"
    short = linked + graph < 0.99 * launched
    notes = [Note(WARNING if short else INFO, f"{text} ({ways})" if ways else text, source)]
    if before:
        text = (
            f"{_share(before, total)} of device time was launched before the recording began: "
            "its launches are in no trace"
        )
        notes.append(Note(INFO, text, source))
    if graph:
        text = (
            f"{_share(graph, total)} of device time was launched by CUDA graphs and cannot be linked to single "
            "operators: a replay is one call for all its kernels, and the operators ran when the graph was captured"
        )
        notes.append(Note(INFO, text, source))
    return notes


def _share(part: int, whole: int) -> str:
    percent = 100 * part / whole
    if part and percent < 0.1:
        return "under 0.1 %"
    if part < whole and percent > 99.9:
        return "over 99.9 %"
    return f"{percent:.1f} %"
