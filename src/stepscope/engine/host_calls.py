"""The host slices of profiled steps, each with the user's function that called it.

A slice's `caller` is the nearest Python function of the user's around it. `direct` says that only transparent slices
(built-in functions, annotations) lie between: the user's own line made this call. Slices below the loader's `__next__`
are marked, because their cost belongs to the input. What a name says is decided once for each distinct name of a trace.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.engine.spans import Span
from stepscope.engine.step_labels import LabelledSteps
from stepscope.engine.user_code import (
    MODULE_CALL,
    RECORDER,
    RECORDER_WRAPPER,
    TORCH_FILE,
    UserCode,
    callee_name,
    python_frame,
)
from stepscope.model import PHASES
from stepscope.model.counted import things
from stepscope.tables.arrays import (
    NONE,
    Bools,
    Int8,
    Int32,
    Int64,
    by_code,
    nearest_ancestor,
    self_or_ancestor,
    unique,
    window_at,
)
from stepscope.tables.categories import ANNOTATION, OPERATORS, STEP
from stepscope.tables.schema import Tables

# What a slice is to the question "who called?".
TRANSPARENT, OPERATOR, USER, TORCH, LIBRARY, BUILTIN, OWN = range(7)
MAX_SLICES = 250_000  # looked at; about a tenth of a kilobyte of memory each
MIN_STEPS = 3  # looked at even where they hold more
_MARK = re.compile(re.escape(STEP) + r"(\d{1,18})$")
_LOADER_NEXT = re.compile(r"torch/utils/data/dataloader\.py\(\d+\): __next__|^enumerate\(DataLoader\)")


class Function(NamedTuple):
    """A function of the user's; `line` is the definition's."""

    file: str
    line: int | None
    name: str


def _column(name: str) -> cached_property[Int64]:
    return cached_property(lambda calls: calls.span.column(name, calls.rows))


class HostCalls:
    """The host slices of one trace that are looked at: `rows` of the span, ascending. Arrays go by position among them,
    and so do the rows that some of them name, `NONE` for none.
    """

    def __init__(self, span: Span, rows: Int64, code: UserCode) -> None:
        self.span = span
        self._functions: dict[int, Function] = {}  # the user's by the code of their name
        codes, functions = span.names.codes[rows], span.is_function[rows]
        kinds = np.full(len(span.names.values) + 1, LIBRARY, np.int8)  # the last stands for no name
        for named in unique(codes[functions & (codes >= 0)]).tolist():
            kinds[named], user = _kind(span.names.values[named], code)
            if user is not None:
                self._functions[named] = user
        other = np.where(span.is_operator[rows], OPERATOR, TRANSPARENT)
        what: Int8 = np.where(functions, kinds[codes], other).astype(np.int8)
        number = np.full(len(span) + 1, NONE, np.int64)  # the last stands for no row
        number[rows] = np.arange(len(rows))
        ours = self_or_ancestor(number[span.parent[rows]], what == OWN) >= 0
        if ours.any():
            rows, what = rows[~ours], what[~ours]
            number[:] = NONE
            number[rows] = np.arange(len(rows))
        self.rows: Int64 = rows
        self.what: Int8 = what
        self.parent: Int64 = number[span.parent[rows]]
        self.inside: Bools = np.ones(len(rows), bool)  # in complete steps; `prepare` sets it

    def __len__(self) -> int:
        return len(self.rows)

    codes: cached_property[Int32] = cached_property(lambda self: self.span.names.codes[self.rows])
    tracks: cached_property[Int32] = cached_property(lambda self: self.span.tracks.codes[self.rows])
    start_ns: cached_property[Int64] = cached_property(lambda self: self.span.start_ns[self.rows])
    duration_ns: cached_property[Int64] = cached_property(lambda self: self.span.duration_ns[self.rows])
    self_ns, step, sequence = _column("self_ns"), _column("step"), _column("sequence")  # `NONE` where not known

    @cached_property
    def caller(self) -> Int64:
        return nearest_ancestor(self.parent, self.what == USER)

    @cached_property
    def via(self) -> Int64:
        """What the caller called: the slice itself, or the one around it right below the caller, past our wrappers."""
        wrapper = self.named(lambda name: RECORDER_WRAPPER.search(name) is not None, self.what == TRANSPARENT)
        around = nearest_ancestor(self.parent, ~wrapper)
        called = ~wrapper & (around >= 0) & (self.what[around] == USER)
        return self_or_ancestor(self.parent, called).astype(np.int64)

    @cached_property
    def _past_transparent(self) -> Int64:
        """The first slice around each that is neither a built-in function nor transparent."""
        return nearest_ancestor(self.parent, (self.what != TRANSPARENT) & (self.what != BUILTIN))

    @cached_property
    def direct(self) -> Bools:
        found: Bools = (self._past_transparent >= 0) & (self.what[self._past_transparent] == USER)
        return found

    @cached_property
    def function(self) -> Int64:
        around = self._past_transparent
        return np.where((around >= 0) & (self.what[around] != OPERATOR), around, NONE)

    @cached_property
    def in_loader(self) -> Bools:
        fetches = self.named(lambda name: _LOADER_NEXT.search(name) is not None)
        return np.greater_equal(self_or_ancestor(self.parent, fetches), 0)

    @cached_property
    def in_operator(self) -> Bools:
        return nearest_ancestor(self.parent, self.what == OPERATOR) >= 0

    def named(self, wanted: Callable[[str], bool], among: Bools | None = None) -> Bools:
        """Which of the slices (of those `among` them) have a name like that; each distinct name is looked at once."""
        codes = self.codes if among is None else self.codes[among]
        flags = np.zeros(len(self.span.names.values) + 1, bool)
        for code in unique(codes[codes >= 0]).tolist():
            flags[code] = wanted(self.span.names.values[code])
        named = by_code(flags, self.codes)
        return named if among is None else named & among

    def name(self, position: int) -> str:
        code = self.codes[position]
        return self.span.names.values[code] if code >= 0 else ""

    def label(self, position: int) -> str:
        """A name for people; "?" where there is none."""
        return callee_name(self.name(position)) if self.codes[position] >= 0 else "?"

    def function_at(self, position: int) -> Function:
        return self._functions[int(self.codes[position])]


class ProfiledCalls(Struct, frozen=True):
    """The profiled steps of all traces. `steps`: how many complete ones, all processes together.

    `ratio` scales a figure of the window to the steady run, by phase and for the whole step ("wall"); `phase_ms` are
    the two means it comes from, (window, steady).
    """

    parts: tuple[HostCalls, ...]
    steps: int
    ratio: dict[str, float]
    phase_ms: dict[str, tuple[float, float]]
    source: str
    step_times_known: bool
    has_functions: bool  # Python functions were recorded: without them no line made a call

    @property
    def low_confidence(self) -> bool:
        """Too few steps for a mean, or nothing to compare the window with."""
        return self.steps < 2 or "wall" not in self.ratio


def profiled_calls(
    tables: Tables, spans: Sequence[Span], code: UserCode, labelled: LabelledSteps
) -> ProfiledCalls | None:
    """None without a trace that holds operators or Python functions."""
    steps = labelled.frame.filter(pl.col("in_window").fill_null(False))
    known = set(steps.select("process", "step").iter_rows())
    chosen, all_steps = _chosen(tables, known)
    spans = sorted(spans, key=lambda span: span.first)
    parts = [HostCalls(span, _host_rows(span, chosen), code) for span in spans]
    parts = [part for part in parts if len(part)]
    if not any((part.step >= 0).any() for part in parts):
        for part in parts:  # a trace without a journal: its own marks name the steps
            part.step = _marked_steps(part)
    called = [part.span.is_operator[part.rows] | part.span.is_function[part.rows] for part in parts]
    if not any(one.any() for one in called):
        return None
    seen = {
        (part.span.ref.process, step)
        for part, mine in zip(parts, called, strict=True)
        for step in unique(part.step[mine]).tolist()
        if step >= 0
    }
    seen = seen & known or seen  # only steps the journal calls in-window are complete in the trace
    seen = seen if chosen is None else seen & chosen
    if seen:
        for part in parts:
            own = [step for process, step in seen if process == part.span.ref.process]
            part.inside = np.isin(part.step, own)
    phase_ms = _phase_ms(labelled, seen)
    traces = sorted({part.span.ref.trace for part in parts})
    shown = traces[0] if traces else "trace"
    shown = shown if len(traces) < 2 else f"{shown} and {len(traces) - 1} more"
    return ProfiledCalls(
        parts=tuple(parts),
        steps=max(len(seen), 1),
        ratio={name: steady / window for name, (window, steady) in phase_ms.items()},
        phase_ms=phase_ms,
        source=f"{shown}, the first {len(seen)} of {things(all_steps, 'step')}" if all_steps is not None else shown,
        step_times_known=bool(seen),
        has_functions=any(part.span.is_function[part.rows].any() for part in parts),
    )


def _chosen(tables: Tables, known: set[tuple[str, int]]) -> tuple[set[tuple[str, int]] | None, int | None]:
    """(process, step) of the first window steps that hold at most `MAX_SLICES` host slices, and how many there are;
    (None, None) where all of them do.
    """
    if tables.events.height <= MAX_SLICES:
        return None, None
    sizes = (
        tables.events.lazy()
        .filter(pl.col("stream").is_null() & pl.col("step").is_not_null())
        .group_by("process", "step")
        .agg(first_ns=pl.col("start_ns").min(), n=pl.len())
        .sort("first_ns", "process", "step")
        .collect()
    )
    rows = [(process, step, n) for process, step, _, n in sizes.iter_rows() if not known or (process, step) in known]
    total = np.cumsum([n for *_, n in rows])
    kept = {row[:2] for at, row in enumerate(rows) if total[at] <= MAX_SLICES or at < MIN_STEPS}
    return (None, None) if len(kept) == len(rows) else (kept, len(rows))


def _host_rows(span: Span, chosen: set[tuple[str, int]] | None) -> Int64:
    host = (span.series("stream").is_null() & span.series("duration_ns").is_not_null()).to_numpy()
    if chosen is None:
        return np.flatnonzero(host)
    own = [step for process, step in chosen if process == span.ref.process]
    inside = np.isin(span.column("step"), own)
    if not inside.any():
        return np.empty(0, np.int64)
    first_ns = span.start_ns[inside].min()
    around = (span.start_ns < first_ns) & (span.end_ns > first_ns)
    return np.flatnonzero(host & (inside | around))


def _marked_steps(part: HostCalls) -> Int64:
    """The step each slice starts in, by the marks of the trace's own profiler."""
    span = part.span
    numbers = {code: int(match[1]) for code, name in enumerate(span.names.values) if (match := _MARK.match(name))}
    marks = np.flatnonzero(part.named(lambda name: _MARK.match(name) is not None, part.what == TRANSPARENT))
    marks = marks[span.categories.where([ANNOTATION, *OPERATORS])[part.rows[marks]]]
    marks = marks[np.argsort(part.start_ns[marks], kind="stable")]
    if not len(marks):
        return part.step
    starts, ends = part.start_ns[marks], part.start_ns[marks] + part.duration_ns[marks]
    named = np.array([numbers[code] for code in part.codes[marks].tolist()], np.int64)
    return np.append(named, NONE)[window_at(starts, ends, part.start_ns)]


