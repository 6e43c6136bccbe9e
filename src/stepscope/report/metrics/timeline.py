"""Definitions of the figures of the timeline that `stepscope view` shows."""

from __future__ import annotations

from stepscope.report.metrics.entry import Section, metrics

_WHERE = "not in the report; the timeline of `stepscope view`"
_START = ("ns", "When it begins, since the first instant of the run.")
_DURATION = ("ns", "How long it lasts; 0 for an instant.")
_ID = ("count", "Number of the slice; holds for one reading of the run.")
_STEP = (
    "count",
    "The step it begins in, of a device slice the one its launch begins in; missing outside steps, and of samples.",
)
_DEPTH = ("count", "Slices around it on its track.")

SECTIONS = (
    Section(
        "TimelineTrack",
        "Timeline: tracks",
        _WHERE,
        metrics(depth=("count", "The most slices that lie above each other on the track.")),
    ),
    Section(
        "TimelineStep",
        "Timeline: steps",
        _WHERE,
        metrics(
            step=("count", "Number of the step in its process."),
            from_ns=_START,
            to_ns=("ns", "When it ends, since the first instant of the run."),
        ),
    ),
    Section(
        "TimelineWindow",
        "Timeline: a window",
        _WHERE,
        metrics(
            from_ns=("ns", "Where the window begins, since the first instant of the run."),
            to_ns=("ns", "Where it ends."),
            total=(
                "count",
                "Slices with any part in the window, before those too thin to be seen are merged; to within a pixel at its borders.",
            ),
        ),
    ),
    Section(
        "TrackSlices",
        "Timeline: slices of a window",
        _WHERE,
        metrics(
            start=("ns", "When each begins, since the window's start; below 0 for one that began before it."),
            duration=(
                "ns",
                "How long each lasts; where several are drawn as one, from the first's start to the last's end.",
            ),
            depth=_DEPTH,
            name=("count", "Which of the window's `names`; of merged slices that of the longest."),
            kind=("count", "Which of the window's `kinds`; of merged slices that of the longest."),
            id=("count", "Number of the slice, -1 where several are drawn as one."),
            count=("count", "Slices drawn as this one: 1, or more where each was too thin to be seen."),
        ),
    ),
    Section(
        "SliceDetail",
        "Timeline: one slice",
        _WHERE,
        metrics(
            id=_ID,
            start_ns=_START,
            duration_ns=_DURATION,
            self_ns=("ns", "Duration without the slices directly inside it; missing of steps, phases and samples."),
            step=_STEP,
        ),
    ),
    Section(
        "SliceFact",
        "Timeline: more about a slice",
        _WHERE,
        metrics(value=("as stated beside it", "What the trace or the journal says of the slice.")),
    ),
    Section(
        "SliceRef",
        "Timeline: slices that belong to another",
        _WHERE,
        metrics(id=_ID, start_ns=_START, duration_ns=_DURATION),
    ),
    Section(
        "SearchHit",
        "Timeline: found by a search",
        _WHERE,
        metrics(id=_ID, depth=_DEPTH, start_ns=_START, duration_ns=_DURATION, step=_STEP),
    ),
    Section(
        "SearchResult",
        "Timeline: a search",
        _WHERE,
        metrics(total=("count", "Slices that were found, of which the first are listed.")),
    ),
)
