"""What each rank does itself in each step, beside its peers: matrices of steps x ranks, in milliseconds.

In synchronous training all ranks' steps are equally long, so who is late shows in what it does before it waits: the
host's phases of every step that hold no exchange, and in windows the devices' own work.

`rank_maps`: how much longer each rank works than its peers, along the run.
"""

from __future__ import annotations

from collections import Counter
from threading import Lock

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct

from stepscope.analyze.context import Context
from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.durations import own_together
from stepscope.analyze.ranks.layout import Layout, layout_of
from stepscope.model.machine import RanksFacts
from stepscope.model.ranks import RankMap
from stepscope.tables.arrays import Bools, Floats, Int64
from stepscope.tables.reduced import LABELS, STEPS_OF_BLOCK, Index, Reduced
from stepscope.workers import side_by_side

Matrix = npt.NDArray[np.float32]  # steps x ranks

PHASES = ("data_wait", "before_forward", "forward", "backward", "optimizer", "other")
_ASSUMED = ("backward", "optimizer", "other")  # where nobody knows in which phases ranks wait for each other
MAX_NS = 3_600_000_000_000  # an hour in one piece of work or one call is damage
_STEADY, _WINDOW = LABELS.index("steady"), LABELS.index("window")
_COUNTS = pl.col("label").is_in([_STEADY, _WINDOW]) & (pl.col("wall_us") > 0)


class Steps(Struct, frozen=True):
    """Steps that count, in order: steady ones, and those of windows. NaN where nothing was recorded."""

    numbers: Int64
    start_us: Floats  # by step, of the first host that has it
    ahead_us: dict[str, float]  # by host: its clock before the first one's, as steps begin together but for their waits
    windowed: Bools  # by step
    wall: Matrix
    own: Matrix  # the host's phases without exchange, together
    phases: dict[str, Matrix]  # of them
    gc: Matrix | None  # inside the phases
    tokens: Matrix | None
    compute: Matrix | None  # rows: those of `windows`
    windows: Int64  # positions of steps of windows in which `compute` is known of some rank
    waits_inside: bool  # ranks wait for each other several times a step: then their work does not add up to its end

    def loader_alone(self, part: Int64) -> bool:
        """Whether what lies between the fetch and the forward pass of these ranks is known apart from the wait."""
        before = self.phases.get("before_forward")
        return before is not None and bool(np.isfinite(before[:, part]).any())

    @property
    def steady(self) -> Int64:
        return np.flatnonzero(~self.windowed)


def own_steps(reduced: Reduced, layout: Layout) -> Steps:
    exchange = _exchange(reduced, layout)
    own = [phase for phase in PHASES if phase not in exchange]
    columns = {phase: f"{phase}_us" for phase in own} | {"gc": "gc_us", "compute": "compute_us", "tokens": "tokens"}
    hosts = [host for host in reduced.hosts if host.tables["steps"].rows]
    numbers = _numbers(reduced, len(layout.ranks))
    start, wall = np.full(len(numbers), np.nan), np.full((len(numbers), len(layout.ranks)), np.nan, np.float32)
    made, told = _read(reduced, hosts, layout, numbers, {**columns, "collective": "collective_us"}, wall)
    ahead_us: dict[str, float] = {}
    windowed = np.zeros(len(numbers), np.int64)  # ranks of whose windows a step was, less those of whose it was not
    for host, (row, begun, in_window) in zip(hosts, told, strict=True):
        known = begun.is_not_null().to_numpy()
        told_us = begun.drop_nulls().to_numpy().astype(np.float64)
        before = told_us - start[row[known]]
        first = ~np.isfinite(before)  # no host told yet when these began
        start[row[known][first]] = told_us[first]
        ahead_us[host.host] = float(np.median(before[~first])) if not first.all() else 0.0
        np.add.at(windowed, row, np.where(in_window, 1, -1))
    if "compute" not in made:
        made |= _of_passes(reduced, layout, numbers)
    phases = {phase: made[phase] for phase in own if phase in made}
    total = np.full_like(wall, np.nan)
    for phase in phases.values():  # a rank without a loader has no wait for data: what is known of each is added
        np.copyto(total, np.where(np.isfinite(total), total + np.nan_to_num(phase), phase))
    if "gc" in made and layout.waits_inside and phases:
        total += np.nan_to_num(made["gc"])  # it falls into the phases that are left out
    np.minimum(total, wall, out=total)
    if "compute" not in made and "collective" in made:  # what is neither spent in collectives nor by the host before
        made["compute"] = np.maximum(wall - made["collective"] - np.nan_to_num(total), np.float32(0))
    compute, windows = made.get("compute"), np.zeros(0, np.int64)
    if compute is not None:
        windows = np.flatnonzero(np.isfinite(compute).any(axis=1))
        compute = compute[windows]
    return Steps(
        numbers, start, ahead_us, windowed > 0, wall, total, phases, made.get("gc"), made.get("tokens"), compute,
        windows, "forward" in exchange,
    )  # fmt: skip


