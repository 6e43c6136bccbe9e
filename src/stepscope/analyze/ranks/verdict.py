"""The verdict over a run's ranks, from its reduced tables alone."""

from __future__ import annotations

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from stepscope.analyze.ranks import cost
from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.arrivals import Arrivals, arrivals
from stepscope.analyze.ranks.causes import STEPS_SOURCE, Parts, Recorded, cause_of
from stepscope.analyze.ranks.imbalance import heavy_stages, uneven_batches
from stepscope.analyze.ranks.layout import Layout, layout_of
from stepscope.analyze.ranks.links import slow_links
from stepscope.analyze.ranks.own_work import Matrix, Steps, beyond, middle, own_steps
from stepscope.analyze.ranks.pipeline import Pipelines, pipelines
from stepscope.analyze.ranks.stragglers import (
    Rotating,
    late_ranks,
    lateness,
    rotating,
    spikes,
    together,
    with_host_mates,
)
from stepscope.model.findings import Evidence
from stepscope.model.ranks import NONE, NOT_ENOUGH, RanksVerdict, Straggler
from stepscope.tables.arrays import Floats, Int64
from stepscope.tables.reduced import Reduced


class Case(Struct, frozen=True):
    """All that is looked at. `host`: beyond the peers on the host, steady steps; `device`: with devices, in windows."""

    reduced: Reduced
    layout: Layout
    steps: Steps
    rows: Int64  # of steps that are judged
    host: Matrix
    device: Matrix | None  # rows: those of `steps.windows`
    host_in_windows: Matrix  # `host` of these
    arrivals: Arrivals | None
    recorded: Recorded
    step_ms: float
    pipes: Pipelines | None


class Draft(Struct, frozen=True):
    """A straggler of fixed ranks before its cause is known."""

    part: Int64
    excess_ms: float
    in_windows: bool  # seen in windows alone


def judge(reduced: Reduced) -> RanksVerdict:
    layout = layout_of(reduced)
    steps = own_steps(reduced, layout)
    steady = steps.steady
    rows = steady if len(steady) >= at.MIN_STEPS else np.arange(len(steps.numbers))
    present = int(np.isfinite(steps.wall[rows]).any(axis=0).sum()) if len(rows) else 0
    empty = RanksVerdict(
        NOT_ENOUGH, "", (), present, reduced.world_size, reduced.missing, len(steady), len(steps.windows),
        None, None, layout.text,
    )  # fmt: skip
    if present < at.MIN_RANKS:
        return replace(empty, reason=f"{present} rank has steps that count, at least {at.MIN_RANKS} are needed")
    step_ms = float(np.nanmean(middle(steps.wall[rows])))
    empty = replace(empty, step_ms=step_ms)
    if len(rows) < at.MIN_STEPS:
        return replace(empty, reason=f"{len(rows)} steps count, at least {at.MIN_STEPS} are needed")
    recorded = Recorded(reduced, layout)
    host = _with_retries(beyond(steps.own[rows], layout), rows, steps, recorded)
    found = arrivals(reduced, layout)
    in_windows = beyond(steps.own[steps.windows], layout)
    device, pipes = _device(steps, layout), pipelines(reduced, layout, steps)
    case = Case(reduced, layout, steps, rows, host, device, in_windows, found, recorded, step_ms, pipes)
    return _verdict(case, replace(empty, slowdown=_slowdown(case)))


def _slowdown(case: Case) -> float | None:
    if case.pipes is not None:
        lasted, lost = float(case.pipes.play().mean()), float(case.pipes.beyond_ideal().mean())
    elif case.layout.stages > 1:
        return None
    else:
        excess = case.host if case.device is None else case.device
        excess = excess[np.isfinite(excess).any(axis=1)]
        if not len(excess):
            return None
        lasted, lost = case.step_ms, float((cost.latest(excess) - np.nanmean(excess, axis=1)).mean())
    return lasted / (lasted - lost) if lost < lasted else None


