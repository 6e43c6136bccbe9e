"""What a run drew, in joules: by device, by step and by sample; and what that costs at the user's prices.

A sum holds every device of the run once, and there is none where one of its boards is shared or not known: a part of
the energy under the name of all would be wrong. What is left out is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import polars as pl

from stepscope.analyze.machine.energy_meters import (
    COUNTER,
    DRAM,
    GAP_S,
    GPU,
    PACKAGE,
    SAMPLED,
    Meter,
    Meters,
    Series,
    meters,
)
from stepscope.analyze.machine.readings import FEW_READINGS
from stepscope.engine.intervals import Intervals, union
from stepscope.model import DeviceTime, StepFacts
from stepscope.model.machine import EnergyCost, EnergyDomain, EnergyFacts, Prices, StepEnergy
from stepscope.read.text import string
from stepscope.tables.schema import Tables

_J_PER_KWH, _J_PER_WH = 3.6e6, 3.6e3
_AGREE = (
    0.1  # of the energy: sampled power that differs by more is said (arXiv 2312.02741: some boards sample a quarter)
)
_REACHED = 0.9  # of the run: what readings do not reach over is said below it; the recorder needs a moment to start
_AGREE_READINGS = 10  # of fewer the mean moves by that much by itself where load comes and goes
NO_TELEMETRY = "no telemetry was recorded"
NO_STEPS = "no training step lies between two readings of energy"
_WORDS = {GPU: "GPU", PACKAGE: "processors", DRAM: "memory"}
_NOT_TOLD = "this recording does not tell why; stepscope doctor says what this machine allows"


class Counted:
    """The devices whose energy is the run's own, with what tells of each; or why there are none."""

    def __init__(self, tables: Tables) -> None:
        self.meters: Meters = meters(tables)
        self.tables = tables
        self.run = _run(tables, self.meters.meters)
        self.told = [(meter, *meter.during(self.run)) for meter in self.meters.meters]
        usable = [(meter, series) for meter, series, _, _ in self.told if series is not None and not meter.shared]
        boards = [meter for meter in self.meters.meters if meter.kind == GPU]
        self.absent: str | None = self.meters.unknown
        for meter, series, _, why in self.told:
            if meter.kind == GPU and self.absent is None and (meter.shared or series is None):
                self.absent = f"{meter.label}: {meter.why if meter.shared else why}"
        processors = self._everywhere([pair for pair in usable if pair[0].kind != GPU], complete=PACKAGE)
        own = [] if self.absent else [*(pair for pair in usable if pair[0].kind == GPU), *processors]
        if self.absent is None and not own:
            self.absent = self._why_none(boards)
        self.devices: list[tuple[Meter, Series]] = own

    def _everywhere(self, found: list[tuple[Meter, Series]], *, complete: str) -> list[tuple[Meter, Series]]:
        """Processors, where every machine that trains has them and none of them is lacking: else the sum is of some."""
        lacking = {
            meter.machine
            for meter, series, _, _ in self.told
            if meter.kind == complete and (series is None or meter.shared)
        }
        machines = {meter.machine for meter, _ in found if meter.kind == complete}
        needed = {machine for machine in self.meters.machine_of.values() if machine}
        return found if machines and needed <= machines and not lacking else []

    def _why_none(self, boards: Sequence[Meter]) -> str:
        if not self.meters.meters:
            return no_source(self.tables)
        for meter, series, _, why in self.told:
            if meter.shared or series is None:
                return f"{meter.label}: {meter.why if meter.shared else why}"
        return "not every machine of the run tells the energy of its processors" if not boards else _NOT_TOLD

    @property
    def sources(self) -> tuple[str, ...]:
        """What is in a sum, in words that are equal where two sums may be compared."""
        found = {meter.device: source for meter, _, source, _ in self.told}
        kinds = ((meter.kind, found[meter.device]) for meter, _ in self.devices)
        return tuple(
            f"{_WORDS[kind]} by {source}" for kind, source in sorted(set(kinds), key=lambda pair: _ORDER[pair[0]])
        )

    def of_steps(self, rows: pl.DataFrame) -> StepEnergy:
        """The mean of training steps: rows of the table of steps, or of those that a comparison measures."""
        if self.absent is not None:
            return StepEnergy(absent=self.absent)
        first = max(series.ends_ns[0] for _, series in self.devices)
        last = min(series.ends_ns[1] for _, series in self.devices)
        start, end = pl.col("start_ns"), pl.col("start_ns") + pl.col("wall_ns")
        inside = rows.filter((pl.col("wall_ns") > 0) & (start >= first) & (end <= last))
        if inside.is_empty():
            return StepEnergy(absent=NO_STEPS)
        times = _times(inside)
        count = int(inside.group_by("rank").len()["len"].to_numpy().max())
        readings = min(series.readings(int(times.starts[0]), int(times.ends[-1])) for _, series in self.devices)
        if readings < FEW_READINGS:
            few = f"{readings} reading{'' if readings == 1 else 's'} of energy in the training steps: too few to tell"
            return StepEnergy(steps=count, absent=few)
        of = {GPU: 0.0, PACKAGE: 0.0, DRAM: 0.0}
        machine = pl.col("process").replace_strict(dict(self.meters.machine_of), default=None, return_dtype=pl.String)
        by_machine = inside.with_columns(machine=machine).partition_by("machine", as_dict=True)
        for meter, series in self.devices:
            own = by_machine.get((meter.machine,))
            of[meter.kind] += series.drawn(times if own is None else _times(own))[0]
        by_rank = inside.filter(pl.col("samples").is_not_null()).group_by("rank").agg(pl.col("samples").mean())
        samples = float(by_rank["samples"].sum())
        per_step = sum(of.values()) / count
        return StepEnergy(
            steps=count,
            joules_per_step=per_step,
            joules_per_sample=per_step / samples if samples > 0 else None,
            gpu_joules_per_step=of[GPU] / count if any(meter.kind == GPU for meter, _ in self.devices) else None,
        )


