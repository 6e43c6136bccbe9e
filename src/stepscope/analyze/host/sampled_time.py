"""What sampled stacks of main threads are in milliseconds of the steady step, and at most.

The journal times the backward pass, the optimizer and the loader exactly; samples only divide what lies inside each.
So a sample counts as many milliseconds as its part of the step has for each of its samples, and chance moves shares
within a part alone. Where the parts of both disagree by more than chance, the whole step is one part.

Samples that could not be taken are not missing by chance: most are of busy Python code. An upper bound counts all of
them, as far as the parts have room.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.engine.samples import Samples
from stepscope.model import Quality, StepFacts
from stepscope.tables.arrays import Floats, Int64
from stepscope.tables.phases import BACKWARD, DATA_WAIT, FORWARD, OPTIMIZER

REST = "rest"
SIGMAS = 1.96  # of a share: 95 % of all samplings of the same run lie within
DOUBT_SIGMAS = 4.0  # beyond it, and `DOUBT` more, the journal and the samples do not mean the same by a part
DOUBT = 0.03
RANK_SAMPLES = 50  # of a rank's steps: with fewer, chance alone moves a share of a fifth by a quarter of it


class Share(Struct, frozen=True):
    """Time per steady step by sampled stacks: as sampled, and the most that chance and missing samples make of it.

    Of several ranks `ms` is the mean; `at_most_ms` is that of the rank with the most of it, because all wait for it.
    """

    ms: float
    at_most_ms: float
    samples: int


class SampledTime(Struct, frozen=True):
    """`rows`: steady stacks inside steps with `part`; `part_ms`, `part_samples`: of each part of the mean step.

    `rank_samples`: of each rank with enough of them to be told apart. `missed`: the share of samples of the whole run
    that could not be taken, or were torn and left out.
    """

    rows: pl.DataFrame
    part_ms: Mapping[str, float]
    part_samples: Mapping[str, int]
    mean_ms: float
    rank_samples: Mapping[int, int]
    missed: float = 0.0

    @property
    def samples(self) -> int:
        """All of them."""
        return sum(self.part_samples.values())

    def with_ms(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Rows of `rows` with `ms`: what each stands for in the mean step."""
        per_sample = {part: self.part_ms[part] / count for part, count in self.part_samples.items()}
        ms = pl.col("part").replace_strict(per_sample, default=0.0, return_dtype=pl.Float64) * pl.col("samples")
        return rows.with_columns(ms=ms)

    def share(self, rows: pl.DataFrame) -> Share:
        """Of rows out of `rows`."""
        ms = variance = room_ms = 0.0
        count = 0
        for part, samples in rows.group_by("part").agg(pl.col("samples").sum()).sort("part").iter_rows():
            total, part_ms = self.part_samples[part], self.part_ms[part]
            fraction = samples / total
            ms += part_ms * fraction
            variance += part_ms**2 * fraction * (1.0 - fraction) / total
            count += int(samples)
            room_ms += part_ms * (1.0 - fraction)
        most = max(ms + SIGMAS * math.sqrt(variance), ms * self._on_worst_rank(rows, count))
        if count:
            most += min(room_ms, self.missed * (self.mean_ms - ms))
        return Share(ms, min(self.mean_ms, most), count)

    def share_of(self, rows: Sequence[int] | pl.Series) -> Share:
        """Of the stacks of these numbers (`row`); those outside of steady steps count nothing."""
        numbers = pl.Series("row", rows, dtype=self.rows["row"].dtype)
        return self.share(self.rows.filter(pl.col("row").is_in(numbers.implode())))

    def _on_worst_rank(self, rows: pl.DataFrame, count: int) -> float:
        """What the rank with the most of these rows has of them, by the mean over ranks; 1 where none is told apart."""
        if len(self.rank_samples) < 2 or not count:
            return 1.0
        own = dict(rows.filter(pl.col("rank").is_not_null()).group_by("rank").agg(pl.col("samples").sum()).rows())
        worst = max(own.get(rank, 0) / total for rank, total in self.rank_samples.items())
        return float(worst * self.samples / count)


