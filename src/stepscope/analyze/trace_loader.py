"""The DataLoader of traces that come without a journal: whether it has workers, who asks it, what runs below it."""

from __future__ import annotations

import numpy as np

from stepscope.engine.attribution import dominant_places, place
from stepscope.engine.host_activity import LOADER_RANGE, matches
from stepscope.engine.spans import Base, Span
from stepscope.engine.tree import climb
from stepscope.model import Place
from stepscope.model.machine import TraceLoader
from stepscope.tables.arrays import Bools, Int64

SINGLE, MULTI = "_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"
MAX_ENTRIES = 5
_Weights = dict[Place, int]


def facts(base: Base) -> tuple[TraceLoader, ...]:
    """One per run of traces in which a loader's range was recorded."""
    runs: dict[str, list[Span]] = {}
    for span in base.spans:
        runs.setdefault(span.ref.run, []).append(span)
    found = (_of_run(base, run, spans) for run, spans in sorted(runs.items()))
    return tuple(one for one in found if one is not None)


def _of_run(base: Base, run: str, spans: list[Span]) -> TraceLoader | None:
    names: set[str] = set()
    calls: _Weights = {}
    entries: _Weights = {}
    fetches = total = 0
    for span in spans:
        rows = _ranges(span)
        if not len(rows):
            continue
        codes = np.unique(span.names.codes[rows])
        names.update(span.names.values[code] for code in codes)
        fetches += len(rows)
        total += int(span.duration_ns[rows].sum())
        caller = dominant_places(base, span, np.zeros(len(rows), np.int64), rows, span.duration_ns[rows], 1)[0]
        if caller is not None:
            calls[caller[0]] = calls.get(caller[0], 0) + len(rows)
        for where, ns in _entries(base, span, rows).items():
            entries[where] = entries.get(where, 0) + ns
    if not fetches:
        return None
    longest = sorted(entries, key=lambda where: (-entries[where], where.file, where.line or 0))[:MAX_ENTRIES]
    return TraceLoader(
        run=run,
        workers=_workers(names),
        call=max(calls, key=lambda where: (calls[where], where.file), default=None),
        entries=tuple(
            Place(where.file, where.line, where.function, min(1.0, entries[where] / total) if total else None)
            for where in longest
        ),
        fetches=fetches,
        fetch_ms=total / fetches / 1e6,
    )


def _ranges(span: Span) -> Int64:
    """Rows of the ranges in which the training thread is in its loader."""
    named = span.names.pick(matches(LOADER_RANGE, span.names.values).tolist())
    return np.flatnonzero(named & ~span.on_device)


def _workers(names: set[str]) -> str | None:
    single, multi = (any(kind in name for name in names) for kind in (SINGLE, MULTI))
    if single == multi:  # neither, or both: a training and an evaluation loader
        return None
    return "none" if single else "some"


def _entries(base: Base, span: Span, ranges: Int64) -> _Weights:
    """ns of the user's functions inside the ranges, by place; only the outermost function of each call counts."""
    if not base.origins.places:
        return {}
    user = base.origins.user[span.first : span.first + len(span)]
    inside: Bools = np.zeros(len(span), bool)
    inside[ranges] = True
    candidates = np.flatnonzero((user >= 0) & span.is_function)
    met = climb(span.parent, span.parent[candidates], inside | (user >= 0))
    entered = (met >= 0) & inside[met]  # below another function of the user's it is part of that one
    below: _Weights = {}
    for index in np.unique(user[candidates[entered]]):
        rows = candidates[entered & (user[candidates] == index)]
        where = place(base, int(index))[0]
        below[where] = below.get(where, 0) + int(span.duration_ns[rows].sum())
    return below