_ORDER = {GPU: 0, PACKAGE: 1, DRAM: 2}


def facts(
    tables: Tables, steady: pl.DataFrame, train: StepFacts | None, traced: Sequence[DeviceTime], prices: Prices
) -> EnergyFacts:
    """`steady` are the rows that the mean of the training step stands on, `traced` the device's time in windows."""
    found = Counted(tables)
    domains = tuple(_domain(found, *told) for told in found.told)
    per_step = found.of_steps(steady)
    own = [one for one in domains if one.counted]
    joules = sum(one.joules or 0.0 for one in own) if own else None
    idle_ns, total_ns = (
        sum(getattr(one, name) for one in traced if one.scope == "all") for name in ("idle_ns", "total_ns")
    )
    idle = idle_ns / total_ns if total_ns > 0 and per_step.gpu_joules_per_step is not None else None
    whole = tables.run.started_ns is not None and tables.run.ended_ns is not None
    run_s = float(found.run.ends[0] - found.run.starts[0]) / 1e9 if whole else None
    seconds = min((one.seconds for one in own), default=None)
    boards = found.meters.boards
    cost = of_1000 = None
    if prices:
        cost = priced(prices, joules, None if run_s is None or boards is None else boards * run_s / 3600)
        if train is not None:
            hours = None if boards is None else boards * train.mean_ms / 3600
            of_step = per_step.joules_per_step
            of_1000 = priced(prices, None if of_step is None else 1000 * of_step, hours)
    return EnergyFacts(
        domains=domains,
        sources=found.sources,
        joules=joules,
        wh=None if joules is None else joules / _J_PER_WH,
        mean_w=sum(one.mean_w or 0.0 for one in own) if own else None,
        seconds=seconds,
        run_s=run_s,
        boards=boards,
        per_step=per_step,
        idle_share=idle,
        idle_joules_per_step=None if idle is None else idle * (per_step.gpu_joules_per_step or 0.0),
        absent=found.absent,
        warnings=tuple(_warnings(domains, seconds, run_s)),
        notes=tuple(_notes(found, domains)),
        prices=prices,
        cost=cost,
        cost_per_1000_steps=of_1000,
    )


def priced(prices: Prices, joules: float | None, gpu_hours: float | None) -> EnergyCost:
    """What energy and hours of GPUs cost."""
    kwh = None if joules is None else joules / _J_PER_KWH
    energy = None if kwh is None or prices.kwh is None else kwh * prices.kwh
    gpus = None if gpu_hours is None or prices.gpu_hour is None else gpu_hours * prices.gpu_hour
    parts = [part for price, part in ((prices.kwh, energy), (prices.gpu_hour, gpus)) if price is not None]
    return EnergyCost(
        cost=sum(part for part in parts if part is not None) if parts and None not in parts else None,
        energy=energy,
        gpus=gpus,
        gpu_hours=gpu_hours,
        co2_g=None if kwh is None or prices.co2_g_per_kwh is None else kwh * prices.co2_g_per_kwh,
    )


