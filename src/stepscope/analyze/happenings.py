"""What happened around a moment of a run: events of its journal, compilations, new rates, epochs, the machine's load.

It is told of steps in which a series changed, and marked where curves are drawn. What happens all the time is not told,
as it would stand beside any change; what is told stands in the same steps, and need not be the cause.
"""

from __future__ import annotations

import math
import posixpath
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import polars as pl

from stepscope.analyze.machine import cores
from stepscope.analyze.machine.hardware import REASONS
from stepscope.analyze.machine.readings import of
from stepscope.engine.journal import json_object, mean, place_of
from stepscope.engine.step_labels import COMPILING, LabelledSteps
from stepscope.model import Place
from stepscope.model.counted import short
from stepscope.model.metrics import RATES, Happening
from stepscope.read.text import number
from stepscope.tables.arrays import Int64
from stepscope.tables.schema import Tables

JUMP = 1.5  # times: a schedule changes a rate by less from step to step, and hand-made drops are by 2 to 10
USUAL = 0.2  # of all stretches of such length: what is met in one of five says nothing about this one
SHORT = 0.1  # of the mean step: a collection that took less explains nothing
MAX_SHOWN = 6
LEAST_KNOWN = 40  # steps; in fewer nothing is known to be usual
BESIDE_NS = 10_000_000_000  # of telemetry, which comes once a second, before and after
MORE_CORES = 0.5  # of other processes
THROTTLED_SHARE = 0.05  # of the time, that a cgroup held its processes back for
LOWERED = 0.5  # of the readings of a GPU: a clock is low now and then
AHEAD = 0.8  # of the device's time a step: a host that takes less launches steps that wait, until its queue is full
AHEAD_STEPS = 10  # on each side of a change, that tell what the host took
SCALE = "train/scale"
CHECKPOINT, EVALUATION = "checkpoint", "evaluation"


class Occurrence(NamedTuple):
    """What happened at a time; `mark` is what pictures call it, empty where they leave it out."""

    time_ns: int
    happening: Happening
    mark: str = ""