def _device(steps: Steps, layout: Layout) -> Matrix | None:
    """In windows: the host's and the device's work together beyond the peers'."""
    if steps.compute is None:
        return None
    compute = beyond(steps.compute, layout)
    own = steps.own[steps.windows]
    forward = steps.phases.get("forward")
    if forward is not None:
        # the host waits for its device in it, or it does not: the longer of both is what delays
        compute = np.fmax(compute, beyond(forward[steps.windows], layout))
        own = own - forward[steps.windows]
    return compute + np.nan_to_num(beyond(own, layout))


def _with_retries(excess: Matrix, rows: Int64, steps: Steps, recorded: Recorded) -> Matrix:
    """Retries of the allocator are a rank's own work in whatever phase."""
    events = recorded.events("retry")
    if events.height:
        row, column, ms = _cells(events, steps.numbers[rows])
        np.maximum.at(excess, (row, column), ms.astype(np.float32))
    return excess


def _cells(events: object, numbers: Int64) -> tuple[Int64, Int64, Floats]:
    """Positions (step, rank) and lengths of events in these steps."""
    import polars as pl

    assert isinstance(events, pl.DataFrame)
    step = events["step"].to_numpy()
    row = np.minimum(np.searchsorted(numbers, step), len(numbers) - 1)
    kept = numbers[row] == step
    return row[kept], events["column"].to_numpy()[kept], events["ms"].to_numpy()[kept]


def _verdict(case: Case, empty: RanksVerdict) -> RanksVerdict:
    stragglers: list[Straggler] = list(_checkpoints(case))
    known = {rank for one in stragglers for rank in one.ranks}
    on_host = lateness(case.host, case.step_ms)
    in_windows = None if case.device is None else lateness(case.device, case.step_ms)
    drafts = _fixed(case)
    late = np.unique(np.concatenate([np.zeros(0, np.int64), *(draft.part for draft in drafts)])).astype(np.int64)
    for draft in drafts:
        if not set(case.layout.ranks[draft.part].tolist()) <= known:
            stragglers.append(_straggler(case, draft, late))
    stragglers += _rotating(case, late)
    stragglers += _together(case)
    stragglers += _stages(case)
    stragglers += _links(case)
    least_cost = at.LEAST_STEADY_SHARE / 2 * case.step_ms
    stragglers = sorted((one for one in stragglers if one.cost_ms >= least_cost), key=lambda one: -one.cost_ms)
    stragglers = stragglers[: at.MAX_STRAGGLERS]
    least = max(one.least(case.step_ms) for one in (on_host, in_windows) if one is not None)
    verdict = replace(
        empty,
        verdict=stragglers[0].kind if stragglers else NONE,
        stragglers=tuple(stragglers),
        least_ms=least,
        suspects=_suspects(case, stragglers),
    )
    if stragglers:
        return replace(verdict, reason=_sentence(stragglers[0], case))
    need = _needed(case)
    if need:
        return replace(verdict, verdict=NOT_ENOUGH, reason=need)
    text = f"no rank, host or group keeps the others waiting by {least:.3g} ms of {case.step_ms:.4g} ms a step"
    absent = len(case.reduced.missing or ())
    if absent:
        text += f"; of {absent} rank{'s' if absent > 1 else ''} nothing was recorded"
    return replace(verdict, reason=text)


def _needed(case: Case) -> str:
    """What is missing to say that nobody is late; empty where nothing is."""
    layout = case.layout
    if layout.waits_inside and (case.device is None or len(case.steps.windows) < at.MIN_WINDOWED):
        return (
            "stages and tensor slots wait for each other inside their phases, and too few windows tell their own work"
        )
    if case.device is None and not np.isfinite(case.host).any():
        return "neither phases of the host nor the work of devices were recorded"
    judged = np.isfinite(case.host).any(axis=0)
    if case.device is not None:
        judged |= np.isfinite(case.device).any(axis=0)
    # a place is a rank's in the layout, as far as it is known: of some jobs one rank stands for its tensor group
    known = len(layout.dp) > 0 and (layout.dp >= 0).all()
    places = int(layout.dp.max() + 1) * max(layout.stages, 1) * max(layout.slots, 1) if known else None
    places = places if places is not None else case.reduced.world_size or len(layout.ranks)
    if judged.sum() < (1 - at.MISSING_SHARE) * places:
        return f"{int(judged.sum())} of {places} ranks could be laid beside peers, too few to say that none is late"
    return ""


