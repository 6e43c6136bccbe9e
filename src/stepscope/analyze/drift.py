"""Whether steady steps grow slower over the run, by how much, in which phase and at which lines.

The level is a straight line through all steps by the method of Theil and Sen, the median of the slopes between pairs,
which single slow steps do not move.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import polars as pl

from stepscope.analyze.calls import PLACE_COLUMNS, Calls, place_of
from stepscope.analyze.steps import with_all_phases
from stepscope.engine.samples import Samples
from stepscope.engine.step_labels import LabelledSteps
from stepscope.model import PHASES, Place
from stepscope.model.machine import DriftFacts, DriftLine
from stepscope.tables.arrays import Int64

MIN_STEPS = 60  # ten in each part: their medians mean something
PARTS = 6  # medians that rise five times in a row do so by chance once in 720 runs
POINTS = 240  # medians of neighbouring steps that the line goes through; its pairs fit into memory at any length
MAX_LINES = 3
MIN_SAMPLES = 10  # of a line in the last third
THIRD = 3
UNKNOWN = 0.05  # of the steps may lack a phase, which is then told by the others


def facts(labelled: LabelledSteps, samples: Samples | None, calls: Calls | None) -> DriftFacts | None:
    """None with fewer than `MIN_STEPS` steady training steps on a rank."""
    steady = labelled.steady().filter(pl.col("start_ns").is_not_null()).sort("process", "start_ns")
    ranks = [own for own in steady.partition_by("process", maintain_order=True) if own.height >= MIN_STEPS]
    if not ranks or len(ranks) < steady["process"].n_unique():
        return None
    fits = [_line(own["wall_ns"].to_numpy() / 1e6) for own in ranks]
    early, late = (float(np.mean([fit[end] for fit in fits])) for end in (0, 1))
    medians = [_medians(own) for own in ranks]
    rising = all(_rises(own, found) for own, found in zip(ranks, medians, strict=True))
    return DriftFacts(
        steps=steady.height,
        parts=PARTS,
        rising=rising,
        early_ms=early,
        late_ms=late,
        lost_ms_per_step=max(0.0, (late - early) / 2),
        medians_ms=tuple(float(value) for value in np.mean(medians, axis=0)),
        phases=_phases(ranks),
        lines=_lines(steady, samples, calls) if rising else (),
    )


def _line(wall_ms: np.ndarray) -> tuple[float, float]:
    """(first, last) value of the line through `wall_ms`."""
    groups = np.array_split(wall_ms, min(POINTS, len(wall_ms)))
    values = np.array([np.median(group) for group in groups])
    ends = np.cumsum([len(group) for group in groups])
    places = ends - np.array([(len(group) + 1) / 2 for group in groups])  # the middle of each group, counted from 0
    first, second = np.triu_indices(len(values), 1)
    slope = float(np.median((values[second] - values[first]) / (places[second] - places[first])))
    start = float(np.median(values - slope * places))
    return start, start + slope * (len(wall_ms) - 1)


def _parts(count: int) -> list[Int64]:
    return np.array_split(np.arange(count), PARTS)


def _medians(own: pl.DataFrame) -> list[float]:
    wall = own["wall_ns"].to_numpy() / 1e6
    return [float(np.median(wall[part])) for part in _parts(own.height)]


def _rises(own: pl.DataFrame, medians: list[float]) -> bool:
    """Every part above the one before, and the last one's faster steps above the first one's slower ones."""
    if any(after <= before for before, after in pairwise(medians)):
        return False
    wall, parts = own["wall_ns"].to_numpy(), _parts(own.height)
    return bool(np.quantile(wall[parts[-1]], 0.25) > np.quantile(wall[parts[0]], 0.75))


def _phases(ranks: list[pl.DataFrame]) -> dict[str, float]:
    """By how much the median of each phase grew from the first part to the last one, mean over ranks."""
    grown: dict[str, float] = {}
    told = [phase for phase in PHASES if any(own[f"{phase}_ns"].null_count() < own.height for own in ranks)]
    for phase in told:
        columns = [with_all_phases(own)[f"{phase}_ns"] for own in ranks]
        if any(column.null_count() > UNKNOWN * len(column) for column in columns):
            continue
        changes = []
        for column in columns:
            values, parts = column.cast(pl.Float64).fill_null(float("nan")).to_numpy(), _parts(len(column))
            changes.append(float(np.nanmedian(values[parts[-1]]) - np.nanmedian(values[parts[0]])) / 1e6)
        grown[phase] = float(np.mean(changes))
    return grown


def _lines(steady: pl.DataFrame, samples: Samples | None, calls: Calls | None) -> tuple[DriftLine, ...]:
    """Lines whose sampled time per step grew from the first third of the steady time to the last, most first."""
    if samples is None:
        return ()
    rows = samples.rank_steps()
    if calls is not None:
        rows = rows.join(calls.of_row, on="row", how="left", maintain_order="left")
    begin, end = steady["start_ns"].min(), (steady["start_ns"] + steady["wall_ns"]).max()
    assert isinstance(begin, int)
    assert isinstance(end, int)
    third = (end - begin) // THIRD
    early = _of_period(steady, rows, begin, begin + third)
    late = _of_period(steady, rows, end - third, end)
    found = [
        DriftLine(place, early.get(place, (0.0, 0))[0], ms, count)
        for place, (ms, count) in late.items()
        if count >= MIN_SAMPLES and ms > early.get(place, (0.0, 0))[0]
    ]
    found.sort(key=lambda line: (line.early_ms_per_step - line.late_ms_per_step, line.place.file, line.place.line or 0))
    return tuple(found[:MAX_LINES])


def _of_period(steady: pl.DataFrame, rows: pl.DataFrame, begin: int, end: int) -> dict[Place, tuple[float, int]]:
    """(ms per step, samples) by line, of stacks whose segment has its middle in that time; {} without any.

    A line that only leads to a library's training is not told, but what of the library works below it.
    """
    middle = (pl.col("start_ns") + pl.col("end_ns")) // 2
    rows = rows.filter(middle.is_between(begin, end))
    steps = steady.filter(pl.col("start_ns").is_between(begin, end))
    total = int(rows["samples"].sum())
    if not total or steps.is_empty():
        return {}
    per_sample = float(steps["wall_ns"].sum()) / steps.height / 1e6 / total
    own = rows.filter(pl.col("user_file").is_not_null() & pl.col("user_line").is_not_null())
    columns = [column for column in PLACE_COLUMNS if column in own.columns]
    found: dict[Place, tuple[float, int]] = {}
    for row in own.group_by(columns).agg(pl.col("samples").sum()).sort(columns).iter_rows(named=True):
        place = place_of(row)
        ms, count = found.get(place, (0.0, 0))
        found[place] = (ms + row["samples"] * per_sample, count + int(row["samples"]))
    return found