class Happenings:
    """Of one process; nothing is read before something is asked."""

    def __init__(self, tables: Tables, labelled: LabelledSteps, process: str | None) -> None:
        own = (pl.col("process") == process) & (pl.col("kind") == "train") & pl.col("start_ns").is_not_null()
        self._tables, self._labelled, self._process = tables, labelled, process
        self._steps = labelled.frame.filter(own).sort("start_ns")
        self._numbers: Int64 = self._steps["step"].to_numpy()
        self._starts: Int64 = self._steps["start_ns"].to_numpy()
        self._ends: Int64 = self._starts + self._steps["wall_ns"].to_numpy()

    def near(self, step: int | None, before: int = 2, after: int = 1) -> tuple[Happening, ...]:
        """What began from so many steps before one to so many after it, in order of time; each kind and line once."""
        places = np.flatnonzero(self._numbers == step) if step is not None else self._numbers[:0]
        if not len(places):
            return ()
        place = int(places[0])
        first, last = max(0, place - before), min(len(self._numbers) - 1, place + after)
        begin, end = int(self._ends[first - 1]) if first else int(self._starts[0]), int(self._ends[last])
        count = len(self._numbers)
        found: dict[tuple[str, str], Happening] = {}
        for time_ns, one, _ in self.all:
            often = self._often[one.kind]
            usual = often > 1 and count >= LEAST_KNOWN and often * (last - first + 1) > USUAL * count
            if begin <= time_ns < end and not usual:
                found.setdefault((one.kind, one.text), one)
        told = [*found.values(), *self._ahead(place), *self._load(int(self._starts[place]))]
        return tuple(told[:MAX_SHOWN])

    @cached_property
    def _often(self) -> dict[str, int]:
        """In how many steps something of a kind began."""
        steps: dict[str, set[int | None]] = defaultdict(set)
        for _, one, _ in self.all:
            steps[one.kind].add(one.step)
        return {kind: len(those) for kind, those in steps.items()}

    @cached_property
    def all(self) -> list[Occurrence]:
        """In order of time."""
        found = [*self._journal(), *self._compiles(), *self._rates(), *self._epochs()]
        if not any(one.mark == EVALUATION for one in found):
            found += self._evaluations()
        return sorted(found, key=lambda one: (one.time_ns, one.happening.kind, one.happening.text))

    def _step(self, time_ns: int) -> int | None:
        at = int(np.searchsorted(self._starts, time_ns, side="right")) - 1
        return int(self._numbers[at]) if at >= 0 else None

    def _made(
        self, time_ns: int, kind: str, text: str, place: Place | None = None, *, step: int | None = None, mark: str = ""
    ) -> Occurrence:
        return Occurrence(time_ns, Happening(kind, self._step(time_ns) if step is None else step, text, place), mark)

    # ------------------------------------------------------------------------------------------------- sources

    def _journal(self) -> Iterator[Occurrence]:
        kinds = ["gc", "save", "region", "scaler_skip", "window", "site"]
        own = self._tables.journal.filter((pl.col("process") == self._process) & pl.col("kind").is_in(kinds))
        least_ns = SHORT * mean(self._steps["wall_ns"])
        for row in own.drop_nulls("time_ns").iter_rows(named=True):
            time_ns, kind, data, ns = row["time_ns"], row["kind"], json_object(row["data"]), row["duration_ns"] or 0
            place, length = place_of(data), f" ({short(ns / 1e6)} ms)" if ns else ""
            if kind == "gc" and ns >= least_ns:
                yield self._made(time_ns, kind, f"garbage collection{at(place)}{length}", place)
            elif kind == "save":
                yield self._made(time_ns, kind, f"checkpoint{at(place)}{length}", place, mark=CHECKPOINT)
            elif kind == "region" and (name := data.get("name")) in (CHECKPOINT, EVALUATION):
                yield self._made(time_ns, "save" if name == CHECKPOINT else name, f"{name}{length}", mark=name)
            elif kind == "site" and isinstance(data.get("arguments"), dict) and "lr" in data["arguments"]:
                yield self._made(time_ns, "optimizer", f"a new optimizer ({data.get('what')}){at(place)}", place)
            elif kind == "scaler_skip":
                yield self._made(time_ns, "scale", "GradScaler left an update out")
            elif kind == "window" and (first := number(data.get("first_step"))) is not None:
                count = number(data.get("steps")) or 1
                last = f" to {first + count - 1:.0f}" if count > 1 else ""
                text = f"stepscope's own profiler window (steps {first:.0f}{last})"
                for moment_ns in (int(number(data.get("start_ns")) or time_ns), time_ns + ns):
                    yield self._made(moment_ns, kind, text, step=int(first))

    def _compiles(self) -> Iterator[Occurrence]:
        own = self._tables.compiles
        if not own.is_empty():
            own = own.filter((pl.col("process") == self._process) & pl.col("kind").is_in(COMPILING))
        for row in own.drop_nulls("time_ns").iter_rows(named=True):
            lines = ((row[f"{of}file"], row[f"{of}line"]) for of in ("", "call_", "def_"))
            place = next((Place(file, line) for file, line in lines if file), None)
            again = row["kind"] == "recompile"
            text, mark = f"{'re' * again}compilation{at(place)}", "recompiled" if again else ""
            yield self._made(row["time_ns"], "compile", text, place, mark=mark)

    def _rates(self) -> Iterator[Occurrence]:
        """Rates that jumped, and scales that fell."""
        metrics = self._tables.metrics
        if metrics.is_empty():
            return
        told = pl.col("name").str.starts_with(RATES) | (pl.col("name") == SCALE)
        own = metrics.filter((pl.col("process") == self._process) & told)
        for (name,), rows in own.partition_by("name", as_dict=True, maintain_order=True).items():
            for (_, old), (time_ns, new) in pairwise(rows.select("time_ns", "value").rows()):
                if name == SCALE:
                    if new < old:
                        yield self._made(time_ns, "scale", f"GradScaler's scale {old:.6g} -> {new:.6g}")
                elif jumped(old, new):
                    group = str(name).removeprefix(RATES)
                    of_group = "" if group == "0" else f" of group {group}"
                    text = f"lr{of_group} {old:.3g} -> {new:.3g}"
                    yield self._made(time_ns, "lr", text, mark=f"learning rate × {new / old:.3g}")

    def _epochs(self) -> Iterator[Occurrence]:
        epochs = self._steps["epoch"].to_list()
        for index, (old, new) in enumerate(pairwise(epochs), start=1):
            if old is not None and new is not None and new != old:
                yield self._made(int(self._starts[index]), "epoch", f"epoch {new} begins", mark=f"epoch {new}")

    def _evaluations(self) -> Iterator[Occurrence]:
        """Stretches of evaluation steps."""
        frame = self._labelled.frame
        if len(self._steps) == frame.height:
            return
        own = frame.filter((pl.col("process") == self._process) & (pl.col("kind") == "eval"))["start_ns"].drop_nulls()
        times = own.sort().to_numpy()
        between = np.searchsorted(self._starts, times)  # the training step that comes next
        firsts = np.flatnonzero(np.diff(between, prepend=-1))
        counts = np.diff(np.append(firsts, len(times)))
        for first, count in zip(firsts.tolist(), counts.tolist(), strict=True):
            text = f"evaluation ({count:,} step{'s' * (count > 1)})"
            yield self._made(int(times[first]), EVALUATION, text, mark=EVALUATION)

    # ------------------------------------------------------------------------------------------------- device

    def _ahead(self, place: int) -> Iterator[Happening]:
        """The host had run ahead of the device, whose steps take as long as before, and does no more."""
        device_ns = self._steps["device_ns"]
        before, after = device_ns[:place].drop_nulls(), device_ns[place:].drop_nulls()
        if before.is_empty() or after.is_empty():
            return
        wall_ns = self._steps["wall_ns"]
        was_ahead = mean(wall_ns[max(0, place - AHEAD_STEPS) : place]) < AHEAD * before[-1]
        is_ahead = mean(wall_ns[place : place + AHEAD_STEPS]) < AHEAD * after[0]
        if was_ahead and not is_ahead and AHEAD < after[0] / before[-1] < 1 / AHEAD:
            took = f"{short(before[-1] / 1e6)} ms before and {short(after[0] / 1e6)} ms after"
            text = f"until then the host ran ahead of the device, whose steps took {took}"
            yield Happening("device", self._step(int(self._starts[place])), text)

    # ----------------------------------------------------------------------------------------------- telemetry

    def _load(self, time_ns: int) -> Iterator[Happening]:
        """What the machine did more from this moment on than before it."""
        step = self._step(time_ns)
        readings = self._readings
        before = readings.filter(pl.col("time_ns").is_between(time_ns - BESIDE_NS, time_ns - 1))
        after = readings.filter(pl.col("time_ns").is_between(time_ns, time_ns + BESIDE_NS))
        if before.is_empty() or after.is_empty():
            return
        known = _lowered(before)
        for device, names in _lowered(after).items():
            usual = known.get(device, {})
            reasons = [name for name, share in names.items() if share - usual.get(name, 0.0) >= LOWERED]
            if reasons:
                yield Happening("throttling", step, f"clock of {device} lowered ({', '.join(reasons)})")
        held = [cores.throttled_share(rows) for rows in (before, after)]
        own = [cores.own_cores(rows) for rows in (before, after)]
        others = [cores.others(rows, used or 0.0) for rows, used in zip((before, after), own, strict=True)]
        if None not in held and (held[1] or 0.0) - (held[0] or 0.0) >= THROTTLED_SHARE:
            yield Happening("throttling", step, "the cgroup's CPU limit held processes back")
        more = (others[1] or 0.0) - (others[0] or 0.0)
        if None not in (*own, *others) and more >= MORE_CORES:
            yield Happening("others", step, f"other processes use {more:.1f} cores more")

    @cached_property
    def _readings(self) -> pl.DataFrame:
        host = next((rank.host for rank in self._tables.ranks if rank.process == self._process), None)
        readings = self._tables.system
        if not readings.is_empty():
            readings = readings.drop_nulls(["time_ns", "value"])
            readings = readings.filter((pl.col("host") == host) | pl.lit(host is None)).sort("time_ns")
        return readings


def jumped(old: float, new: float) -> bool:
    """Whether a learning rate changed by more than a schedule does from step to step; from 0 it begins."""
    return old > 0 and (new <= 0 or abs(math.log(new / old)) >= math.log(JUMP))


def at(place: Place | None) -> str:
    """` at train.py:29`, or nothing."""
    if place is None:
        return ""
    name = posixpath.basename(place.file)
    return f" at {name}:{place.line}" if place.line is not None else f" at {name}"


def joined(told: Iterable[Happening]) -> str:
    """What happened, as the end of a sentence; it never says that one is the cause."""
    texts = ", ".join(one.text for one in told)
    return f"in the same steps: {texts}" if texts else "no other event was recorded in these steps"


def _lowered(readings: pl.DataFrame) -> dict[str, dict[str, float]]:
    """Of each GPU, the part of readings with each reason for a lower clock that somebody could remove."""
    found: dict[str, dict[str, float]] = {}
    for (device,), rows in of(readings, "gpu_clock_reasons").partition_by("device", as_dict=True).items():
        bits = rows["value"].cast(pl.Int64, strict=False).fill_null(0).to_numpy()
        found[str(device)] = {name: float(((bits & bit) != 0).mean()) for bit, name in REASONS.items()}
    return found