def sampled_time(samples: Samples | None, train: StepFacts | None, quality: Quality) -> SampledTime | None:
    """None without stacks in steady steps. `quality` tells how many samples could not be taken."""
    if samples is None or train is None:
        return None
    rows = samples.rank_steps()
    if not int(rows["samples"].sum()):
        return None
    ranks = rows.filter(pl.col("rank").is_not_null()).group_by("rank").agg(pl.col("samples").sum()).sort("rank").rows()
    by_rank = {int(rank): int(count) for rank, count in ranks if count >= RANK_SAMPLES}
    timed = {part.category: part.ms for part in train.partition}
    # without a loader's own frames, what the journal calls data wait is whatever stands before the forward pass
    own = [phase for phase in (BACKWARD, OPTIMIZER) if phase in timed]
    own += [DATA_WAIT] if DATA_WAIT in timed and (rows["phase"] == DATA_WAIT).any() else []
    # the loss is computed in the journal's forward pass and outside of any module: modules take no more than the pass
    for phases in ([*own, FORWARD], own) if FORWARD in timed else (own,):
        found = _divided(rows, {phase: timed[phase] for phase in phases}, train.mean_ms)
        if found is None:
            continue
        rows_of_parts, parts, counts = found
        per_sample = parts[REST] / counts[REST]
        if FORWARD not in phases or counts.get(FORWARD, 0) * per_sample > parts[FORWARD]:
            return SampledTime(rows_of_parts, parts, counts, train.mean_ms, by_rank, _missed(quality))
    total = {REST: int(rows["samples"].sum())}
    rows = rows.with_columns(part=pl.lit(REST))
    return SampledTime(rows, {REST: train.mean_ms}, total, train.mean_ms, by_rank, _missed(quality))


def _missed(quality: Quality) -> float:
    counts = quality.counts
    lost = counts.get("stack_errors", 0) + counts.get("torn_stack_samples", 0)
    tried = counts.get("stack_errors", 0) + counts.get("stack_samples", 0)
    return min(1.0, lost / tried) if tried else 0.0


def _divided(
    rows: pl.DataFrame, timed: Mapping[str, float], mean_ms: float
) -> tuple[pl.DataFrame, dict[str, float], dict[str, int]] | None:
    """(rows with `part`, ms of each part, samples of each); None where journal and samples do not agree."""
    own = list(timed)
    rows = rows.with_columns(pl.when(pl.col("phase").is_in(own)).then("phase").otherwise(pl.lit(REST)).alias("part"))
    counts = {str(part): int(n) for part, n in rows.group_by("part").agg(pl.col("samples").sum()).sort("part").rows()}
    parts = {**timed, REST: mean_ms - sum(timed.values())}
    if parts[REST] <= 0 or not counts.get(REST) or not _agree(counts, parts, mean_ms):
        return None
    return rows, parts, counts


def _agree(counts: Mapping[str, int], parts: Mapping[str, float], mean_ms: float) -> bool:
    total = sum(counts.values())
    for part, ms in parts.items():
        timed = ms / mean_ms
        chance = math.sqrt(max(timed * (1.0 - timed), 1.0 / total) / total)
        if abs(counts.get(part, 0) / total - timed) > DOUBT_SIGMAS * chance + DOUBT:
            return False
    return True


def whole_by_weight(samples: Int64, weights: Floats) -> Int64:
    """Whole samples by weight, which add up to those of each row: what is left over goes to the largest fractions."""
    ideal = samples[:, None] * (weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-300))
    found = np.floor(ideal).astype(np.int64)
    found = np.minimum(found, samples[:, None])
    left = samples - found.sum(axis=1)
    order = np.argsort(-(ideal - found), axis=1, kind="stable")
    place = np.argsort(order, axis=1, kind="stable")
    whole: Int64 = found + (place < left[:, None])
    return whole
