"""What makes the timing of a run doubtful, and the figures of the machine by which runs are held against each other.

Everything is judged over the measured steps, not over the start of the run. Something that happens throughout is how
the run is, and a comparison is meant to see it; something that happens now and then, or in one run alone, is an
accident of that run. Telemetry comes once a second: of a measured part of some seconds figures are missing, and a
missing one says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import numpy as np
import polars as pl
from msgspec.structs import replace

from stepscope.analyze.input.loader import known_cores
from stepscope.analyze.machine import cores, hardware
from stepscope.analyze.machine.readings import average, growths, level, rank_pids, worker_pids
from stepscope.analyze.memory_losses import memory_readings
from stepscope.comparison import thresholds
from stepscope.comparison.measured_steps import MeasuredSteps
from stepscope.engine.journal import event_data, mean
from stepscope.engine.step_labels import compiling, label
from stepscope.model import Analysis
from stepscope.model.comparison import APPLIED, REFUSED, AppliedKnob, Flag, Measure, standing
from stepscope.model.counted import short, things
from stepscope.tables.schema import Tables

INTERRUPTED = 128 + 2  # a shell's status of a command that SIGINT ended, which is how --max-steps ends it
NEW_ITERATORS = 2  # in the measured part: the first may be of workers that then stay
CORES, OTHERS, DELAY = "cores", "others_cores", "run_delay_share"
READ, FAULTS = "read_bytes_per_step", "major_faults_per_step"
MAPPED = "minor_faults_per_step"
CPU_CLOCK, GPU_CLOCK = "cpu_frequency_mhz", "gpu_clock_mhz"
_HOT = ("hardware slowdown", "thermal slowdown by software", "thermal slowdown by hardware", "power brake")
_PARTS = 4  # of the measured part; what strikes in each of them goes on throughout


def readings(tables: Tables, measured: MeasuredSteps) -> pl.DataFrame | None:
    """Telemetry from the start of the first measured step to the end of the last; None with too few readings."""
    spans = measured.spans.values()
    if not spans:
        return None
    first, last = min(start for start, _ in spans), max(end for _, end in spans)
    known = tables.system.filter(pl.col("value").is_not_null() & pl.col("time_ns").is_between(first, last))
    return known if known["time_ns"].n_unique() >= thresholds.LEAST_READINGS else None


def conditions(tables: Tables, measured: MeasuredSteps) -> dict[str, float]:
    """Figures by name, those that were read; docs/definitions.md defines each."""
    mapped = measured.rows["minor_faults"].drop_nulls()
    by_step = {MAPPED: mean(mapped)} if len(mapped) else {}
    found = readings(tables, measured)
    if found is None:
        return by_step
    ranks, workers = rank_pids(tables), worker_pids(tables)
    delay = average(growths(found, "run_delay_ns", ranks))
    clocks = [gpu.clock_mhz for gpu in hardware.gpu_clocks(tables, found)]
    figures = {
        CORES: known_cores(tables),
        OTHERS: None if _come_and_go(tables, measured) else _others(found),
        DELAY: None if delay is None else min(1.0, delay / 1e9),
        READ: _per_step(found, "read_bytes", [*ranks, *workers], measured),
        FAULTS: _per_step(found, "major_faults", [*ranks, *workers], measured),
        CPU_CLOCK: level(found, "cpu_frequency_mhz")[0],
        GPU_CLOCK: sum(clocks) / len(clocks) if clocks else None,
    }
    return by_step | {name: float(value) for name, value in figures.items() if value is not None}


def flags(
    tables: Tables,
    analysis: Analysis,
    measured: MeasuredSteps,
    figures: Mapping[str, float],
    *,
    asked: int | None = None,
) -> tuple[Flag, ...]:
    """The flags of one run, those that withhold a verdict first.

    Args:
        figures: the run's `conditions`.
        asked: steps that should have been measured; where that was not agreed the limit of the run tells.
    """
    found = [
        *_ended(tables, analysis),
        *_knobs(analysis),
        *_steps(measured, asked),
        *_machine(tables, measured, figures),
        *_recompiles(tables, measured),
        *_dead_workers(tables, measured),
        *_allocator(tables, measured),
    ]
    return tuple(sorted(found, key=lambda flag: not flag.withholds))


def _ended(tables: Tables, analysis: Analysis) -> Iterator[Flag]:
    """A limit of ours ends the command by SIGINT, and scripts answer that as they like; nothing else may end it."""
    status, source = analysis.run.exit_status, "manifest.json"
    limited = any(data.get("reason") == "max_steps" for _, data in event_data(tables, "exit"))
    how = f"the command ended with status {status}"
    if status is None:
        if analysis.run.hosts and analysis.run.ended_ns is None:
            yield Flag("run_unfinished", "the recording has no end: the run goes on, or was killed", source, False)
    elif status == INTERRUPTED and not limited:
        yield Flag("interrupted", "the run was interrupted before its end", source, withholds=False)
    elif status not in (0, INTERRUPTED) and limited:
        yield Flag("ended_oddly", f"{how} after its last step", source, withholds=False)
    elif status not in (0, INTERRUPTED):
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
        text = f"knob {name}={own[0].value} was not applied"
        if found == REFUSED:
            yield Flag("knob_not_applied", text + why, source, withholds=True)
        else:
            yield Flag("knob_partly_applied", f"{text} at {first.file}:{first.line}{why}", source, withholds=False)


def _steps(measured: MeasuredSteps, asked: int | None) -> Iterator[Flag]:
    count, limit, source = measured.count, measured.limit, "steps.jsonl"
    if asked is None and limit is not None and measured.recorded < limit:
        asked = limit - measured.dropped
    if asked is not None and count < asked:
        text = f"measured {things(count, 'step')}, {asked} were asked for"
        yield Flag("few_steps", text, source, count < thresholds.STEPS_SHARE * asked)
    elif count < thresholds.LEAST_STEPS:
        text = f"only {things(count, 'step')} measured: a mean over so few moves by several percent"
        yield Flag("few_steps", text, source, withholds=False)
    if measured.profiled:
        yield Flag("profiled", "every step ran under torch.profiler, which makes steps longer", source, withholds=False)


def _come_and_go(tables: Tables, measured: MeasuredSteps) -> bool:
    """Whether loader workers were started anew in the measured part: most end before telemetry has seen what they used,
    which then looks like the use of others."""
    for process, (start, end) in measured.spans.items():
        made = sum(
            row["process"] == process and bool(data.get("num_workers")) and start < (row["time_ns"] or 0) < end
            for row, data in event_data(tables, "loader")
        )
        own = _workers(tables, process)["start_ns"]
        if made >= NEW_ITERATORS and (own.is_empty() or own.is_between(start, end).any()):
            return True
    return False


def _workers(tables: Tables, process: str) -> pl.DataFrame:
    """Of the loaders of one training process, those whose start is known."""
    pids = [rank.pid for rank in tables.ranks if rank.process == process]
    known = (pl.col("role") == "loader_worker") & pl.col("start_ns").is_not_null() & pl.col("ppid").is_in(pids)
    return tables.processes.filter(known)


def _others(found: pl.DataFrame) -> float | None:
    """Cores in use that are not the run's own, mean over hosts; the recorder's own use is among them.

    None in recordings that do not tell how busy the cores are.
    """
    parts = []
    for rows in found.partition_by("host", maintain_order=True):
        own = rows.filter(pl.col("metric") == "cpu_pct")
        if own.height:
            parts.append(cores.others(rows, float(own["value"].sum()) / own["time_ns"].n_unique() / 100.0))
    known = [others for others in parts if others is not None]
    return sum(known) / len(known) if known else None


def _per_step(found: pl.DataFrame, metric: str, pids: list[int], measured: MeasuredSteps) -> float | None:
    """Growth of a counter over the measured part, summed over processes, by measured steps."""
    own = found.filter((pl.col("metric") == metric) & pl.col("pid").is_in(pids)).sort("time_ns")
    if own.is_empty():
        return None
    grown = sum(max(0.0, rows["value"][-1] - rows["value"][0]) for rows in own.partition_by("host", "pid"))
    seconds = float(np.ptp(found["time_ns"].to_numpy())) / 1e9
    spans = measured.spans.values()
    whole = (max(end for _, end in spans) - min(start for start, _ in spans)) / 1e9
    return grown / seconds * whole / measured.count if seconds > 0 else None


def _machine(tables: Tables, measured: MeasuredSteps, figures: Mapping[str, float]) -> Iterator[Flag]:
    """Heat and power supply, and who else is there. Clocks and limits that somebody set stay from run to run."""
    for gpu in hardware.gpu_clocks(tables, readings(tables, measured)):
        source = f"host-{gpu.host}/system.jsonl"
        reasons = {name: share for name, share in gpu.reasons.items() if name in _HOT}
        share = max(reasons.values(), default=0.0)
        if share * gpu.busy_readings >= thresholds.THROTTLED_READINGS and share >= thresholds.THROTTLED_SHARE:
            text = (
                f"{gpu.device} ran at {gpu.clock_mhz:.0f} of {gpu.max_clock_mhz:.0f} MHz because of "
                f"{max(reasons, key=lambda name: reasons[name])}, in {share:.0%} of the readings"
            )
            yield Flag("throttled", text, source, withholds=True)
        if gpu.strangers:
            text = f"{gpu.strangers} processes that are not the run's were on {gpu.device}"
            yield Flag("other_tenants", text, source, withholds=True)
    # others that took cores the run was waiting for; whether they were there in all runs, only those tell
    others, known, delay = (figures.get(name) for name in (OTHERS, CORES, DELAY))
    if others is None or known is None or delay is None:
        return
    if others >= thresholds.OTHERS_SHARE * known and delay >= thresholds.OTHERS_DELAY:
        text = (
            f"other processes used {others:.1f} of {known:g} cores, and the main thread had to wait for a core in "
            f"{delay:.0%} of the time"
        )
        yield Flag("other_processes", text, "system.jsonl", withholds=False)


def _recompiles(tables: Tables, measured: MeasuredSteps) -> Iterator[Flag]:
    struck = measured.rows.join(compiling(tables), on=["process", "step"], how="semi").sort("process", "step")
    if struck.is_empty():
        return
    steps = struck["step"].unique().sort().to_list()
    throughout = _throughout(steps, measured)
    text = f"something was compiled in {things(len(steps), 'measured step')}, first in step {steps[0]}"
    text += ", again and again" if throughout else ": warm-up was not over"
    yield Flag("recompiles", text, f"{struck['process'][0]}/events.jsonl", withholds=not throughout)


def _dead_workers(tables: Tables, measured: MeasuredSteps) -> Iterator[Flag]:
    """A flag for each training process that lost workers in the measured part and went on without them.

    Workers of one iterator start together and end together. Those of a data set without a length end when their part
    of it is over, which may be at any time: the flag then withholds nothing.
    """
    for process, (start, end) in measured.spans.items():
        loaders = [
            data
            for row, data in event_data(tables, "loader")
            if row["process"] == process and isinstance(data.get("num_workers"), int)
        ]
        most = max((data["num_workers"] for data in loaders), default=0)
        sized = all(isinstance(data.get("length"), int) for data in loaders if data["num_workers"] > 0)
        workers = _workers(tables, process).sort("start_ns", "pid")
        apart = pl.col("start_ns").diff() > thresholds.WORKERS_START_S * 1e9  # those that start in a row are together
        for together in workers.with_columns(together=apart.cum_sum().fill_null(0)).partition_by("together"):
            if not 2 <= together.height <= most:
                continue  # none to compare with, or workers of several iterators at once
            ends = together["end_ns"].drop_nulls().to_list()
            last = end if len(ends) < together.height else min(max(ends), end)
            alone_ns = thresholds.WORKER_ALONE_S * 1e9
            gone = [each for each in ends if start < each < end and last - each >= alone_ns]
            if gone:
                apart_s = (last - min(gone)) / 1e9
                text = f"{len(gone)} of {together.height} loader workers ended {apart_s:.0f} s before the others"
                yield Flag("dead_workers", text, "processes.jsonl", withholds=sized)
                break


def _allocator(tables: Tables, measured: MeasuredSteps) -> Iterator[Flag]:
    """By the journal's readings of memory, which count from the start of the process."""
    for own in memory_readings(tables, label(tables)):
        steps = measured.rows.filter(pl.col("process") == own.process)["step"]
        for device in own.devices() if len(steps) else ():
            rows = own.all_rows.filter((pl.col("device") == device) & pl.col("step").is_not_null()).sort("step")
            # the last reading before the measured part says what was counted until then
            before = rows.filter(pl.col("step") < steps.min()).tail(1)
            inside = pl.concat([before, rows.filter(pl.col("step").is_between(steps.min(), steps.max()))])
            source = f"{own.process}/events.jsonl"
            failed, retried = (_growth(inside, name) for name in ("out_of_memory", "retries"))
            if failed:
                count = sum(failed.values())
                text = f"{count} allocation{'' if count == 1 else 's'} on {device} found no memory"
                yield Flag("out_of_memory", text, source, withholds=True)
            if retried:
                throughout = _throughout(list(retried), measured)
                often = "again and again" if throughout else "now and then"
                text = f"the allocator of {device} gave its cache back and tried again, {often}"
                yield Flag("allocator_retries", text, source, withholds=not throughout)


