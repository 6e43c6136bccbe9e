"""What makes the timing of a run doubtful. Everything is judged over the measured steps, not over the start of the run.

Something that happens throughout is how the run is, and a comparison is meant to see it; something that happens now
and then, or in one run alone, is an accident of that run. `flags` sees one run, `flags_of_set` runs beside each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np
import polars as pl
from msgspec.structs import replace

from stepscope.analyze.memory_losses import memory_readings as memory_readings
from stepscope.comparison import conditions, thresholds
from stepscope.comparison.measured_steps import MeasuredSteps
from stepscope.engine.journal import event_data
from stepscope.engine.step_labels import COMPILING, label
from stepscope.model import Analysis
from stepscope.model.comparison import APPLIED, REFUSED, AppliedKnob, Flag, Measure, standing
from stepscope.model.machine import GpuClocks
from stepscope.tables.schema import Tables

INTERRUPTED = 128 + 2  # a shell's status of a command that SIGINT ended, which is how --max-steps ends it
_HOT = ("hardware slowdown", "thermal slowdown by software", "thermal slowdown by hardware", "power brake")
_PARTS = 4  # of the measured part; what strikes in each of them goes on throughout


def flags(tables: Tables, analysis: Analysis, measured: MeasuredSteps, *, asked: int | None = None) -> tuple[Flag, ...]:
    """The flags of one run, those that withhold a verdict first.

    Args:
        asked: steps that should have been measured; where that was not agreed the limit of the run tells.
    """
    readings = conditions.readings(tables, measured)
    gpus = conditions.gpus(tables, readings)
    found = [
        *_ended(tables, analysis),
        *_knobs(analysis),
        *_few_steps(measured, asked),
        *_profiled(measured),
        *_clocks(gpus),
        *_tenants(gpus),
        *_others(conditions.conditions(tables, measured)),
        *_recompiles(tables, measured),
        *_dead_workers(tables, measured),
        *_allocator(tables, measured),
    ]
    return tuple(sorted(found, key=lambda flag: not flag.withholds))


# ------------------------------------------------------------------------------------------------- how the run went


def _ended(tables: Tables, analysis: Analysis) -> Iterator[Flag]:
    """A limit of ours ends the command by SIGINT, and scripts answer that as they like; nothing else may end it."""
    status, source = analysis.run.exit_status, "manifest.json"
    if status is None:
        if analysis.run.hosts and analysis.run.ended_ns is None:
            yield Flag("run_unfinished", "the recording has no end: the run goes on, or was killed", source, False)
        return
    limited = any(data.get("reason") == "max_steps" for _, data in event_data(tables, "exit"))
    if status == 0 or (status == INTERRUPTED and limited):
        return
    if status == INTERRUPTED:
        yield Flag("interrupted", "the run was interrupted before its end", source, withholds=False)
        return
    how = f"the command ended with status {status}"
    if limited:
        yield Flag("ended_oddly", f"{how} after its last step", source, withholds=False)
    else:
        yield Flag("run_failed", how, source, withholds=True)


def _knobs(analysis: Analysis) -> Iterator[Flag]:
    reports: dict[str, list[AppliedKnob]] = {}
    for knob in analysis.trial.knobs if analysis.trial is not None else ():
        reports.setdefault(knob.knob, []).append(knob)
    for name, own in reports.items():
        found = standing(own)
        if found == APPLIED:
            continue
        first = next(knob for knob in own if not knob.applied)
        why = f": {first.reason}" if first.reason else ""
        source = "manifest.json" if first.rank is None else f"rank-{first.rank}/events.jsonl"
        setting = f"{name}={own[0].value}"
        if found == REFUSED:
            yield Flag("knob_not_applied", f"knob {setting} was not applied{why}", source, withholds=True)
        else:
            text = f"knob {setting} was not applied at {first.file}:{first.line}{why}"
            yield Flag("knob_partly_applied", text, source, withholds=False)


def _few_steps(measured: MeasuredSteps, asked: int | None) -> Iterator[Flag]:
    count = measured.count
    limit = measured.limit
    if asked is None and limit is not None and measured.recorded < limit:
        asked = limit - measured.dropped
    if asked is not None and count < asked:
        text = f"{count} steps were measured, {asked} were asked for"
        yield Flag("few_steps", text, "steps.jsonl", count < thresholds.STEPS_SHARE * asked)
    elif count < thresholds.LEAST_STEPS:
        text = f"only {count} steps were measured: a mean over so few moves by several percent"
        yield Flag("few_steps", text, "steps.jsonl", withholds=False)


def _profiled(measured: MeasuredSteps) -> Iterator[Flag]:
    if measured.profiled:
        text = "every step ran under torch.profiler, which makes steps longer"
        yield Flag("profiled", text, "steps.jsonl", withholds=False)


# ---------------------------------------------------------------------------------------------------- the machine


def _clocks(gpus: Sequence[GpuClocks]) -> Iterator[Flag]:
    """Heat and power supply. Clocks and limits that somebody set stay as they are from run to run."""
    for gpu in gpus:
        reasons = {name: share for name, share in gpu.reasons.items() if name in _HOT}
        share = max(reasons.values(), default=0.0)
        if share * gpu.busy_readings >= thresholds.THROTTLED_READINGS and share >= thresholds.THROTTLED_SHARE:
            text = (
                f"{gpu.device} ran at {gpu.clock_mhz:.0f} of {gpu.max_clock_mhz:.0f} MHz because of "
                f"{max(reasons, key=lambda name: reasons[name])}, in {share:.0%} of the readings"
            )
            yield Flag("throttled", text, f"host-{gpu.host}/system.jsonl", withholds=True)


def _tenants(gpus: Sequence[GpuClocks]) -> Iterator[Flag]:
    for gpu in gpus:
        if gpu.strangers:
            text = f"{gpu.strangers} processes that are not the run's were on {gpu.device}"
            yield Flag("other_tenants", text, f"host-{gpu.host}/system.jsonl", withholds=True)


def _others(figures: dict[str, float]) -> Iterator[Flag]:
    """Others that took cores the run was waiting for. Whether they were there in all runs is for `flags_of_set`."""
    others, cores, delay = (figures.get(name) for name in (conditions.OTHERS, conditions.CORES, conditions.DELAY))
    if others is None or cores is None or delay is None:
        return
    if others >= thresholds.OTHERS_SHARE * cores and delay >= thresholds.OTHERS_DELAY:
        text = (
            f"other processes used {others:.1f} of {cores:g} cores, and the main thread had to wait for a core in "
            f"{delay:.0%} of the time"
        )
        yield Flag("other_processes", text, "system.jsonl", withholds=False)


# ---------------------------------------------------------------------------------------------- inside the training


def _recompiles(tables: Tables, measured: MeasuredSteps) -> Iterator[Flag]:
    kinds = tables.compiles.filter(pl.col("kind").is_in(COMPILING)).select("process", "step")
    journal = tables.journal.filter(pl.col("kind") == "compile").select("process", "step")
    compiling = pl.concat([kinds, journal]).drop_nulls().unique()
    struck = measured.rows.join(compiling, on=["process", "step"], how="semi").sort("process", "step")
    if struck.is_empty():
        return
    steps = struck["step"].unique().sort().to_list()
    throughout = _throughout(steps, measured)
    text = f"something was compiled in {_plural(len(steps), 'measured step')}, first in step {steps[0]}" + (
        ", again and again" if throughout else ": warm-up was not over"
    )
    yield Flag("recompiles", text, f"{struck['process'][0]}/events.jsonl", withholds=not throughout)


def _dead_workers(tables: Tables, measured: MeasuredSteps) -> Iterator[Flag]:
    """A flag for each training process that lost workers in the measured part and went on without them.

    Workers of one iterator start together and end together. Those of a data set without a length end when their part
    of it is over, which may be at any time: the flag then withholds nothing.
    """
    workers = tables.processes.filter((pl.col("role") == "loader_worker") & pl.col("start_ns").is_not_null())
    for process, (start, end) in measured.spans.items():
        pids = [rank.pid for rank in tables.ranks if rank.process == process]
        own = workers.filter(pl.col("ppid").is_in(pids)).sort("start_ns", "pid")
        count, sized = _loaders(tables, process)
        for together in _generations(own.to_dicts()):
            if not 2 <= len(together) <= count:
                continue  # none to compare with, or workers of several iterators at once
            last = max(row["end_ns"] if row["end_ns"] is not None else end for row in together)
            gone = [
                row["end_ns"]
                for row in together
                if row["end_ns"] is not None
                and start < row["end_ns"] < end
                and min(last, end) - row["end_ns"] >= thresholds.WORKER_ALONE_S * 1e9
            ]
            if gone:
                text = (
                    f"{len(gone)} of {len(together)} loader workers ended "
                    f"{(min(last, end) - min(gone)) / 1e9:.0f} s before the others"
                )
                yield Flag("dead_workers", text, "processes.jsonl", withholds=sized)
                break


def _loaders(tables: Tables, process: str) -> tuple[int, bool]:
    """(the most workers of a loader of the process, whether all of its loaders have a length)."""
    most, sized = 0, True
    for row, data in event_data(tables, "loader"):
        workers = data.get("num_workers")
        if row["process"] == process and isinstance(workers, int) and workers > 0:
            most = max(most, workers)
            sized = sized and isinstance(data.get("length"), int)
    return most, sized


def _generations(rows: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Workers that started one right after the other."""
    together: list[dict[str, Any]] = []
    for row in rows:
        if together and row["start_ns"] - together[-1]["start_ns"] > thresholds.WORKERS_START_S * 1e9:
            yield together
            together = []
        together.append(row)
    if together:
        yield together