def _fixed(case: Case) -> list[Draft]:
    """Ranks and hosts that keep being late, by every step or by windows."""
    on_host = lateness(case.host, case.step_ms)
    late = late_ranks(case.host, on_host, case.step_ms)
    mean = np.nan_to_num(on_host.mean)
    seen_in_windows = np.zeros(0, np.int64)
    if case.device is not None and len(case.device):
        windows = lateness(case.device, case.step_ms)
        seen_in_windows = np.setdiff1d(late_ranks(case.device, windows, case.step_ms), late)
        # the device's part comes on top of what every step shows of the host
        mean = np.maximum(
            mean, np.where(np.isin(np.arange(len(mean)), seen_in_windows), np.nan_to_num(windows.mean), 0)
        )
    both = np.union1d(late, seen_in_windows).astype(np.int64)
    if not len(both):
        return []
    drafts = []
    for part in with_host_mates(both, mean, case.layout):
        hidden = _hidden(case, part)
        if hidden < 1:
            in_windows = not np.isin(part, late).any()
            drafts.append(Draft(part, float(np.mean(mean[part])) * (1 - hidden), in_windows))
    return drafts


HIDDEN = 0.25  # of what a rank does longer must show in its arrivals, or the device's queue hides it


def _hidden(case: Case, part: Int64) -> float:
    """1 where windows show that these ranks come to collectives no later for it: what they do is hidden, else 0."""
    if case.arrivals is None or case.layout.waits_inside:
        return 0.0
    at_windows = np.flatnonzero(np.isin(case.steps.numbers, case.arrivals.numbers))
    row = np.searchsorted(case.arrivals.numbers, case.steps.numbers[at_windows])
    if not len(row):
        return 0.0
    excess = beyond(case.steps.own[at_windows], case.layout, part)
    if case.device is not None:
        in_windows = np.flatnonzero(np.isin(case.steps.windows, at_windows))
        if len(in_windows) == len(at_windows):
            excess = case.device[in_windows][:, part]
    own = float(np.nanmean(excess)) if np.isfinite(excess).any() else 0.0
    late = case.arrivals.late[row][:, part]
    if own < at.LEAST_STEADY_SHARE * case.step_ms or not np.isfinite(late).any():
        return 0.0
    return 1.0 if float(np.nanmean(late)) < HIDDEN * own else 0.0


def _straggler(case: Case, draft: Draft, late: Int64) -> Straggler:
    part, steps = draft.part, case.steps
    excess = case.device if draft.in_windows and case.device is not None else case.host
    lost = float(cost.of_ranks(excess, part, late).mean())
    played = None if case.pipes is None else case.pipes.without(part, late)
    if played is not None and draft.in_windows:
        lost = float(played.mean())
    elif excess is case.host and case.device is not None:
        shown = cost.of_ranks(case.host_in_windows, part, late)
        lost *= _in_earnest(shown, cost.of_ranks(case.device, part, late) if played is None else played)
    last = np.nanmax(np.where(np.isfinite(excess), excess, -np.inf), axis=1)
    came_last = np.nanmax(np.where(np.isfinite(excess[:, part]), excess[:, part], -np.inf), axis=1) >= last
    parts = _parts(case, part, draft)
    cause = cause_of(part, parts, case.recorded, case.layout, case.step_ms)
    ranks = case.layout.ranks[part]
    hosts = sorted({case.layout.hosts[host] for host in case.layout.host[part]})
    kind = "host" if len(part) > 1 else "rank"
    evidence = (
        Evidence("own work beyond the peers'", round(draft.excess_ms, 3), "ms per step",
                 f"{len(excess)} steps of windows" if draft.in_windows else f"{len(steps.steady)} steady steps"),
        *cause.evidence,
    )  # fmt: skip
    return Straggler(
        kind=kind,
        ranks=tuple(ranks.tolist()),
        hosts=tuple(hosts),
        cause=cause.name,
        cause_source=cause.source,
        cost_ms=lost,
        excess_ms=draft.excess_ms,
        share_of_steps=float(came_last.mean()),
        peers=case.layout.peers_text,
        place=cause.place,
        evidence=evidence,
    )


