"""Ranks and hosts that keep being late: by every step of theirs or by windows, with cause and cost.

The cause is the part of their work before they arrive that is beyond their peers', and what was recorded of it.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.analyze.ranks import lateness as by
from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.case import STEPS_SOURCE, Case, events
from stepscope.analyze.ranks.own_work import Matrix, beyond, cells
from stepscope.model.counted import things
from stepscope.model.findings import Evidence, Place
from stepscope.model.ranks import Straggler
from stepscope.tables.arrays import Floats, Int64

Cause = tuple[str, str, Place | None, tuple[Evidence, ...]]  # of model.ranks.CAUSES, by what it is known, where
_LAYERS = ("torch/nn/", "torch/autograd/", "torch/optim/")
_LOADER = r"torch/utils/data/"  # in which file a rank stands while its loader works or waits for workers


def fixed(case: Case, explained: Collection[int]) -> tuple[list[Straggler], Int64]:
    """Those that are late, but for the ranks in `explained`; and the positions of all ranks among them."""
    on_host = by.lateness(case.host, case.step_ms)
    late = by.late_ranks(case.host, on_host, case.step_ms)
    mean = np.nan_to_num(on_host.mean)
    with_device, there = np.zeros(0, np.int64), mean
    if case.device is not None and len(case.device):
        windows = by.lateness(case.device, case.step_ms)
        seen = by.late_ranks(case.device, windows, case.step_ms)
        # the device's part comes on top of what every step shows of the host
        more = np.nan_to_num(windows.mean) - np.nan_to_num(by.lateness(case.host_in_windows, case.step_ms).mean)
        sure = more >= np.maximum(at.LEAST_STEADY_SHARE / 2 * case.step_ms, at.ERRORS * windows.error)
        sure |= by.late_at_times(case.device - np.nan_to_num(case.host_in_windows), case.step_ms, ~sure)
        with_device = np.union1d(np.setdiff1d(seen, late), np.intersect1d(np.union1d(seen, late), np.flatnonzero(sure)))
        there = np.nan_to_num(windows.mean)
        mean[with_device] = np.maximum(mean + more, there)[with_device]
    both = np.setdiff1d(np.union1d(late, with_device), case.layout.at(sorted(explained))).astype(np.int64)
    parts = [
        part
        for part in (by.with_host_mates(both, mean, case.layout) if len(both) else ())
        if not _hidden(case, part) and not _waits_for_absent(case, part, float(mean[part].mean()))
    ]
    all_late = np.unique(np.concatenate([np.zeros(0, np.int64), *parts])).astype(np.int64)
    per_token_ms = ms_per_token(case) if parts else None
    found = []
    for part in parts:
        # whether windows show more of it than every step does
        in_windows = bool(np.isin(part, with_device).any())
        excess_ms, there_ms = float(mean[part].mean()), float(there[part].mean())
        cost_ms = _lost_ms(case, part, all_late, excess_ms / there_ms if there_ms > 0 else 1.0, in_windows=in_windows)
        excess = case.device if in_windows and case.device is not None else case.host
        cause, cause_source, place, evidence = cause_of(case, part, excess_ms, per_token_ms)
        known = np.where(np.isfinite(excess), excess, -np.inf)
        source = f"{things(len(excess), 'step')} of windows" if in_windows else things(len(excess), "steady step")
        own = Evidence("own work beyond the peers'", round(excess_ms, 3), "ms per step", source)
        found.append(
            case.straggler(
                "host" if len(part) > 1 else "rank", part, cause, cause_source, cost_ms,
                excess_ms=excess_ms,
                share_of_steps=float((known[:, part].max(axis=1) >= known.max(axis=1)).mean()),
                place=place,
                evidence=(own, *evidence),
            )
        )  # fmt: skip
    return found, all_late


def _waits_for_absent(case: Case, part: Int64, excess_ms: float) -> bool:
    """Whether these ranks take longer because all that were recorded of their group wait: one that is not is late."""
    return any(
        bool(np.isin(part, group.members).all()) and group.excess_ms >= at.PART_OF_EXCESS * excess_ms
        for group in case.awaited
    )


def _hidden(case: Case, part: Int64) -> bool:
    """Whether windows show that these ranks come to collectives no later for it: what they do is hidden."""
    # calls of the host hide behind no device's queue, and end late where it has no core for their threads
    if case.arrivals is None or not case.arrivals.on_device or case.layout.waits_inside:
        return False
    at_windows = np.flatnonzero(np.isin(case.steps.numbers, case.arrivals.numbers))
    if not len(at_windows):
        return False
    late = case.arrivals.late[np.searchsorted(case.arrivals.numbers, case.steps.numbers[at_windows])][:, part]
    in_windows = np.flatnonzero(np.isin(case.steps.windows, at_windows))
    if case.device is not None and len(in_windows) == len(at_windows):
        excess = case.device[in_windows][:, part]
    else:
        excess = beyond(case.steps.own[at_windows], case.layout, part)
    own = float(np.nanmean(excess)) if np.isfinite(excess).any() else 0.0
    if own < at.LEAST_STEADY_SHARE * case.step_ms or not np.isfinite(late).any():
        return False
    return float(np.nanmean(late)) < at.HIDDEN * own


def _lost_ms(case: Case, part: Int64, late: Int64, in_run: float, *, in_windows: bool) -> float:
    """What a mean step would be shorter without it.

    Args:
        late: all that are late, these ranks among them.
        in_run: how much more they are late in a mean step of the run than in one of windows.
        in_windows: whether windows show more of it than every step does.
    """
    played: Floats | None = None if case.pipes is None else case.pipes.without(part, late)
    if played is None and case.passes and len(part) > 1:  # of one rank, what it does longer adds up
        # another one of them may be last in each pass
        played = np.sum([by.lost_by_ranks(excess, part, late) for excess in case.passes], axis=0)
    if in_windows and case.device is not None:
        lost = by.lost_by_ranks(case.device, part, late) if played is None else played
        own_ms = float(np.nanmean(case.device[:, part]))
        if len(part) == 1 and 0 < own_ms < lost.mean():
            lost = lost * (own_ms / lost.mean())  # no step is longer by more than what one rank does beyond the others
        walls = case.steps.wall
        of_run = by.along_the_run(lost, walls[case.played_rows(len(lost))], walls[case.rows])
        # without it, what every step tells of the host beside what the windows do of it
        return float(lost.mean()) * in_run if of_run is None else of_run
    lost_ms = float(by.lost_by_ranks(case.host, part, late).mean())
    if case.device is None or (played is None and case.steps.waits_inside):
        return lost_ms
    shown = by.lost_by_ranks(case.host_in_windows, part, late)
    most = at.MOST_BY_PASSES if case.steps.waits_inside and len(part) > 1 else 1.0
    played = by.lost_by_ranks(case.device, part, late) if played is None else played
    return lost_ms * by.in_earnest(shown, played, most)


# ------------------------------------------------------------------------------------------------------------- causes


class Line(Struct, frozen=True):
    """On which line ranks spend more than their peers. `waits`: in the loader or asleep there, not at work."""

    place: Place | None
    source: str  # by what it is known, or why it is not
    waits: bool = False
    in_layers: bool = False  # inside PyTorch's own layers, backward pass or optimizer, which every rank has


def line_of(case: Case, part: Int64, phase: str | None, excess_ms: float) -> Line:
    """Of a phase, or of all; where a rank waits for data it is asleep in its loader, elsewhere for other ranks."""
    mine, others = case.layout.ranks[part].tolist(), _some_peers(case, part)
    chosen = pl.col("rank").is_in([*mine, *others]) & (pl.col("samples") > 0)
    rows = case.reduced.scan("lines").filter(chosen).collect()
    enough = rows.group_by("rank").agg(all=pl.col("samples").sum()).filter(pl.col("all") >= at.MIN_SAMPLES)
    known = set(enough["rank"].to_list())
    mine, others = ([rank for rank in ranks if rank in known] for ranks in (mine, others))
    if not mine or not others:
        few = "no stacks" if rows.is_empty() else f"fewer than {at.MIN_SAMPLES} stacks of them, or of their peers,"
        return Line(None, f"{few} were sampled")
    in_loader = pl.col("leaf").str.contains(_LOADER).fill_null(False)
    rows = rows.join(enough, on="rank").with_columns(waiting=pl.col("waiting").fill_null(False) | in_loader)
    rows = rows.filter(pl.col("file").is_not_null() & pl.col("line").is_not_null())
    if phase is not None:
        rows = rows.filter(pl.col("phase") == phase)
    if phase != "data_wait":
        rows = rows.filter(~pl.col("waiting"))
    key = ["phase", "file", "line", "function", "waiting"]
    by_rank = rows.group_by("rank", *key).agg(
        share=(pl.col("samples") / pl.col("all")).sum(), leaf=pl.col("leaf").sort_by("samples").last()
    )
    # the middle of those without the line is 0: sums over the count of ranks, not over those that have it
    ours = by_rank.filter(pl.col("rank").is_in(mine)).group_by(key)
    late = ours.agg(mine=pl.col("share").sum() / len(mine), leaf=pl.col("leaf").sort_by("share").last())
    usual = by_rank.filter(pl.col("rank").is_in(others)).group_by(key)
    joined = late.join(usual.agg(usual=pl.col("share").sum() / len(others)), on=key, how="left", nulls_equal=True)
    more = pl.col("mine") - pl.col("usual").fill_null(0.0)
    order = [True, *(False for _ in key)]
    top = joined.with_columns(more=more).sort(["more", *key], descending=order, nulls_last=True).head(1).to_dicts()
    # a share of so many samples moves by chance
    counted = int(enough.filter(pl.col("rank").is_in(mine))["all"].sum())
    share = max(top[0]["mine"] if top else 0.0, 1 / counted)
    least = max(at.LINE_PART * excess_ms / case.step_ms, at.SHARE_ERRORS * float(np.sqrt(share / counted)))
    if not top or top[0]["more"] < least:
        return Line(None, "sampled stacks show no line on which it spends more than its peers")
    row = top[0]
    place = Place(row["file"], row["line"], row["function"], share=row["more"])
    source = f"sampled stacks of these ranks against {len(others)} of their peers"
    return Line(place, source, row["waiting"], any(part in (row["leaf"] or "") for part in _LAYERS))


def _some_peers(case: Case, part: Int64) -> list[int]:
    layout = case.layout
    peers = np.setdiff1d(np.flatnonzero(np.isin(layout.peers, layout.peers[part])), part)
    found: list[int] = layout.ranks[peers[:: max(-(-len(peers) // 16), 1)]].tolist()
    return found


def of_data(case: Case, part: Int64, excess_ms: float) -> tuple[str, str, Place | None]:
    """Cause, source and line of a longer wait for data; where it may hold what comes behind the fetch, too, a line of
    Python at which the rank works, not one at which it waits for its loader, is the cause itself."""
    line = line_of(case, part, "data_wait", excess_ms)
    if not case.steps.loader_alone(part) and line.place is not None and not line.waits:
        return "python", f"the time before the forward pass in every step; {line.source}", line.place
    return "data", f"the wait for data in every step; {line.source}", line.place


def ms_per_token(case: Case) -> float | None:
    """Milliseconds that a token more makes a rank's work longer, where tokens tell it from its peers'."""
    steps = case.steps
    if steps.tokens is None:
        return None
    pairs = []
    if steps.compute is not None:
        pairs.append((steps.compute, steps.tokens[steps.windows]))
    if "forward" in steps.phases:
        some = case.rows[:: max(len(case.rows) // 500, 1)]
        pairs.append((steps.phases["forward"][some], steps.tokens[some]))
    for work, tokens in pairs:
        y, x = beyond(work, case.layout), beyond(tokens, case.layout)
        known = np.isfinite(x) & np.isfinite(y)
        if known.sum() < 2 * at.MIN_STEPS:
            continue
        x, y = x[known].astype(np.float64), y[known].astype(np.float64)
        x, y = x - x.mean(), y - y.mean()
        both = float((x**2).sum()) * float((y**2).sum())
        if both > 0 and float((x * y).sum()) ** 2 / both >= at.TOKENS_FIT and (x * y).sum() > 0:
            return float((x * y).sum() / (x**2).sum())
    return None


def cause_of(case: Case, part: Int64, excess_ms: float, per_token_ms: float | None) -> Cause:
    """What makes ranks late by so much in a mean step: what is half of it at least.

    Args:
        per_token_ms: what a token more makes the rank's work longer; None where tokens do not tell it.
    """
    need = at.PART_OF_EXCESS * excess_ms
    phases, gc, compute, retries = _parts(case, part, excess_ms)
    named = (*phases.items(), ("collections", gc), ("device work", compute))
    evidence = tuple(
        Evidence(f"{name.replace('_', ' ')} beyond the peers'", round(value, 3), "ms per step", STEPS_SOURCE)
        for name, value in named
        if value is not None and abs(value) >= at.LINE_PART * excess_ms
    )
    data, device = phases.pop("data_wait", 0.0), compute or 0.0
    if gc is not None and gc >= need:
        return "gc", "Python's collections, recorded in every step", None, evidence
    if retries >= need:
        return "memory", "retries of the allocator, with their lengths", None, evidence
    # device work that takes longer shows in the host's phases, too, where the host waits for it
    shared = _others_at_work(case, part) if device < need and len(part) > 1 else ()
    if shared:  # all of a host: what its ranks share comes before what each does
        source = "its ranks take longer while more of its processors are in use"
        return "other_processes", source, None, evidence + shared
    if data >= need:
        return *of_data(case, part, data), evidence
    if per_token_ms is not None and (_mean(case, part, case.steps.tokens, steady=True) or 0) * per_token_ms >= need:
        return "sequence_length", "tokens of its batches", None, evidence
    if device >= need:
        return _of_device(case, part, evidence)
    if sum(phases.values()) >= need:
        return _of_host(case, part, phases, need, evidence)
    return "unknown", "nothing that was recorded explains it", None, evidence


def _mean(case: Case, part: Int64, values: Matrix | None, *, steady: bool) -> float | None:
    """What these ranks have beyond their peers in a mean step."""
    values = values[case.rows] if steady and values is not None else values
    if values is None or not len(values):
        return None
    more = beyond(values, case.layout, part)
    return float(np.nanmean(more)) if np.isfinite(more).any() else None


def _parts(case: Case, part: Int64, excess_ms: float) -> tuple[dict[str, float], float | None, float | None, float]:
    """Milliseconds beyond the peers in a mean step: phases of the host, collections, device work, retries."""
    steps = case.steps
    phases = {name: _mean(case, part, values, steady=True) or 0.0 for name, values in steps.phases.items()}
    gc, compute = _mean(case, part, steps.gc, steady=True), _mean(case, part, steps.compute, steady=False)
    if gc and not case.layout.waits_inside:
        # collections run inside the phases; which is not known: those that are beyond share them
        more = {name: value for name, value in phases.items() if value > 0}
        total = sum(more.values())
        phases.update({name: value - min(gc, total) * value / total for name, value in more.items()})
    told = events(case.reduced, "retry")
    kept, _, column = cells(told, steps.numbers[case.rows], case.layout)
    retries = float(told["ms"].to_numpy()[kept][np.isin(column, part)].sum() / len(case.rows) / len(part))
    if case.has_pieces:  # what windows show beyond all that is the host's, inside passes
        rest = excess_ms - sum(phases.values()) - (compute or 0.0) - (gc or 0.0) - retries
        phases["passes"] = max(rest, 0.0)
    return phases, gc, compute, retries


def _of_device(case: Case, part: Int64, evidence: tuple[Evidence, ...]) -> Cause:
    ours = case.layout.ranks[part].tolist()
    told = (pl.col("metric") == "gpu_sm_clock_mhz") & pl.col("mean").is_finite() & (pl.col("mean") > 0)
    asked = pl.col("rank").is_in([*ours, *_some_peers(case, part)])
    rows = case.reduced.scan("telemetry").filter(told & asked).select("rank", "mean").collect()
    own = rows["rank"].is_in(ours)
    mine, usual = rows.filter(own)["mean"].mean(), rows.filter(~own)["mean"].median()
    if not isinstance(mine, float) or not isinstance(usual, float):
        return "unknown", "its device works longer; clocks were not recorded", None, evidence
    evidence += (
        Evidence("device clock", round(mine), "MHz", "telemetry"),
        Evidence("device clock of its peers", round(usual), "MHz", "telemetry"),
    )
    if mine < (1 - at.CLOCK_DROP / 2) * usual:
        return "clock", "device work in windows, and the device's clock in telemetry", None, evidence
    return "compute", "device work in windows, at the clock of its peers", None, evidence


def _of_host(case: Case, part: Int64, host: dict[str, float], need: float, evidence: tuple[Evidence, ...]) -> Cause:
    phase = max(host, key=lambda name: host[name])
    shared = _others_at_work(case, part)
    if shared:
        source = f"{phase} takes longer while more of its host's processors are in use"
        return "other_processes", source, None, evidence + shared
    if host[phase] < need:
        return "unknown", "several phases take longer on the host, none of them most of it", None, evidence
    line = line_of(case, part, None if phase == "passes" else phase, host[phase])
    if line.place is None or line.in_layers:
        where = " inside PyTorch's own layers" if line.in_layers else ""
        return "unknown", f"{phase} takes longer on the host{where}; {line.source}", line.place, evidence
    return "python", f"{phase} in every step; {line.source}", line.place, evidence


def _others_at_work(case: Case, part: Int64) -> tuple[Evidence, ...]:
    """That more processors are in use on the host of these ranks than on others; empty where it is not so."""
    names = [case.layout.hosts[host] for host in np.unique(case.layout.host[part])]
    told = (pl.col("metric") == "busy_cores") & pl.col("rank").is_null() & pl.col("mean").is_finite()
    rows = case.reduced.scan("telemetry").filter(told).group_by("host").agg(pl.col("mean").mean()).collect()
    own = rows["host"].is_in(names)
    mine, usual = rows.filter(own)["mean"].median(), rows.filter(~own)["mean"].median()
    if not isinstance(mine, float) or not isinstance(usual, float) or mine <= usual * (1 + at.BUSY_CORES) + 1:
        return ()
    return (
        Evidence("processors in use on its host", round(mine, 1), "cores", "telemetry"),
        Evidence("processors in use on other hosts", round(usual, 1), "cores", "telemetry"),
    )
