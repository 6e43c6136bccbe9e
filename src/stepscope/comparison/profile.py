"""What a comparison keeps of one run or trace: a few mappings, so that tables of many runs need not be held at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct

from stepscope.analyze.hotspots.table import HotspotOptions
from stepscope.analyze.sampled.selection import StackSelection
from stepscope.analyze.views.diff import DiffSide
from stepscope.analyze.views.select import Selection
from stepscope.comparison import distribution, measure
from stepscope.comparison.changes import environment, functions, lines, utilisation, windows
from stepscope.comparison.changes.names import relative_to
from stepscope.comparison.changes.rows import Amounts
from stepscope.model import Analysis, Diagnosis, SourceFiles
from stepscope.model.comparison import Measure
from stepscope.model.views.hotspots import Hotspots
from stepscope.tables.schema import Tables

NO_STACKS = "no sampled stacks"
OF_A_SPAN = "a span of a trace holds none; compare the whole"
STEP_TIME = "step time"
SEVERAL = "holds traces of several runs, which have no step time in common; name the folder of one"


class Readable(Protocol):
    """What is asked of a `stepscope.api.Run`."""

    paths: tuple[Path, ...]
    recorded: bool

    @property
    def folder(self) -> Path: ...
    @property
    def tables(self) -> Tables: ...
    @property
    def analysis(self) -> Analysis: ...
    @property
    def diagnosis(self) -> Diagnosis: ...
    def hotspots(self, options: HotspotOptions | None = None) -> Hotspots: ...
    def diff_side(self, selection: Selection | None = None) -> DiffSide: ...


class Profile(Struct, frozen=True):
    """One run, trace or span.

    `measure` is of the steps that the journal holds, outside windows; `profiled` of the steps in windows or traces.
    `functions` and `lines` are ms per step of the main thread, or shares of samples where no step is known (`shares`).
    `absent` says of a kind of change why this side has none.
    """

    label: str
    side: str  # what all runs of the side are called together
    path: str
    recorded: bool
    started_ns: int | None
    measure: Measure | None
    profiled: Measure | None
    spread: Mapping[str, float]  # percentiles of the steps of `measure`
    profiled_spread: Mapping[str, float]  # of those of `profiled`
    diagnosis: Diagnosis | None  # None of a span
    functions: Amounts
    lines: Amounts
    device_lines: Amounts
    shares: bool
    traced: DiffSide
    utilisation: Mapping[str, float]
    environment: Mapping[str, str]
    windows: Mapping[str, str]
    roots: tuple[str, ...]
    source_files: SourceFiles
    absent: Mapping[str, str]


def profile(run: Readable, label: str, selection: Selection | None = None, *, side: str | None = None) -> Profile:
    """Reads what is compared of `run`, or of the one span of it that `selection` names; `side` is its side's label.

    Raises `UnreadableInputError` where nothing can be read, `UsageError` for a span that there is not.
    """
    traced = run.diff_side(selection)
    # the structure of steps costs most and has no row of its own among changes
    side = label if side is None else side
    traced = msgspec.structs.replace(traced, label=side, tree=None, modules=None)
    path = str(run.paths[0])
    whole = selection is None or (selection.worker is None and selection.span is None)
    facts = run.tables.run
    roots = (facts.cwd, *facts.user_roots)
    empty = Profile(
        label=label,
        side=side,
        path=path,
        recorded=run.recorded,
        started_ns=facts.started_ns,
        measure=None,
        profiled=_profiled(traced, label, path),
        spread={},
        profiled_spread=distribution.of_traces(traced.overviews),
        diagnosis=None,
        functions={},
        lines={},
        device_lines={},
        shares=False,
        traced=traced,
        utilisation={},
        environment=environment.of_devices(traced),
        windows=windows.of_trace(traced),
        roots=tuple(root for root in roots if root),
        source_files=SourceFiles(),
        absent={**dict.fromkeys(("function", "line", "finding"), OF_A_SPAN), **_several(traced)},
    )
    return empty if not whole else _with_run(empty, run)


def _with_run(found: Profile, run: Readable) -> Profile:
    """With what only a whole run or all its traces tell."""
    analysis, tables = run.analysis, run.tables
    name = relative_to(found.roots)
    absent = _several(found.traced)
    sampled: Hotspots | None = None
    if tables.stacks.is_empty():
        absent["function"] = NO_STACKS
    else:
        sampled = run.hotspots(HotspotOptions(selection=StackSelection(process="main")))
    steps = None  # traces of others have none but those under the profiler
    if run.recorded:
        steps = measure.measure(tables, analysis, label=found.label, path=found.path)
    own, shares = functions.amounts(sampled, analysis.stacks, name)
    hot = functions.user_lines(sampled, analysis.stacks, name)
    device = lines.of_device(analysis.device_lines, name)
    if not hot and not device:
        absent["line"] = f"{NO_STACKS}, and no device time by line" if sampled is None else "no line of your own code"
    return msgspec.structs.replace(
        found,
        started_ns=analysis.run.started_ns,
        measure=steps,
        spread=distribution.of_run(tables) if steps is not None else {},
        diagnosis=run.diagnosis,
        functions=own,
        lines=hot,
        device_lines=device,
        shares=shares,
        utilisation=utilisation.of_run(analysis),
        environment={**environment.of_run(analysis, tables.manifests), **found.environment},
        windows={**windows.of_run(analysis, steps), **found.windows},
        source_files=analysis.source_files,
        absent=absent,
    )


def _profiled(traced: DiffSide, label: str, path: str) -> Measure | None:
    """The steps of traces; None where they mark none, or are of several runs, which have no step time in common."""
    marked = [one for one in traced.overviews if one.has_steps]
    return measure.of_overviews(marked, label=label, path=path) if marked and not _several(traced) else None


def _several(traced: DiffSide) -> dict[str, str]:
    """Why there is no step time, where the traces are of several runs."""
    runs = {one.span.run for one in traced.overviews if one.has_steps}
    return {STEP_TIME: SEVERAL} if len(runs) > 1 else {}


def absent_of(profiles: Sequence[Profile], kind: str) -> str | None:
    """Why the runs of a side have no `kind`, where that is so of all of them."""
    reasons = [one.absent.get(kind) for one in profiles]
    known = [reason for reason in reasons if reason is not None]
    return known[0] if known and len(known) == len(reasons) else None