def _read(
    reduced: Reduced, hosts: list[Index], layout: Layout, numbers: Int64, columns: dict[str, str], wall: Matrix
) -> tuple[dict[str, Matrix], list[tuple[Int64, pl.Series, Bools]]]:
    """Columns of the tables of steps as matrices, those that are known of any rank, `wall` filled in along with them.

    And of each host the positions of its steps, when they began, and which are of windows.
    """
    made: dict[str, Matrix] = {}
    new = Lock()

    def fill(host: Index) -> tuple[Int64, pl.Series, Bools]:
        """Ranks are columns, and no rank is of two hosts: no cell is written twice."""
        frame = reduced.part("steps", host).filter(_COUNTS)
        rows = frame.select("rank", "step", "start_us", "wall_us", "label", *columns.values()).collect()
        kept, row, column = cells(rows, numbers, layout)
        rows = rows.filter(pl.Series(kept))
        walls = rows["wall_us"].cast(pl.Float32).to_numpy() / np.float32(1000)
        wall[row, column] = walls
        for name, source in columns.items():
            values = rows[source]
            if values.null_count() == len(values):
                continue
            with new:
                if name not in made:
                    made[name] = np.full_like(wall, np.nan)
            told = values.cast(pl.Float32).fill_null(np.nan).to_numpy()
            # a part of a step is no longer than it
            made[name][row, column] = told if name == "tokens" else np.minimum(told / np.float32(1000), walls)
        return row, rows["start_us"], rows["label"].to_numpy() == _WINDOW

    return made, side_by_side(fill, hosts)