def _in_earnest(shown: Floats, played: Floats) -> float:
    """What is lost by host and device together, by what the host alone shows: its work is not all that varies."""
    alone, both = float(shown.mean()), float(played.mean())
    return min(max(both / alone, 0.0), 1.0) if alone > 0 else 1.0


def _parts(case: Case, part: Int64, draft: Draft) -> Parts:
    """What these ranks do longer than their peers, by what was recorded, in a mean step."""

    def mean(values: Matrix | None) -> float | None:
        if values is None or not len(values):
            return None
        more = beyond(values, case.layout, part)
        return float(np.nanmean(more)) if np.isfinite(more).any() else None

    steps, rows = case.steps, case.rows
    phases = {name: mean(values[rows]) or 0.0 for name, values in steps.phases.items()}
    gc = None if steps.gc is None else mean(steps.gc[rows])
    compute = mean(steps.compute)
    if gc and not case.layout.waits_inside:
        # collections run inside the phases; which is not known: those that are beyond share them
        more = {name: value for name, value in phases.items() if value > 0}
        total = sum(more.values())
        phases.update({name: value - min(gc, total) * value / total for name, value in more.items()})
    retries = 0.0
    events = case.recorded.events("retry")
    if events.height:
        _, column, ms = _cells(events, steps.numbers[rows])
        retries = float(ms[np.isin(column, part)].sum() / len(rows) / len(part))
    by_tokens = _by_tokens(case)
    tokens = None
    if by_tokens is not None and steps.tokens is not None:
        more_tokens = mean(steps.tokens[rows])
        tokens = None if more_tokens is None else more_tokens * by_tokens
    return Parts(phases, gc, compute, retries, tokens, draft.excess_ms)


def _by_tokens(case: Case) -> float | None:
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


def _checkpoints(case: Case) -> list[Straggler]:
    """Ranks that write checkpoints while the others wait: seldom and long, so their events tell it."""
    events = case.recorded.events("checkpoint")
    if events.is_empty():
        return []
    steps = case.steps.numbers[case.rows]
    row, column, ms = _cells(events, steps)
    if len(np.unique(row)) < at.GLOBAL_EVENTS:
        return []
    longest = np.zeros(len(steps))
    np.maximum.at(longest, row, ms)
    # all ranks have come when the last has written
    lost = float(longest.sum() / len(steps))
    if lost < at.LEAST_SHARE * case.step_ms:
        return []
    writing = np.bincount(column, weights=ms, minlength=len(case.layout.ranks))
    part = np.flatnonzero(writing >= at.HOST_PART * writing.max())
    ranks = case.layout.ranks[part][: at.MAX_STRAGGLERS]
    first = events.filter(events["file"].is_not_null() & events["line"].is_not_null()).head(1)
    from stepscope.model.findings import Place

    place = None if first.is_empty() else Place(first["file"][0], first["line"][0], first["function"][0])
    together_ = len(part) > len(case.layout.ranks) / 2
    return [
        Straggler(
            kind="global" if together_ else "rank",
            ranks=tuple(ranks.tolist()),
            hosts=tuple(sorted({case.layout.hosts[host] for host in case.layout.host[part]}))[: at.MAX_STRAGGLERS],
            cause="checkpoint",
            cause_source="checkpoints that were written, with their lengths",
            cost_ms=lost,
            excess_ms=float(np.median(longest[longest > 0])),
            share_of_steps=float((longest > 0).mean()),
            peers=case.layout.peers_text,
            place=place,
            evidence=(Evidence("checkpoints", len(np.unique(row)), "count", "events of reduced tables"),),
        )
    ]


