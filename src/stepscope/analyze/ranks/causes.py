"""Why a rank is late: the part of its work before it arrives that is beyond its peers', and what was recorded of it."""

from __future__ import annotations

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.layout import Layout
from stepscope.model.findings import Evidence, Place
from stepscope.tables.arrays import Int64
from stepscope.tables.reduced import Reduced

_LAYERS, _BACKWARD, _OPTIMIZER = "torch/nn/", "torch/autograd/", "torch/optim/"
_LOADER = r"torch/utils/data/"  # in which file a rank stands while its loader works or waits for workers
STEPS_SOURCE = "steps of reduced tables"


class Cause(Struct, frozen=True):
    name: str  # of model.ranks.CAUSES
    source: str
    place: Place | None = None
    evidence: tuple[Evidence, ...] = ()


class Line(Struct, frozen=True):
    """On which line ranks spend more than their peers. `waits`: in the loader or asleep there, not at work."""

    place: Place | None
    source: str  # by what it is known, or why it is not
    waits: bool = False
    in_layers: bool = False  # inside PyTorch's own layers, backward pass or optimizer, which every rank has


class Recorded:
    """What is looked up of single ranks; each table is read for those alone, and their peers."""

    def __init__(self, reduced: Reduced, layout: Layout) -> None:
        self._reduced, self._layout = reduced, layout

    def events(self, kind: str) -> pl.DataFrame:
        """Events with a known length: column (position of the rank), step, ms."""
        wanted = (
            self._reduced.scan("events")
            .filter((pl.col("kind") == kind) & (pl.col("duration_us") > 0) & pl.col("step").is_not_null())
            .select("rank", "step", "file", "line", "function", ms=pl.col("duration_us") / 1000)
            .collect()
        )
        column = self._layout.at(wanted["rank"].fill_null(-1).cast(pl.Int64).to_numpy())
        return wanted.with_columns(column=pl.Series(column)).filter(pl.col("column") >= 0)

    def line(self, part: Int64, phase: str | None, step_ms: float, excess_ms: float) -> Line:
        """Of a phase, or of all; where a rank waits for data it is asleep in its loader, elsewhere for other ranks."""
        peers = self._some_peers(part)
        ranks = self._layout.ranks
        both = [*ranks[part].tolist(), *ranks[peers].tolist()]
        rows = self._reduced.scan("lines").filter(pl.col("rank").is_in(both) & (pl.col("samples") > 0)).collect()
        enough = rows.group_by("rank").agg(pl.col("samples").sum()).filter(pl.col("samples") >= at.MIN_SAMPLES)
        known = set(enough["rank"].to_list())
        mine = [rank for rank in ranks[part].tolist() if rank in known]
        others = [rank for rank in ranks[peers].tolist() if rank in known]
        if not mine or not others:
            return Line(None, "no stacks were sampled")
        rows = rows.with_columns(
            pl.col("waiting").fill_null(False) | pl.col("leaf").str.contains(_LOADER).fill_null(False)
        )
        key = ["phase", "file", "line", "function", "waiting"]
        asleep = pl.col("waiting") & (phase != "data_wait")
        shares = rows.join(enough.rename({"samples": "all"}), on="rank").filter(
            ~asleep & pl.col("file").is_not_null() & pl.col("line").is_not_null()
        )
        if phase is not None:
            shares = shares.filter(pl.col("phase") == phase)
        by_rank = shares.group_by("rank", *key).agg(
            share=(pl.col("samples") / pl.col("all")).sum(), leaf=pl.col("leaf").sort_by("samples").last()
        )
        # the middle of those without the line is 0: sums over the count of ranks, not over those that have it
        late = (
            by_rank.filter(pl.col("rank").is_in(mine))
            .group_by(key)
            .agg(mine=pl.col("share").sum() / len(mine), leaf=pl.col("leaf").sort_by("share").last())
        )
        usual = (
            by_rank.filter(pl.col("rank").is_in(others)).group_by(key).agg(usual=pl.col("share").sum() / len(others))
        )
        beyond = late.join(usual, on=key, how="left", nulls_equal=True).with_columns(
            more=pl.col("mine") - pl.col("usual").fill_null(0.0)
        )
        top = beyond.sort(["more", *key], descending=[True, *(False for _ in key)], nulls_last=True).head(1)
        more = 0.0 if top.is_empty() else float(top["more"][0])
        # a share of so many samples moves by chance
        counted = int(enough.filter(pl.col("rank").is_in(mine))["samples"].sum())
        share = 0.0 if top.is_empty() else float(top["mine"][0])
        chance = at.SHARE_ERRORS * np.sqrt(max(share, 1 / counted) / counted)
        if more * step_ms < at.LINE_PART * excess_ms or more < chance:
            return Line(None, "sampled stacks show no line on which it spends more than its peers")
        place = Place(top["file"][0], top["line"][0], top["function"][0], share=more)
        source = f"sampled stacks of these ranks against {len(others)} of their peers"
        leaf = str(top["leaf"][0] or "")
        return Line(place, source, bool(top["waiting"][0]), _LAYERS in leaf or _BACKWARD in leaf or _OPTIMIZER in leaf)

    def _some_peers(self, part: Int64, most: int = 16) -> Int64:
        alike = np.flatnonzero(np.isin(self._layout.peers, self._layout.peers[part]))
        peers = np.setdiff1d(alike, part)
        return peers[:: -(-len(peers) // most)] if len(peers) else peers

    def clocks(self, part: Int64) -> tuple[float, float] | None:
        """The device clock of these ranks and of their peers (MHz), at its lowest quarter of an hour's mean."""
        peers = self._some_peers(part)
        numbers = self._layout.ranks
        rows = (
            self._reduced.scan("telemetry")
            .filter(
                (pl.col("metric") == "gpu_sm_clock_mhz")
                & pl.col("rank").is_in([*numbers[part].tolist(), *numbers[peers].tolist()])
                & pl.col("mean").is_finite()
                & (pl.col("mean") > 0)
            )
            .select("rank", "start_us", "mean")
            .collect()
        )
        mine = rows.filter(pl.col("rank").is_in(numbers[part].tolist()))["mean"]
        others = rows.filter(pl.col("rank").is_in(numbers[peers].tolist()))["mean"]
        if mine.is_empty() or others.is_empty():
            return None
        return float(mine.mean() or 0.0), float(others.median() or 0.0)  # type: ignore[arg-type]

    def busy_cores(self, hosts: Int64) -> tuple[float, float] | None:
        """Processors in use on these hosts and on the others, of telemetry of the hosts themselves."""
        names = [self._layout.hosts[host] for host in hosts]
        rows = (
            self._reduced.scan("telemetry")
            .filter((pl.col("metric") == "busy_cores") & pl.col("rank").is_null() & pl.col("mean").is_finite())
            .group_by("host")
            .agg(pl.col("mean").mean())
            .collect()
        )
        mine = rows.filter(pl.col("host").is_in(names))["mean"]
        others = rows.filter(~pl.col("host").is_in(names))["mean"]
        if mine.is_empty() or others.is_empty():
            return None
        return float(mine.median() or 0.0), float(others.median() or 0.0)  # type: ignore[arg-type]


class Parts(Struct, frozen=True):
    """Milliseconds beyond the peers in a mean step, by what was recorded; a part that was not is missing."""

    phases: dict[str, float]  # of the host, the data wait among them
    gc: float | None
    compute: float | None
    retries: float
    tokens: float | None  # what more tokens make the rank's work longer
    total: float
    loader_alone: bool = True  # the wait for data ends with the fetch; else it reaches to the forward pass


def of_data(line: Line, loader_alone: bool) -> tuple[str, Place | None, str]:
    """Cause, line and source of a longer wait for data; where it may hold what comes behind the fetch, too, a line of
    Python at which the rank works, not one at which it waits for its loader, is the cause itself."""
    if not loader_alone and line.place is not None and not line.waits:
        return "python", line.place, f"the time before the forward pass in every step; {line.source}"
    return "data", line.place, f"the wait for data in every step; {line.source}"


def cause_of(part: Int64, parts: Parts, recorded: Recorded, layout: Layout, step_ms: float) -> Cause:
    need = at.PART_OF_EXCESS * parts.total
    evidence = tuple(
        Evidence(f"{name.replace('_', ' ')} beyond the peers'", round(value, 3), "ms per step", STEPS_SOURCE)
        for name, value in (
            *parts.phases.items(),
            ("collections", parts.gc),
            ("device work", parts.compute),
        )
        if value is not None and abs(value) >= at.LINE_PART * parts.total
    )
    data = parts.phases.get("data_wait", 0.0)
    host = {phase: value for phase, value in parts.phases.items() if phase != "data_wait"}
    if parts.gc is not None and parts.gc >= need:
        return Cause("gc", "Python's collections, recorded in every step", None, evidence)
    if parts.retries >= need:
        return Cause("memory", "retries of the allocator, with their lengths", None, evidence)
    # device work that takes longer shows in the host's phases, too, where the host waits for it
    device = parts.compute if parts.compute is not None else 0.0
    if device < need and len(part) > 1:  # all of a host: what its ranks share comes before what each does
        cores = _others_at_work(part, recorded, layout)
        if cores:
            source = "its ranks take longer while more of its processors are in use"
            return Cause("other_processes", source, None, evidence + cores)
    if data >= need:
        name, place, source = of_data(recorded.line(part, "data_wait", step_ms, data), parts.loader_alone)
        return Cause(name, source, place, evidence)
    if parts.tokens is not None and parts.tokens >= need:
        return Cause("sequence_length", "tokens of its batches", None, evidence)
    if device >= need:
        return _of_device(part, recorded, evidence)
    if sum(host.values()) >= need:
        return _of_host(part, host, parts.total, recorded, layout, step_ms, evidence)
    return Cause("unknown", "nothing that was recorded explains it", None, evidence)


def _of_device(part: Int64, recorded: Recorded, evidence: tuple[Evidence, ...]) -> Cause:
    clocks = recorded.clocks(part)
    if clocks is None:
        return Cause("unknown", "its device works longer; clocks were not recorded", None, evidence)
    mine, usual = clocks
    evidence += (
        Evidence("device clock", round(mine), "MHz", "telemetry"),
        Evidence("device clock of its peers", round(usual), "MHz", "telemetry"),
    )
    if mine < (1 - at.CLOCK_DROP / 2) * usual:
        return Cause("clock", "device work in windows, and the device's clock in telemetry", None, evidence)
    return Cause("compute", "device work in windows, at the clock of its peers", None, evidence)


def _of_host(
    part: Int64,
    host: dict[str, float],
    total_ms: float,
    recorded: Recorded,
    layout: Layout,
    step_ms: float,
    evidence: tuple[Evidence, ...],
) -> Cause:
    phase = max(host, key=lambda name: host[name])
    cores = _others_at_work(part, recorded, layout)
    if cores:
        return Cause(
            "other_processes",
            f"{phase} takes longer while more of its host's processors are in use",
            None,
            evidence + cores,
        )
    if host[phase] < at.PART_OF_EXCESS * total_ms:
        return Cause("unknown", "several phases take longer on the host, none of them most of it", None, evidence)
    line = recorded.line(part, None if phase == "passes" else phase, step_ms, host[phase])
    if line.place is None or line.in_layers:
        where = " inside PyTorch's own layers" if line.in_layers else ""
        return Cause("unknown", f"{phase} takes longer on the host{where}; {line.source}", line.place, evidence)
    return Cause("python", f"{phase} in every step; {line.source}", line.place, evidence)


def _others_at_work(part: Int64, recorded: Recorded, layout: Layout) -> tuple[Evidence, ...]:
    """That more processors are in use on the host of these ranks than on others; empty where it is not so."""
    cores = recorded.busy_cores(np.unique(layout.host[part]))
    if cores is None or cores[0] <= cores[1] * (1 + at.BUSY_CORES) + 1:
        return ()
    return (
        Evidence("processors in use on its host", round(cores[0], 1), "cores", "telemetry"),
        Evidence("processors in use on other hosts", round(cores[1], 1), "cores", "telemetry"),
    )