def _growth(rows: pl.DataFrame, name: str) -> dict[int, int]:
    known = rows.drop_nulls(name).select("step", more=pl.col(name).diff()).drop_nulls()
    return {int(step): int(more) for step, more in known.rows() if more > 0}


def _throughout(steps: Sequence[int], measured: MeasuredSteps) -> bool:
    """Whether it strikes in every part of the measured steps."""
    numbers = measured.rows["step"].unique().sort().to_numpy()
    if len(numbers) < _PARTS:
        return False
    place = np.searchsorted(numbers, np.asarray(steps)).clip(0, len(numbers) - 1)
    return len(set((place * _PARTS // len(numbers)).tolist())) == _PARTS


def with_flags_of_set(*sides: Sequence[Measure]) -> tuple[tuple[Measure, ...], ...]:
    """The runs of each side, with the flags added that only the other runs make visible, where they have not got them.

    A run is held against the median of all others, its clock only against those of its side: other work may have
    another clock. Of two runs the one that had the harder time is flagged.
    """
    found = []
    for place, side in enumerate(sides):
        elsewhere = [one for other, runs in enumerate(sides) if other != place for one in runs]
        flagged = []
        for number, one in enumerate(side):
            more = _beside(one, [*side[:number], *side[number + 1 :]], elsewhere)
            flagged.append(replace(one, flags=(*one.flags, *(flag for flag in more if flag not in one.flags))))
        found.append(tuple(flagged))
    return tuple(found)


def _beside(one: Measure, same: Sequence[Measure], elsewhere: Sequence[Measure]) -> Iterator[Flag]:
    """Flags of a run among others of its side and those of other sides."""
    others = (*same, *elsewhere)
    usual_ms = median([other.mean_ms for other in others] or [one.mean_ms])
    known = one.conditions.get(CORES, math.inf)
    longer = one.mean_ms >= thresholds.MAPPED_LONGER * usual_ms
    read = "it read {:.1f} MB a step from storage, the other runs {:.1f} MB"
    faults = "{:.1f} page faults a step read a disk, in the other runs {:.1f}"
    busier = f"other processes used {{:.1f}} of {known:g} cores, during the other runs {{:.1f}}"
    mapped = "{:,.0f} page faults a step, in the other runs {:,.0f}: they are part of what makes its step "
    mapped += f"{short(one.mean_ms)} ms long, not {short(usual_ms)}"
    told: set[str] = set()
    # what it had more of: by how much at least, by how many times, and whether that withholds
    for flag, figure, more, times, text, withholds in (
        # a run that had to bring from storage what the others found in memory, which the first of several often does
        ("cold_cache", READ, thresholds.COLD_BYTES_PER_S * one.mean_ms / 1e3, thresholds.COLD_RATIO, read, True),
        ("cold_cache", FAULTS, thresholds.COLD_FAULTS, thresholds.COLD_RATIO, faults, True),
        ("machine_busier", OTHERS, thresholds.CROWDED_SHARE * known, 0.0, busier, False),
        # more pages mapped anew in longer steps: how memory happened to lie differs from run to run of one program
        ("page_faults_differ", MAPPED, thresholds.MAPPED_FAULTS, thresholds.MAPPED_RATIO, mapped, False),
    ):
        own, usual = _against(one, others, figure)
        if own is None or usual is None or own - usual < more or own < times * usual:
            continue
        if flag not in told and (figure != MAPPED or longer):
            told.add(flag)
            unit = 1e6 if figure == READ else 1.0
            source = "steps.jsonl" if figure == MAPPED else "system.jsonl"
            yield Flag(flag, text.format(own / unit, usual / unit), source, withholds)
    # the CPU's clock is a mean over its cores, those that idle among them, and says less than that of a busy GPU
    for name, what, share, withholds in (
        (CPU_CLOCK, "the CPU", thresholds.CPU_CLOCK_SHARE, False),
        (GPU_CLOCK, "the GPU", thresholds.GPU_CLOCK_SHARE, True),
    ):
        own, usual = _against(one, same, name)
        if own is not None and usual is not None and own < (1.0 - share) * usual:
            text = f"{what} ran at {own:.0f} MHz, in the other runs at {usual:.0f} MHz"
            yield Flag("clocks_differ", text, "system.jsonl", withholds)
    # Steps that end at other places may be other steps; with as many samples in each they are not.
    signals = sorted({other.signal for other in others if other.signal is not None})
    if one.signal is not None and signals and one.signal not in signals:
        samples = [other.samples_per_step for other in others if other.samples_per_step is not None]
        own = one.samples_per_step
        alike = own is not None and all(abs(own / each - 1.0) <= thresholds.ANOTHER_BATCH for each in samples)
        text = f"its steps were cut by {one.signal}, those of the other runs by {' or '.join(signals)}"
        yield Flag("cut_differently", text, "steps.jsonl", withholds=not (alike and samples))


def _against(one: Measure, others: Sequence[Measure], name: str) -> tuple[float | None, float | None]:
    """(the run's figure, the median of the others'), None where nothing was read."""
    known = [other.conditions[name] for other in others if name in other.conditions]
    return one.conditions.get(name), median(known) if known else None