def _allocator(tables: Tables, measured: MeasuredSteps) -> Iterator[Flag]:
    """By the journal's readings of memory, which count from the start of the process."""
    for own in memory_readings(tables, label(tables)):
        steps = measured.rows.filter(pl.col("process") == own.process)["step"]
        if steps.is_empty():
            continue
        for device in own.devices():
            rows = own.all_rows.filter((pl.col("device") == device) & pl.col("step").is_not_null()).sort("step")
            # the last reading before the measured part says what was counted until then
            before = rows.filter(pl.col("step") < steps.min()).tail(1)
            inside = pl.concat([before, rows.filter(pl.col("step").is_between(steps.min(), steps.max()))])
            source = f"{own.process}/events.jsonl"
            failed = _growth(inside, "out_of_memory")
            if failed:
                text = f"{_plural(sum(failed.values()), 'allocation')} on {device} found no memory"
                yield Flag("out_of_memory", text, source, withholds=True)
            retried = _growth(inside, "retries")
            if retried:
                throughout = _throughout(list(retried), measured)
                often = "again and again" if throughout else "now and then"
                text = f"the allocator of {device} gave its cache back and tried again, {often}"
                yield Flag("allocator_retries", text, source, withholds=not throughout)


def _growth(rows: pl.DataFrame, name: str) -> dict[int, int]:
    """Step -> by how much the counter was higher than at the reading before."""
    known = rows.drop_nulls(name).select("step", more=pl.col(name).diff()).drop_nulls()
    return {int(step): int(more) for step, more in known.rows() if more > 0}