def _numbers(reduced: Reduced, ranks: int) -> Int64:
    """The steps to judge: all, or blocks over the whole run where there are too many."""
    counted = reduced.scan("steps").filter(_COUNTS & (pl.col("step") >= 0))
    numbers = counted.select(pl.col("step").unique().sort()).collect()["step"].to_numpy().astype(np.int64)
    every = -(-len(numbers) // max(at.MAX_CELLS // max(ranks, 1), at.MIN_STEPS))
    kept: Int64 = numbers[(np.arange(len(numbers)) // STEPS_OF_BLOCK) % max(every, 1) == 0]
    return kept


def _of_passes(reduced: Reduced, layout: Layout, numbers: Int64) -> dict[str, Matrix]:
    """What windows tell of passes and the optimizer as `compute`, where no device slices were added up."""
    spent = pl.col("end_ns") - pl.col("start_ns")
    computed = pl.col("kind").is_in(["forward", "backward", "optimizer"]) & spent.is_between(0, MAX_NS)
    work = reduced.scan("work").filter(computed).group_by("rank", "step").agg(ms=spent.sum() / 1e6).collect()
    found = matrix(work, "ms", numbers, layout)
    return {"compute": found} if np.isfinite(found).any() else {}


def _exchange(reduced: Reduced, layout: Layout) -> tuple[str, ...]:
    """The phases in which ranks wait for each other, as most of them say.

    Stages of a pipeline and tensor slots wait for each other inside all their passes; where nobody tells it, it is
    taken that gradients are exchanged after the forward pass.
    """
    if layout.waits_inside:
        return ("forward", *_ASSUMED)
    said = Counter(rank.exchange for host in reduced.hosts for rank in host.ranks if rank.exchange is not None)
    return said.most_common(1)[0][0] if said else _ASSUMED


def cells(frame: pl.DataFrame, numbers: Int64, layout: Layout) -> tuple[Bools, Int64, Int64]:
    """Which rows of a frame (`rank`, `step`) are of these steps and of recorded ranks, and their positions there."""
    if not len(numbers):
        return np.zeros(len(frame), np.bool_), np.zeros(0, np.int64), np.zeros(0, np.int64)
    step, column = frame["step"].to_numpy(), layout.at(frame["rank"].cast(pl.Int64).fill_null(-1).to_numpy())
    row = np.minimum(np.searchsorted(numbers, step), len(numbers) - 1)
    kept = (numbers[row] == step) & (column >= 0)
    return kept, row[kept], column[kept]


def matrix(frame: pl.DataFrame, value: str, numbers: Int64, layout: Layout) -> Matrix:
    """One column of a frame (`rank`, `step`) as steps x ranks; NaN where it has no row."""
    found = np.full((len(numbers), len(layout.ranks)), np.nan, np.float32)
    kept, row, column = cells(frame, numbers, layout)
    found[row, column] = frame[value].to_numpy()[kept]
    return found


def middle(values: Matrix) -> Matrix:
    """The lower median of each row, NaN left out: of two ranks the shorter, so one that is late stands out of any."""
    count = np.isfinite(values).sum(axis=1)
    row = np.maximum(count - 1, 0) // 2
    if len(values) and (count == values.shape[1]).all():
        return np.partition(values, int(row[0]), axis=1)[:, int(row[0])]
    ordered = np.sort(values, axis=1)  # NaN last
    return ordered[np.arange(len(values)), row] if values.shape[1] else np.full(len(values), np.nan, np.float32)


def beyond(values: Matrix, layout: Layout, columns: Int64 | None = None) -> Matrix:
    """What each has beyond the middle one of its peers in the same step.

    Args:
        columns: the ranks asked for, each beside 32 of its peers at most; all where it is left out.
    """
    groups = layout.peer_groups()
    if columns is None and len(groups) == 1 and values.shape[1] != 2:
        return values - middle(values)[:, None]
    wanted = np.arange(values.shape[1]) if columns is None else columns
    place = np.full(values.shape[1], -1)
    place[wanted] = np.arange(len(wanted))
    excess = np.full((len(values), len(wanted)), np.nan, values.dtype)  # alone, nothing tells what is usual
    for group in groups:
        here = place[group]
        here = here[here >= 0]
        if len(group) < 2 or not len(here):
            continue
        mine = wanted[here]
        if len(group) == 2:  # beside the shorter of both, noise alone would make both late
            usual = values[:, group.sum() - mine]
        else:
            usual = middle(values[:, group if columns is None else group[:: -(-len(group) // 33)]])[:, None]
        excess[:, here] = values[:, mine] - usual
    return excess


def block_means(values: Matrix, blocks: int) -> Matrix:
    """Means of `blocks` parts of the steps, NaN left out; shape (blocks, ranks)."""
    edges = np.unique(np.linspace(0, len(values), min(blocks, len(values)) + 1).astype(np.int64))[:-1]
    if not len(edges):
        return np.zeros((0, values.shape[1]), np.float32)
    known = np.isfinite(values)
    sums = np.add.reduceat(np.where(known, values, 0), edges, axis=0, dtype=np.float64)
    counts = np.add.reduceat(known, edges, axis=0, dtype=np.int64)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (sums / np.where(counts, counts, np.nan)).astype(np.float32)


COLUMNS = 80  # wide enough to be pointed at on a screen; a file of a thousand ranks stays small
_TITLES = {"host": "Work of the host in every step", "device": "Work of the device in windows"}
_SOURCE = "phases in which no rank waits for another ({}), steady steps"


def rank_maps(reduced: Reduced) -> tuple[RankMap, ...]:
    """The map of every step, by what hosts recorded, and that of windows, by their devices; those that there are."""
    layout = layout_of(reduced)
    steps = own_steps(reduced, layout)
    hosts = [layout.hosts[host] for host in layout.host.tolist()]
    known = layout.stages > 0 and bool((layout.pp >= 0).all())
    rows = layout.ranks.tolist(), hosts, layout.pp.tolist() if known else None
    counted = steps.steady if len(steps.steady) else steps.windows
    notable_ms = at.LEAST_SHARE * float(np.nanmean(steps.wall[counted])) if len(counted) else None
    parts = []
    if len(steps.steady) and steps.phases:
        source = _SOURCE.format(", ".join(steps.phases).replace("_", " "))
        parts.append(("host", source, steps.steady, steps.own[steps.steady]))
    if steps.compute is not None and len(steps.windows):
        parts.append(("device", "device slices of windows", steps.windows, steps.compute))
    return tuple(
        _map(of, source, rows, steps.numbers[chosen], beyond(values, layout), notable_ms)
        for of, source, chosen, values in parts
    )


def map_of_steps(context: Context, facts: RanksFacts | None) -> tuple[RankMap, ...]:
    """The same of ranks that were all read in full: the map of every step, where their steps stand side by side."""
    if facts is None:
        return ()
    numbers, own = own_together(context.labelled, facts.exchange)
    values = own.T.astype(np.float32)
    host_of = {rank.rank: rank.host or "" for rank in context.tables.ranks}
    ranks = [work.rank for work in facts.ranks]
    phases = ", ".join(facts.excess_by_phase_ms).replace("_", " ")
    rows = ranks, [host_of.get(rank, "") for rank in ranks], None
    notable_ms = at.LEAST_SHARE * sum(work.wall_ms for work in facts.ranks) / len(facts.ranks)
    return (_map("host", _SOURCE.format(phases), rows, numbers, values - middle(values)[:, None], notable_ms),)


_Rows = tuple[list[int], list[str], list[int] | None]  # number, host and stage of each rank


def _map(of: str, source: str, rows: _Rows, numbers: Int64, values: Matrix, notable_ms: float | None) -> RankMap:
    edges = np.unique(np.linspace(0, len(values), min(COLUMNS, len(values)) + 1).astype(np.int64))[:-1]
    rounded = np.round(block_means(values, COLUMNS).T.astype(np.float64), 3)
    cells = [[None if cell != cell else cell for cell in row] for row in rounded.tolist()]
    ranks, hosts, stages = rows
    return RankMap(
        of=of,
        title=_TITLES[of],
        source=source,
        ranks=tuple(ranks),
        hosts=tuple(hosts),
        stages=None if stages is None else tuple(stages),
        steps=tuple(numbers[edges].tolist()),
        excess_ms=tuple(map(tuple, cells)),
        notable_ms=notable_ms,
    )