_CAUSES = {"gc": "gc", "data_wait": "data"}


def _rotating(case: Case, late: Int64) -> list[Straggler]:
    steps, rows, layout = case.steps, case.rows, case.layout
    parts: list[tuple[str, Matrix]] = [] if steps.gc is None else [("gc", steps.gc[rows])]
    parts += [(name, values[rows]) for name, values in steps.phases.items()]
    found = []
    for one in rotating(parts, layout, late, case.step_ms):
        made = _of_spikes(case, one)
        if made is not None:
            found.append(made)
    sequence = _sequence(case, late)
    return [*found, *([] if sequence is None else [sequence])]


def _of_spikes(case: Case, one: Rotating) -> Straggler | None:
    layout = case.layout
    lost = float(cost.of_cells(case.host, one.spikes).mean())
    if case.device is not None:
        values = case.steps.gc if one.component == "gc" else case.steps.phases[one.component]
        assert values is not None
        cells = spikes(values[case.steps.windows], layout, at.LEAST_SHARE * case.step_ms / 2)
        lost *= _in_earnest(cost.of_cells(case.host_in_windows, cells), cost.of_cells(case.device, cells))
    if lost < at.LEAST_SHARE * case.step_ms:
        return None
    cause = _CAUSES.get(one.component, "unknown")
    ranks = one.ranks[: at.MAX_STRAGGLERS]
    part = one.ranks[:4]
    place = None
    source = {"gc": "Python's collections, recorded in every step", "data": "the wait for data in every step"}.get(
        cause, f"{one.component} takes longer on the host"
    )
    if cause != "gc":
        place, said = case.recorded.place(part, one.component, case.step_ms, lost / len(layout.ranks))
        if cause == "unknown" and place is not None:
            cause = "python"
        source = f"{source}; {said}"
    return Straggler(
        kind="rotating",
        ranks=tuple(layout.ranks[ranks].tolist()),
        hosts=tuple(sorted({layout.hosts[host] for host in layout.host[ranks]})),
        cause=cause,
        cause_source=source,
        cost_ms=lost,
        excess_ms=float(np.median(one.spikes.excess)),
        share_of_steps=one.share,
        peers=layout.peers_text,
        place=place,
        evidence=(
            Evidence("ranks that were late", len(one.ranks), "count", STEPS_SOURCE),
            Evidence("times a rank was late", len(one.spikes.row), "count", STEPS_SOURCE),
        ),
    )


def _sequence(case: Case, late: Int64) -> Straggler | None:
    """Batches of different lengths: the longest in a step makes all wait."""
    steps, layout = case.steps, case.layout
    if case.pipes is not None:
        return _uneven(case, case.pipes)
    if steps.tokens is None:
        return None
    per_token = _by_tokens(case)
    if per_token is None:
        return None
    tokens = steps.tokens[case.rows].copy()
    if len(late):
        tokens[:, late] = np.nan
    with np.errstate(invalid="ignore"):
        mean = np.nanmean(np.where(np.isfinite(tokens), tokens, np.nan), axis=1)
    most = np.where(np.isfinite(tokens), tokens, -np.inf).max(axis=1)
    known = np.isfinite(mean) & np.isfinite(most) & (mean > 0)
    if known.sum() < at.MIN_STEPS or float((most[known] / mean[known]).mean()) < 1 + at.TOKENS_SPREAD:
        return None
    lost = float((most[known] - mean[known]).mean()) * per_token
    if case.device is not None and len(case.device):
        # what of it is the maximum of other noise, too, windows tell: played with and without what tokens explain
        more = beyond(steps.tokens[steps.windows], layout) * np.float32(per_token)
        played = float((cost.latest(case.device) - cost.latest(case.device - more)).mean())
        at_windows = cost.latest(more)
        if at_windows.mean() > 0:
            lost *= min(max(played / float(at_windows.mean()), 0.0), 1.0)
    if lost < at.LEAST_SHARE * case.step_ms:
        return None
    longest = np.where(np.isfinite(tokens), tokens, -np.inf).argmax(axis=1)[known]
    times = np.bincount(longest, minlength=len(layout.ranks))
    if times.max() > at.ROTATING_ONE * times.sum():
        return None  # one rank's own: it is judged as a rank
    ranks = np.argsort(-times, kind="stable")[: min(at.MAX_STRAGGLERS, int((times > 0).sum()))]
    return Straggler(
        kind="rotating",
        ranks=tuple(layout.ranks[ranks].tolist()),
        hosts=tuple(sorted({layout.hosts[host] for host in layout.host[ranks]})),
        cause="sequence_length",
        cause_source="tokens of every step, and by how much more of them make a rank's work longer",
        cost_ms=lost,
        excess_ms=lost,
        share_of_steps=1.0,
        peers=layout.peers_text,
        evidence=(
            Evidence(
                "most tokens of a rank by their mean",
                round(float((most[known] / mean[known]).mean()), 3),
                "ratio",
                STEPS_SOURCE,
            ),
        ),
    )  # fmt: skip