def _kind(name: str, code: UserCode) -> tuple[int, Function | None]:
    if RECORDER_WRAPPER.search(name):
        return TRANSPARENT, None
    if RECORDER.search(name):
        return OWN, None
    frame = python_frame(name)
    file = code.resolve(frame.file) if frame else None
    if frame and file is not None:
        return USER, Function(file, frame.line, frame.function)
    if name.startswith("<built-in"):
        return BUILTIN, None
    torch = name.startswith(MODULE_CALL) or (frame is not None and re.search(TORCH_FILE, frame.file) is not None)
    return (TORCH if torch else LIBRARY), None


def _phase_ms(labelled: LabelledSteps, seen: Iterable[tuple[str, int]]) -> dict[str, tuple[float, float]]:
    """Mean ms per step (in the window, in the steady steps outside it), for the wall time and each phase."""
    keys = pl.DataFrame(list(seen), schema={"process": pl.String, "step": pl.Int64}, orient="row")
    if keys.is_empty():
        return {}
    train = labelled.frame.filter(pl.col("kind") == "train")
    inside = train.join(keys, on=["process", "step"], how="semi")
    outside = train.filter((pl.col("reason") == "steady") & ~pl.col("in_window").fill_null(False))
    means: dict[str, tuple[float, float]] = {}
    for name in ("wall", *PHASES):
        window, steady = inside[f"{name}_ns"].mean(), outside[f"{name}_ns"].mean()
        if isinstance(window, float) and isinstance(steady, float) and window > 0:
            means[name] = (window / 1e6, steady / 1e6)
    return means