def _throughout(steps: Sequence[int], measured: MeasuredSteps) -> bool:
    """Whether it strikes in every part of the measured steps."""
    numbers = measured.rows["step"].unique().sort().to_numpy()
    if len(numbers) < _PARTS:
        return False
    place = np.searchsorted(numbers, np.asarray(steps)).clip(0, len(numbers) - 1)
    return len(set((place * _PARTS // len(numbers)).tolist())) == _PARTS


# ------------------------------------------------------------------------------------------------ runs of one kind


def flags_of_set(*sides: Sequence[Measure]) -> tuple[tuple[tuple[Flag, ...], ...], ...]:
    """For each run of each side the flags that only the other runs make visible.

    A run is held against the median of all others, its clock only against those of its side: other work may have
    another clock. Of two runs the one that had the harder time is flagged.
    """
    found = []
    for place, side in enumerate(sides):
        beside = [one for other, runs in enumerate(sides) if other != place for one in runs]
        found.append(
            tuple(
                tuple(_beside(one, [other for j, other in enumerate(side) if j != i], beside))
                for i, one in enumerate(side)
            )
        )
    return tuple(found)


def with_flags_of_set(*sides: Sequence[Measure]) -> tuple[tuple[Measure, ...], ...]:
    """The runs of each side, with their flags among the others added where they have not got them."""
    return tuple(
        tuple(
            replace(one, flags=(*one.flags, *(flag for flag in more if flag not in one.flags)))
            for one, more in zip(side, flags_of_side, strict=True)
        )
        for side, flags_of_side in zip(sides, flags_of_set(*sides), strict=True)
    )


def flagged_pairs(pairs: Sequence[tuple[Measure, Measure]]) -> tuple[tuple[Measure, Measure], ...]:
    """`pairs` of (baseline, candidate) with the flags among all their runs; a run may stand in several pairs."""
    sides: tuple[dict[int, Measure], ...] = ({}, {})
    for pair in pairs:
        for side, one in zip(sides, pair, strict=True):
            side.setdefault(id(one), one)
    flagged = with_flags_of_set(*(tuple(side.values()) for side in sides))
    found = [dict(zip(side, measures, strict=True)) for side, measures in zip(sides, flagged, strict=True)]
    return tuple((found[0][id(one)], found[1][id(other)]) for one, other in pairs)


def _beside(one: Measure, same: Sequence[Measure], beside: Sequence[Measure]) -> Iterator[Flag]:
    """Flags of a run among others of its side and those of other sides."""
    others = (*same, *beside)
    yield from _cold(one, others)
    yield from _crowded(one, others)
    yield from _mapped(one, others)
    yield from _slow_clock(one, same)
    yield from _cut(one, others)


def _cut(one: Measure, others: Sequence[Measure]) -> Iterator[Flag]:
    """Steps that end at other places may be other steps; with as many samples in each they are not."""
    usual = sorted({other.signal for other in others if other.signal is not None})
    if one.signal is None or not usual or one.signal in usual:
        return
    known = [other.samples_per_step for other in others if other.samples_per_step is not None]
    alike = (
        one.samples_per_step is not None
        and bool(known)
        and all(abs(one.samples_per_step / samples - 1.0) <= thresholds.ANOTHER_BATCH for samples in known)
    )
    text = f"its steps were cut by {one.signal}, those of the other runs by {' or '.join(usual)}"
    yield Flag("cut_differently", text, "steps.jsonl", withholds=not alike)


def _cold(one: Measure, others: Sequence[Measure]) -> Iterator[Flag]:
    """A run that had to bring from storage what the others found in memory, which the first of several often does."""
    read, usual = _against(one, others, conditions.READ)
    faults, usual_faults = _against(one, others, conditions.FAULTS)
    text = None
    if read is not None and usual is not None and _colder(read, usual, thresholds.COLD_BYTES_PER_S * one.mean_ms / 1e3):
        text = f"it read {read / 1e6:.1f} MB a step from storage, the other runs {usual / 1e6:.1f} MB"
    elif faults is not None and usual_faults is not None and _colder(faults, usual_faults, thresholds.COLD_FAULTS):
        text = f"{faults:.1f} page faults a step read a disk, in the other runs {usual_faults:.1f}"
    if text is not None:
        yield Flag("cold_cache", text, "system.jsonl", withholds=True)


def _colder(own: float, usual: float, least: float) -> bool:
    return own >= thresholds.COLD_RATIO * usual and own - usual >= least


def _mapped(one: Measure, others: Sequence[Measure]) -> Iterator[Flag]:
    """More pages mapped anew in longer steps: how memory happened to lie differs from run to run of one program."""
    own, usual = _against(one, others, conditions.MAPPED)
    if own is None or usual is None or own - usual < thresholds.MAPPED_FAULTS or own < thresholds.MAPPED_RATIO * usual:
        return
    usual_ms = median(other.mean_ms for other in others)
    if one.mean_ms >= thresholds.MAPPED_LONGER * usual_ms:
        text = (
            f"{own:,.0f} page faults a step, in the other runs {usual:,.0f}: they are part of what makes its step "
            f"{one.mean_ms:.3g} ms long, not {usual_ms:.3g}"
        )
        yield Flag("page_faults_differ", text, "steps.jsonl", withholds=False)


def _crowded(one: Measure, others: Sequence[Measure]) -> Iterator[Flag]:
    own, usual = _against(one, others, conditions.OTHERS)
    cores = one.conditions.get(conditions.CORES)
    if own is not None and usual is not None and cores and own - usual >= thresholds.CROWDED_SHARE * cores:
        text = f"other processes used {own:.1f} of {cores:g} cores, during the other runs {usual:.1f}"
        yield Flag("machine_busier", text, "system.jsonl", withholds=False)


def _slow_clock(one: Measure, same: Sequence[Measure]) -> Iterator[Flag]:
    """The CPU's clock is a mean over its cores, those that idle among them, and says less than that of a busy GPU."""
    for name, what, share, withholds in (
        (conditions.CPU_CLOCK, "the CPU", thresholds.CPU_CLOCK_SHARE, False),
        (conditions.GPU_CLOCK, "the GPU", thresholds.GPU_CLOCK_SHARE, True),
    ):
        own, usual = _against(one, same, name)
        if own is not None and usual is not None and own < (1.0 - share) * usual:
            text = f"{what} ran at {own:.0f} MHz, in the other runs at {usual:.0f} MHz"
            yield Flag("clocks_differ", text, "system.jsonl", withholds)


def _against(one: Measure, others: Sequence[Measure], name: str) -> tuple[float | None, float | None]:
    """(the run's figure, the median of the others'), None where nothing was read."""
    known = [other.conditions[name] for other in others if name in other.conditions]
    return one.conditions.get(name), median(known) if known else None


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