def _uneven(case: Case, pipes: Pipelines) -> Straggler | None:
    found = uneven_batches(pipes, case.step_ms)
    if found is None:
        return None
    layout = case.layout
    first = np.flatnonzero(layout.pp == 0)
    stages = pipes.work.shape[2]
    by_replica = {int(pipes.worker[rank]) // stages: int(rank) for rank in first[::-1]}
    ranks = np.array([by_replica[row] for row in found.replicas.tolist() if row in by_replica][: at.MAX_STRAGGLERS])
    return Straggler(
        kind="rotating",
        ranks=tuple(layout.ranks[ranks].tolist()),
        hosts=tuple(sorted({layout.hosts[host] for host in layout.host[ranks]})),
        cause="sequence_length",
        cause_source="microbatches that are long on all stages, in both directions: what they hold makes them so",
        cost_ms=found.cost_ms,
        excess_ms=found.cost_ms,
        share_of_steps=1.0,
        peers="the other microbatches of the same steps",
        evidence=(
            Evidence("longest replica's batches by their mean", round(found.longest, 3), "ratio", "work of windows"),
            Evidence("part of the variance of passes that batches explain", round(found.explained, 3), "share",
                     "work of windows"),
        ),
    )  # fmt: skip


def _stages(case: Case) -> list[Straggler]:
    if case.steps.compute is None:
        return []
    layout = case.layout
    found = []
    for one in heavy_stages(case.steps.compute, layout, case.pipes, case.step_ms):
        ranks = np.flatnonzero(layout.pp == one.stage)
        source = "work of windows"
        found.append(
            Straggler(
                kind="stage",
                ranks=tuple(layout.ranks[ranks][: at.MAX_STRAGGLERS].tolist()),
                hosts=tuple(sorted({layout.hosts[host] for host in layout.host[ranks]}))[: at.MAX_STRAGGLERS],
                stage=one.stage,
                cause="stage",
                cause_source="the work of its middle worker in windows beside that of other stages"
                + ("" if len(np.unique(layout.dp)) > 1 else "; with one replica, a slow device would look the same"),
                cost_ms=one.cost_ms,
                excess_ms=one.own_ms - one.usual_ms,
                share_of_steps=one.share,
                peers="the other pipeline stages",
                evidence=(
                    Evidence("own work of the stage", round(one.own_ms, 3), "ms per step", source),
                    Evidence("mean own work of the other stages", round(one.usual_ms, 3), "ms per step", source),
                ),
            )
        )
    return found


def _links(case: Case) -> list[Straggler]:
    if case.arrivals is None:
        return []
    layout, found = case.layout, []
    for one in slow_links(case.arrivals.calls, layout, case.step_ms)[: at.MAX_STRAGGLERS]:
        lost = min(one.excess_ms, _idle_ms(case, one.members))
        ranks = one.members if one.host is None else one.members[layout.host[one.members] == one.host]
        hosts = sorted({layout.hosts[host] for host in layout.host[ranks]})
        found.append(
            Straggler(
                kind="link",
                ranks=tuple(layout.ranks[ranks][: at.MAX_STRAGGLERS].tolist()),
                hosts=tuple(hosts)[: at.MAX_STRAGGLERS],
                group=one.groups[0].id,
                cause="link",
                cause_source="the shortest stay of all members in each call, which is its transfer",
                cost_ms=lost,
                excess_ms=one.excess_ms,
                share_of_steps=one.share,
                peers=f"{one.alike} group{'s' if one.alike > 1 else ''} of the same kind and size",
                evidence=(
                    Evidence(f"transfers of {one.kind} by those of groups alike", round(one.ratio, 2), "ratio",
                             "collectives of windows"),
                    Evidence("slow groups", len(one.groups), "count", "collectives of windows"),
                ),
            )
        )  # fmt: skip
    return found


def _idle_ms(case: Case, members: Int64) -> float:
    """What of a mean step these ranks do not work: more than that no transfer can cost."""
    steps = case.steps
    if steps.compute is None or not len(members):
        return float("inf")
    idle = steps.wall[steps.windows][:, members] - steps.compute[:, members]
    return float(np.nanmean(idle)) if np.isfinite(idle).any() else float("inf")


def _together(case: Case) -> list[Straggler]:
    found = together(case.steps, case.rows, case.host)
    if found is None:
        return []
    layout, steps = case.layout, case.steps
    events = case.recorded.events("checkpoint")
    saved = np.isin(steps.numbers[found.rows], np.unique(events["step"].to_numpy())).mean() if events.height else 0.0
    usual = np.setdiff1d(case.rows, found.rows)
    cause, source = "unknown", "all ranks are slow in the same steps; nothing that was recorded explains it"
    data = steps.phases.get("data_wait")
    if saved >= at.PART_OF_EXCESS:
        cause, source = "checkpoint", "checkpoints in the same steps"
    elif data is not None and len(usual):
        # of the ranks that load at all: in a pipeline those of its first stage
        more = np.nanmedian(data[found.rows], axis=0) - np.nanmedian(data[usual[:2000]], axis=0)
        if np.nanmax(more) >= at.PART_OF_EXCESS * found.excess_ms:
            cause, source = "data", "all wait for data in the same steps: what they share is slow, as their storage"
    return [
        Straggler(
            kind="global",
            ranks=tuple(layout.ranks[: at.MAX_STRAGGLERS].tolist()),
            hosts=(),
            cause=cause,
            cause_source=source,
            cost_ms=found.extra_ms,
            excess_ms=found.excess_ms,
            share_of_steps=len(found.rows) / len(case.rows),
            peers="the same ranks in other steps",
            evidence=(Evidence("steps in which all were slow", len(found.rows), "count", STEPS_SOURCE),),
        )
    ]


def _suspects(case: Case, stragglers: list[Straggler]) -> tuple[int, ...]:
    """Late ranks, the first of each straggler first, and a peer or two of each."""
    layout, found = case.layout, []
    for one in stragglers:
        if one.kind == "global":
            continue
        part = layout.at(np.array(one.ranks[:4], np.int64))
        peers = np.setdiff1d(np.flatnonzero(np.isin(layout.peers, layout.peers[part])), layout.at(np.array(one.ranks)))
        found += [*one.ranks[:4], *layout.ranks[peers[:2]].tolist()]
    return tuple(dict.fromkeys(found))[: at.MAX_SUSPECTS]


def _sentence(first: Straggler, case: Case) -> str:
    who = {
        "rank": f"rank {first.ranks[0]}",
        "host": f"host {first.hosts[0] if first.hosts else ''}",
        "stage": f"pipeline stage {first.stage}",
        "link": "the transfers of a group",
        "rotating": "another rank in each step",
        "global": "all ranks together in some steps",
    }[first.kind]
    verb = "is slow" if first.kind == "global" else "keeps the others waiting"
    cause = first.cause.replace("_", " ")
    return f"{who} {verb} ({cause}): {first.cost_ms:.3g} of {case.step_ms:.4g} ms a step"