def no_source(tables: Tables) -> str:
    """Why no energy was read, with the remedy where there is one."""
    if tables.system.is_empty():
        return NO_TELEMETRY
    told = [found for one in tables.manifests if isinstance(found := one.get("hardware"), dict)]
    of_cpu = [found for one in told if isinstance(found := one.get("cpu_energy"), dict)]
    reasons = [text for one in of_cpu if (text := string(one.get("reason")))]
    remedies = [text for one in of_cpu if (text := string(one.get("remedy")))]
    gpus = "" if any(one.get("gpus") for one in told) else "no GPU answers NVML, and "
    said = f"{gpus}{reasons[0] if reasons else _NOT_TOLD}"
    return f"{said}: {remedies[0]}" if remedies else said


def _run(tables: Tables, found: Sequence[Meter]) -> Intervals:
    """From the start of the run to its end; to the last reading of one that has no end."""
    series = [one for meter in found for one in (meter.counter, meter.sampled) if one is not None]
    edges = [edge for one in series for edge in one.ends_ns]
    start = tables.run.started_ns or min(edges, default=0)
    end = tables.run.ended_ns or max(edges, default=0)
    return Intervals(np.array([start], np.int64), np.array([max(start, end)], np.int64))


def _times(rows: pl.DataFrame) -> Intervals:
    starts = rows["start_ns"].to_numpy()
    return union(starts, starts + rows["wall_ns"].to_numpy())


def _domain(found: Counted, meter: Meter, series: Series | None, source: str, why: str | None) -> EnergyDomain:
    joules, seconds = (None, 0.0) if series is None else series.drawn(found.run)
    counted = any(meter is one for one, _ in found.devices)
    left_out = None if counted else (why if series is None else meter.why if meter.shared else found.absent)
    notes = [text for text in (left_out, why if series is not None else None, meter.why) if text]
    return EnergyDomain(
        host=meter.machine,
        device=meter.device,
        kind=meter.kind,
        name=meter.name,
        source=source,
        joules=joules if seconds > 0 else None,
        wh=joules / _J_PER_WH if joules is not None and seconds > 0 else None,
        mean_w=joules / seconds if joules is not None and seconds > 0 else None,
        seconds=seconds,
        counted=counted,
        shared=meter.shared,
        why="; ".join(dict.fromkeys(notes)) or None,
        sampled_ratio=_sampled_ratio(meter, source, found.run),
        longest_gap_s=0.0 if series is None else series.longest_gap_s(found.run),
    )


def _sampled_ratio(meter: Meter, source: str, run: Intervals) -> float | None:
    """Sampled power by the counter, over the time that both tell of."""
    if source != COUNTER or meter.counter is None or meter.sampled is None:
        return None
    ends = [meter.counter.ends_ns, meter.sampled.ends_ns, (int(run.starts[0]), int(run.ends[0]))]
    start, end = max(each[0] for each in ends), min(each[1] for each in ends)
    both = Intervals(np.array([start], np.int64), np.array([end], np.int64))
    if end <= start or meter.sampled.hole(both) or meter.sampled.readings(start, end) < _AGREE_READINGS:
        return None
    by_counter = meter.counter.drawn(both)[0]
    return meter.sampled.drawn(both)[0] / by_counter if by_counter > 0 else None


def _warnings(domains: Sequence[EnergyDomain], seconds: float | None, run_s: float | None) -> Iterator[str]:
    for one in domains:
        of = one.device if one.name is None else f"{one.device} ({one.name})"
        if one.counted and one.longest_gap_s > GAP_S:
            yield f"{of}: {one.longest_gap_s:.0f} s without a reading; what its counter grew by is spread evenly"
        if one.sampled_ratio is not None and abs(one.sampled_ratio - 1) > _AGREE:
            more = f"{abs(one.sampled_ratio - 1) * 100:.0f} % {'more' if one.sampled_ratio > 1 else 'less'}"
            yield f"{of}: sampled power tells {more} than the counter, which is used"
    if seconds is not None and run_s is not None and seconds < _REACHED * run_s:
        yield f"readings of energy reach over {seconds:.1f} of {run_s:.1f} s of the run; nothing is added for the rest"


def _notes(found: Counted, domains: Sequence[EnergyDomain]) -> Iterator[str]:
    """What a reader has to know of the sums."""
    own = [one for one in domains if one.counted]
    if any(one.source == SAMPLED for one in own):
        yield "energy of GPUs without a counter is power sampled once a second, summed: less sure than a counter"
    left = [one.device for one in domains if not one.counted]
    if left and found.absent is None:
        yield f"not in the sum: {', '.join(left)}"
    if any(one.kind != GPU for one in own):
        yield "energy of processors and memory is of the whole machine, whoever used it"
    if any(one.kind == GPU and one.shared is None for one in own):
        yield "the driver lists no process of the run on its GPUs, so what others drew there would be counted too"
    if found.meters.others:
        yield f"left out: GPUs of the machine that the run did not use, {found.meters.others} of them"
