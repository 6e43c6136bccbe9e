"""What the run learned: each series in short, where it breaks or changes, and what happened in the same steps.

Series are the curves that pages and tables show (`curves.py`): those that are stored, and the time of a step, its
samples per second and the memory held. What is found of one rank's series stands for all: of the lowest that has it;
what is not finite, and spikes, are looked for on the first 16.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import polars as pl
from msgspec.structs import replace

from stepscope.analyze import curves
from stepscope.analyze.curves import Curve
from stepscope.analyze.happenings import SCALE, Happenings, joined
from stepscope.analyze.input.batches import alarms
from stepscope.analyze.metric_series import SCALES, SLOW_SCALES, Leap, levels, spikes
from stepscope.engine.journal import event_data, place_of
from stepscope.engine.step_labels import LabelledSteps
from stepscope.model import Place
from stepscope.model.metrics import (
    Accumulation,
    Clipping,
    Happening,
    LevelChange,
    MetricFacts,
    NonFinite,
    Scaling,
    Spike,
    Watched,
)
from stepscope.read.text import integer
from stepscope.tables.metrics import FOUND, LOSS, NORM, NORM_CLIPPED, is_loss, ratio_to_logged
from stepscope.tables.schema import Tables

PROCESSES = 16
SOURCES = ("backward", "clipping", "scaler")  # of what training itself made, in the order in which a pass makes it
STAGES = {"backward": "forward", "clipping": "backward", "scaler": "scaler"}
NORM_SCALED = "train/grad_norm_scaled"
SEARCH = 20  # updates: GradScaler starts at 2**16 and halves its scale, which is 1 after as many as 16 that it left out
SAME_LOSS = 0.5  # of the updates: one whose last batches are fewer may have a single pass
ZEROS, RATIOS = "watch/zeros/", "watch/update_ratio/"
MAX_SPIKES, MAX_CHANGES = 50, 50
TIMES = 10.0  # a change by more is told as a factor
STEP_MS, RATE = "perf/step_ms", "perf/samples_per_s"
NAMES = {
    STEP_MS: "step time",
    RATE: "samples per second",
    LOSS: "loss",
    NORM: "gradient norm",
    NORM_SCALED: "gradient norm (scaled)",
}
MEMORY = {curves.ALLOCATED: "memory of the device", curves.PRIVATE: "memory of the process"}


def facts(tables: Tables, labelled: LabelledSteps) -> MetricFacts | None:
    """None of a run of which neither metrics nor training steps are known."""
    return None if tables.metrics.is_empty() and labelled.frame.is_empty() else _Run(tables, labelled).facts()


class _Run:
    """What the facts have in common."""

    def __init__(self, tables: Tables, labelled: LabelledSteps) -> None:
        self._tables, self._labelled = tables, labelled
        self._near: dict[str | None, Happenings] = {}

    def facts(self) -> MetricFacts:
        return MetricFacts(
            series=tuple(map(curves.summary, self._all)),
            non_finite=self._non_finite(),
            spikes=tuple(self._spikes()),
            changes=tuple(self._changes()),
            clipping=self._clipping(),
            scaling=self._scaling(),
            accumulation=tuple(self._accumulation()) or None,
            zeros=tuple(_watched(self._all, ZEROS)),
            update_ratios=tuple(_watched(self._all, RATIOS)),
        )

    # -------------------------------------------------------------------------------------------------- series

    @cached_property
    def _all(self) -> list[Curve]:
        """The table, by name, then by rank."""
        found = curves.made(self._tables, self._tables.metrics)
        return sorted(found, key=lambda one: (one.name, one.rank, one.process))

    @cached_property
    def _own(self) -> list[Curve]:
        """Those that training itself made: of losses, norms and scales."""
        return [one for one in self._all if one.source in SOURCES]

    def _of(self, name: str) -> Curve | None:
        """The series of the lowest rank that has one."""
        return next((one for one in self._all if one.name == name), None)

    @cached_property
    def _train(self) -> pl.DataFrame:
        """The training steps of the lowest rank, by start."""
        own = (pl.col("kind") == "train") & pl.col("start_ns").is_not_null()
        frame = self._labelled.frame.filter(own).sort("rank", "process", "start_ns")
        return next(iter(frame.partition_by("process", maintain_order=True)), frame)

    def _measured(self) -> list[Curve]:
        """What steps took, warm-up left out, and the memory held after them."""
        if self._train.is_empty():
            return []
        metrics, lead = self._tables.metrics, pl.col("process") == self._train["process"][0]
        timed = curves.timed(self._labelled).filter(lead & (pl.col("kind") == "train") & ~pl.col("warmup"))
        found = curves.beside(metrics, curves.performance(timed, metrics), curves.memory(self._tables))
        memory = pl.col("name").str.contains(rf"^sys/([^/]*\.)?({'|'.join(MEMORY)})$")
        return curves.made(self._tables, found.filter(lead & (pl.col("name").is_in([STEP_MS, RATE]) | memory)))

    def _happenings(self, process: str | None) -> Happenings:
        if process not in self._near:
            self._near[process] = Happenings(self._tables, self._labelled, process)
        return self._near[process]

    # -------------------------------------------------------------------------------------------- what stands out

    @cached_property
    def _skipped(self) -> dict[str | None, set[int]]:
        """By process the steps in which a GradScaler left an update out."""
        found: dict[str | None, set[int]] = {}
        for row, _ in event_data(self._tables, "scaler_skip"):
            if row["step"] is not None:
                found.setdefault(row["process"], set()).add(row["step"])
        return found

    def _non_finite(self) -> NonFinite | None:
        found = []
        for one in self._all:
            if one.name == NORM_CLIPPED or one.name.startswith("train/lr/"):
                continue
            values = one.values
            if one.source == "clipping" and one.process in self._skipped:  # a GradScaler's search for a scale
                values = np.where(np.isin(one.steps, list(self._skipped[one.process])), 0.0, values)
            for at in np.flatnonzero(~np.isfinite(values))[:1].tolist():
                order = SOURCES.index(one.source) if one.source in SOURCES else len(SOURCES)
                step, later = one.step(at), order == len(SOURCES)
                found.append((step if step is not None else math.inf, later, int(one.times_ns[at]), order, one, at))
        if not found:
            return None
        *_, one, at = min(found, key=lambda each: each[:4])
        step, process, stage = one.step(at), one.process, STAGES.get(one.source, "logged")
        loss = next((each for each in self._all if each.name == LOSS and each.process == process), None)
        after = loss.values[loss.times_ns >= one.times_ns[at]] if loss is not None else np.zeros(0)
        has_norm = any(each.source == "clipping" and each.process == process for each in self._all)
        of_step = (
            alarm.origin
            for alarm in alarms(self._tables)
            if (alarm.process, alarm.step) == (process, step) and isinstance(alarm.value, str)
        )
        origin = next(of_step, None)
        seen = origin is not None and origin.where in ("forward", "inputs")
        first = loss is not None and one.name == LOSS and at == 0
        made = NonFinite(
            name=one.name,
            value=str(float(one.values[at])),
            stage=stage,
            step=step,
            rank=one.rank,
            losses=len(after),
            losses_lost=int((~np.isfinite(after)).sum()),
            sure=stage != "forward" or has_norm or first or seen,
            skipped=step in self._skipped.get(process, ()),
            place=self._places.get(process, {}).get(one.name),
            origin=origin,
            happenings=self._happenings(process).near(step),
            sentence="",
        )
        return replace(made, sentence=_sentence(made))

    @cached_property
    def _places(self) -> dict[str | None, dict[str, Place]]:
        """By process and name the line that calls backward; of `train/loss` the one with most passes."""
        most: dict[tuple[str, str], int] = {}
        found: dict[str | None, dict[str, Place]] = {}
        for row, data in event_data(self._tables, "metric_series"):
            place, count = place_of(data), integer(data.get("values")) or 0
            if data.get("source") != "backward" or place is None:
                continue
            own = found.setdefault(row["process"], {})
            own[f"{LOSS}/{posixpath.basename(place.file)}:{place.line}"] = place
            if count > most.get((row["process"], LOSS), 0):
                most[row["process"], LOSS] = count
                own[LOSS] = place
        return found

    def _spikes(self) -> Iterator[Spike]:
        """Of losses and norms, in order of steps."""
        wanted = [one for one in self._own if one.name in (NORM, NORM_SCALED, LOSS) or one.name.startswith(f"{LOSS}/")]
        processes = sorted({(one.rank, one.process) for one in wanted})[:PROCESSES]
        found: dict[tuple[str, int], tuple[Curve, Leap]] = {}  # by name and step, once for all ranks
        for one in wanted:
            if (one.rank, one.process) in processes:
                for leap in spikes(one.values):
                    found.setdefault((one.name, int(one.steps[leap.at])), (one, leap))
        in_order = sorted(found.values(), key=lambda each: (each[0].steps[each[1].at], each[0].name))
        for one, leap in in_order[:MAX_SPIKES]:
            step = one.step(leap.at)
            told = self._happenings(one.process).near(step, before=2, after=0)
            size = f", {leap.value / leap.usual:.3g} times the usual {leap.usual:.4g}" if leap.usual > 0 else ""
            lasting = f" for {leap.lasts} values" if leap.lasts > 1 else ""
            text = f"{_named(one.name)} leaps to {leap.value:.4g} in step {step}{lasting}{size}; {joined(told)}"
            yield Spike(one.name, one.rank, step, leap.lasts, leap.value, leap.usual, min(leap.score, 1e6), told, text)

    def _changes(self) -> Iterator[LevelChange]:
        """Of losses, norms and what steps take, in order of steps."""
        lead = {one.name: one for one in reversed(self._own) if one.name in (NORM, NORM_SCALED, LOSS)}
        found = [
            (one, level)
            for one in (*lead.values(), *self._measured())
            for level in levels(one.values, SCALES if one.source in (*SOURCES, curves.STEPS) else SLOW_SCALES)
        ]
        walls = [one.steps[level.at] for one, level in found if one.name == STEP_MS]
        found.sort(key=lambda each: (each[0].steps[each[1].at], each[0].name))
        told_so_far = 0
        for one, level in found:
            step = int(one.steps[level.at])
            batches = tuple(_batches(self._train, step)) if one.source == curves.STEPS else ()
            # a rate says something in addition to the time of a step only where batches have another size
            if one.name == RATE and (not batches or any(abs(step - wall) <= level.near for wall in walls)):
                continue
            told_so_far += 1
            if told_so_far > MAX_CHANGES:
                break
            # what was left out between the two levels belongs to the change
            gap = 1 if one.source in SOURCES else step - int(one.steps[level.at - 1])
            told = (*self._happenings(one.process).near(step, before=max(level.near, gap), after=1), *batches)
            before, after = level.before, level.after
            change = (after - before) / abs(before) if before else math.copysign(1e6, after)
            size = f"{change:+.0%}" if abs(change) < TIMES or not before else f"{change + 1:.3g} times"
            values = f"{_value(one.name, before)} -> {_value(one.name, after)}"
            text = f"{_named(one.name)} {size} from step {step} on ({values}); {joined(told)}"
            yield LevelChange(one.name, one.rank, step, before, after, change, told, text)

    # ------------------------------------------------------------------------------------------ clipping and scale

    def _clipping(self) -> Clipping | None:
        clipped = self._of(NORM_CLIPPED)
        if clipped is None:
            return None
        norm = next(one for one in self._all if one.name == NORM and one.process == clipped.process)
        # a norm is written once, and once more for each time it was clipped by
        at = np.searchsorted(norm.times_ns, clipped.times_ns, side="right") - 1
        before, after = norm.values[np.maximum(at, 0)], clipped.values
        known = np.isfinite(before) & (at >= 0)
        if not known.any():
            return None
        before, after = before[known], after[known]
        cut = after < before * (1 - 1e-4)
        factor = float(np.median(after[cut] / before[cut])) if cut.any() else None
        return Clipping(len(before), float(cut.mean()), float(np.median(before)), factor)

    def _scaling(self) -> Scaling | None:
        scale = self._of(SCALE)
        if scale is None:
            return None
        values, of_steps = scale.values[SEARCH:], scale.steps[SEARCH:]
        skipped = int(np.isin(of_steps, list(self._skipped.get(scale.process, ()))).sum())
        finite = values[np.isfinite(values)]
        below = np.flatnonzero(values < 1)
        return Scaling(
            updates=len(values),
            skipped=skipped,
            skipped_share=skipped / len(values) if len(values) else 0.0,
            least=float(finite.min()) if len(finite) else None,
            last=float(finite[-1]) if len(finite) else None,
            collapsed_step=int(of_steps[below[0]]) if len(below) else None,
        )

    def _accumulation(self) -> Iterator[Accumulation]:
        """A loss of several passes; what is no mean in the table was divided, as far as anything tells."""
        loss, total, mean = (self._of(name) for name in (LOSS, f"{LOSS}_sum", f"{LOSS}_mean"))
        if loss is None or total is None or mean is None:
            return
        if not len(loss.values) == len(total.values) == len(mean.values):
            return
        known = np.isfinite(loss.values) & np.isfinite(total.values) & (mean.values != 0)
        passes = np.rint(total.values[known] / mean.values[known])
        if not len(passes) or (usual := int(np.median(passes))) < 2:
            return
        place = self._places.get(loss.process, {}).get(LOSS)
        node = ""  # the last operator of what backward was called on
        for row, data in event_data(self._tables, "metric_series"):
            if (row["process"], place_of(data)) == (loss.process, place):
                node = str(data.get("node") or "")
        own = (one for one in self._all if one.process == loss.process and one.source not in FOUND)
        logged = [one for one in own if is_loss(one.name.removesuffix(f" ({one.source})"))]
        ratio = ratio_to_logged(total.times_ns, total.values, logged, usual)
        yield Accumulation(
            name=LOSS,
            passes=usual,
            updates=len(passes),
            share=float((passes == usual).mean()),
            divided=bool(np.isclose(loss.values[known], total.values[known]).mean() > SAME_LOSS),
            node=node,
            logged=ratio.name if ratio is not None else None,
            logged_ratio=ratio.value if ratio is not None and ratio.of is not None else None,
            place=place,
        )


def _watched(series: Sequence[Curve], prefix: str) -> Iterator[Watched]:
    """Of each name the later half of its values, on the lowest rank that has it."""
    seen = set()
    for one in series:
        half = one.values[len(one.values) // 2 :]
        half = half[np.isfinite(half)]
        if one.name.startswith(prefix) and one.name not in seen and len(half):
            seen.add(one.name)
            yield Watched(one.name.removeprefix(prefix), float(np.median(half)), len(half))


def _batches(train: pl.DataFrame, step: int) -> Iterator[Happening]:
    """Another size of the batches from this step on."""
    steps, samples = train["step"].to_numpy(), train["samples"].cast(pl.Float64).fill_null(math.nan).to_numpy()
    before, after = samples[steps < step][-10:], samples[steps >= step][:10]
    if np.isfinite(before).any() and np.isfinite(after).any():
        old, new = float(np.nanmedian(before)), float(np.nanmedian(after))
        if old != new:
            yield Happening("batch", step, f"batches of {old:g} -> {new:g} samples")


def _sentence(found: NonFinite) -> str:
    where = f" of step {found.step}" if found.step is not None else ""
    by = {"forward": "the forward pass", "backward": "the backward pass", "scaler": "the scaler"}.get(found.stage)
    text = f"{_named(found.name)}{where} is {found.value}, the first value that is not finite"
    text += f": it shows first in {by}" if by else ": only what the script logs tells of it"
    if not found.sure:
        text += ", or in the backward pass before, whose gradients' norm nobody took"
    if found.origin is not None and found.origin.where is not None:
        text += f"; {found.origin.sentence}"
    if found.losses > 1:
        lost = "all" if found.losses_lost == found.losses else f"{found.losses_lost:,} of"
        text += f"; {lost} {found.losses:,} losses from there on are not finite"
    if found.skipped:
        text += "; GradScaler left the update out"
    return f"{text}; {joined(found.happenings)}" if found.happenings else text


def _named(name: str) -> str:
    """As a sentence that begins with it calls the series."""
    if name.startswith(f"{LOSS}/"):
        return f"Loss of {name.removeprefix(f'{LOSS}/')}"
    text = NAMES.get(name) or MEMORY.get(re.split(r"[/.]", name)[-1]) or name
    return text[:1].upper() + text[1:]


def _value(name: str, value: float) -> str:
    if name == STEP_MS:
        return f"{value:.4g} ms"
    return f"{value / 2**20:,.0f} MiB" if name.endswith("_bytes") else f"{value:.4g}"
