"""Two runs, sets of runs, traces or spans → what changed between them.

    found = stepscope.compare("runs/before", "runs/after")
    found.outcome.verdict.text

A folder that holds several run folders is a set, and so is a pattern in quotes ("runs/*-baseline"). The runs of two
sets are paired in the order in which they started.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from msgspec import Struct

from stepscope.api import DEFAULTS, ReadOptions, Run, is_run_folder, open_run, run_folders
from stepscope.errors import UnreadableInputError, UsageError

if TYPE_CHECKING:
    from stepscope.analyze.views.select import Selection
    from stepscope.comparison.profile import Profile
    from stepscope.comparison.sides import Side
    from stepscope.comparison.thresholds import Limits
    from stepscope.model.comparison import Comparison, Version

One: TypeAlias = "str | os.PathLike[str] | Run"
Given: TypeAlias = "One | Sequence[One]"

RUNS = "runs"  # the folder of an experiment that holds its run folders
MAX_RUNS = 200  # of a side
SHOWN = 3  # patterns that are suggested
WHAT = "a run folder, a folder of them, or traces of torch.profiler"


class _Opened(Struct, frozen=True):
    """The runs of one side, how the side is called, and where it lies."""

    label: str
    runs: tuple[Run, ...]
    where: Path


def compare(
    a: Given,
    b: Given,
    *,
    options: ReadOptions = DEFAULTS,
    selection: Selection | None = None,
    against: Selection | None = None,
    limits: Limits | None = None,
) -> Comparison:
    """Compare `b` with the baseline `a`.

    Args:
        a: a run folder, a folder or pattern of several, traces, a `Run`, or a sequence of these: runs to pair.
        b: the same.
        options: how to read them.
        selection: the worker and span of `a` to compare, where it holds traces.
        against: those of `b`.
        limits: what counts as a difference.

    Raises `UnreadableInputError` where nothing can be read of a side, `UsageError` where both are the same.
    """
    from stepscope.analyze.views.select import Selection
    from stepscope.comparison import sides

    opened = _opened(a, options), _opened(b, options)
    chosen = selection or Selection(), against or Selection()
    ours, theirs = ([path.resolve() for run in side.runs for path in run.paths] for side in opened)
    both = next((path for path in theirs if path in ours), None)
    if chosen[0] == chosen[1] and both is not None:
        raise UsageError(f"{both}: on both sides; name two runs, or two spans of it with --span and --against-span")
    baseline, candidate = map(_side, opened, _labels(opened, chosen), chosen)
    return sides.compare(baseline, candidate, limits)


def profiled(run: Run) -> Profile:
    """What a history needs of a run."""
    from stepscope.comparison.profile import profile

    return profile(run, _name(run))


def history(
    runs: Iterable[One], *, profiled: Callable[[Run], Profile] = profiled
) -> tuple[tuple[Version, ...], tuple[str, ...]]:
    """Runs of one script in the order in which they started, each with what was changed since the one before; and
    lines on those that cannot be read."""
    from stepscope.comparison import changes

    profiles, left_out = [], []
    for given in runs:
        run = given if isinstance(given, Run) else open_run(given)
        try:
            profiles.append(profiled(run))
        except UnreadableInputError as error:
            left_out.append(f"{_name(run)} is left out: {error}")
    return changes.versions(profiles), tuple(left_out)


def _opened(given: Given, options: ReadOptions) -> _Opened:
    if isinstance(given, Run):
        return _Opened(_name(given), (given,), given.paths[0])
    if isinstance(given, (str, os.PathLike)):
        path = Path(given)
        folders = _set(path) or [path]
        if len(folders) > MAX_RUNS:
            raise UsageError(f"{path}: holds {len(folders)} runs, and at most {MAX_RUNS} are compared; name fewer")
        runs = tuple(open_run(folder, options=options) for folder in folders)
        return _Opened(_shown(path), runs, path.absolute())
    runs = tuple(run for one in given for run in _opened(one, options).runs)
    if not runs:
        raise UsageError(f"nothing to compare on one side; name {WHAT}")
    label = _name(runs[0]) if len(runs) == 1 else f"{len(runs)} runs from {_name(runs[0])} on"
    return _Opened(label, runs, runs[0].paths[0])


def _set(path: Path) -> list[Path]:
    """The run folders of a set; none of what is one run, or traces.

    The runs of an experiment are one if they are all of the same program; raises `UsageError` where they are not.
    """
    try:
        if not path.exists():
            named = map(Path, sorted(glob.glob(str(path))))
            return [found for found in named if found.is_dir() and is_run_folder(found)]
        if is_run_folder(path):
            return []
        runs = run_folders(path)
        of_experiment = [] if runs else run_folders(path / RUNS)
    except OSError as error:
        raise UnreadableInputError(f"{error.filename}: {error.strerror}; name {WHAT}") from None
    names = sorted({run.name.partition("-")[2] for run in of_experiment})
    if len(names) > 1:
        patterns = ", ".join(f"'{path / RUNS}/*-{name}'" for name in names[:SHOWN])
        raise UsageError(
            f"{path}: an experiment with runs of {len(names)} programs; name those of one, e.g. {patterns}"
        )
    return runs or of_experiment


def _labels(opened: Sequence[_Opened], selections: Sequence[Selection]) -> list[str]:
    """Names that tell the sides apart: the last part of a path, more of it where that is the same."""
    labels = [side.label for side in opened]
    if labels[0] == labels[1]:
        longest = max(len(side.where.parts) for side in opened)
        ends = (["/".join(side.where.parts[-count:]) for side in opened] for count in range(2, longest + 1))
        labels = next((each for each in ends if each[0] != each[1]), labels)
    for side, chosen in enumerate(selections):
        span = f"span {chosen.span}" if chosen.span is not None else None
        labels[side] = " ".join(filter(None, (labels[side], chosen.worker, span)))
    return labels if labels[0] != labels[1] else [f"A: {labels[0]}", f"B: {labels[1]}"]


def _side(opened: _Opened, label: str, selection: Selection) -> Side:
    from msgspec.structs import asdict

    from stepscope.comparison.profile import profile
    from stepscope.comparison.sides import Side
    from stepscope.report import sentences

    profiles: list[Profile] = []
    left_out: list[tuple[Run, UnreadableInputError]] = []
    parts: list[str] = []
    several = len(opened.runs) > 1
    for run in opened.runs:
        # of several, opened anew: what each of them has read need not be held until the last one is
        one = Run(run.paths, run.options, recorded=run.recorded) if several else run
        try:
            profiles.append(profile(one, f"{label}/{_name(run)}" if several else label, selection, side=label))
        except UnreadableInputError as error:
            left_out.append((run, error))
            continue
        if one.ranks_read is not None:
            parts.append(f"{_name(run)}: figures are of {sentences.looked_at(asdict(one.ranks_read))}")
    if not profiles:
        raise left_out[0][1]
    gone = (f"{_name(run)} is left out: {error}" for run, error in left_out)
    return Side(label, tuple(profiles), (*gone, *parts))


def _name(run: Run) -> str:
    return _shown(run.paths[0])


def _shown(path: Path) -> str:
    """The last part of a path, without the ends of a trace's name."""
    name = path.name or path.resolve().name or str(path)
    for end in (".gz", ".json", ".pt.trace"):
        name = name.removesuffix(end)
    return name
