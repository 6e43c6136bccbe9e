"""What each rank does itself in each step, beside its peers: matrices of steps x ranks, in milliseconds.

In synchronous training all ranks' steps are equally long, so who is late shows in what it does before it waits: the
host's phases of every step that hold no exchange, and in windows the devices' own work.
"""

from __future__ import annotations

from collections import Counter
from threading import Lock

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct

from stepscope.analyze.ranks import thresholds as at
from stepscope.analyze.ranks.layout import Layout
from stepscope.tables.arrays import Bools, Floats, Int64
from stepscope.tables.reduced import LABELS, STEPS_OF_BLOCK, Index, Reduced
from stepscope.workers import side_by_side

Matrix = npt.NDArray[np.float32]  # steps x ranks

PHASES = ("data_wait", "before_forward", "forward", "backward", "optimizer", "other")
_ASSUMED = ("backward", "optimizer", "other")  # where nobody knows in which phases ranks wait for each other
_COMPUTED = ("forward", "backward", "optimizer")  # kinds of `work`
_WAITS_INSIDE = ("forward", *_ASSUMED)
_MAX_NS = 3_600_000_000_000  # an hour in one piece is damage
_STEADY, _WINDOW = LABELS.index("steady"), LABELS.index("window")


class Steps(Struct, frozen=True):
    """Steps that count, in order: steady ones, and those of windows. NaN where nothing was recorded."""

    numbers: Int64
    start_us: Floats  # by step, of the first host that has it
    ahead_us: dict[
        str, float
    ]  # by host: its clock before that of the first, as steps begin together but for their waits
    windowed: Bools  # by step
    wall: Matrix
    own: Matrix  # the host's phases without exchange, together
    phases: dict[str, Matrix]  # of them
    gc: Matrix | None  # inside the phases
    tokens: Matrix | None
    compute: Matrix | None  # rows: those of `windows`
    by_slices: bool  # `compute` is of device slices; else of passes, which hold waits for tensor slots, or of the rest
    windows: Int64  # positions of steps of windows in which `compute` is known of some rank
    exchange: tuple[str, ...]
    exchange_source: str
    all_steps: int  # that could have been judged

    @property
    def waits_inside(self) -> bool:
        """Whether ranks wait for each other several times a step: then their work does not add up to its end."""
        return "forward" in self.exchange

    def loader_alone(self, part: Int64) -> bool:
        """Whether what lies between the fetch and the forward pass of these ranks is known apart from the wait."""
        before = self.phases.get("before_forward")
        return before is not None and bool(np.isfinite(before[:, part]).any())

    @property
    def steady(self) -> Int64:
        return np.flatnonzero(~self.windowed)


def own_steps(reduced: Reduced, layout: Layout) -> Steps:
    numbers, all_steps = _numbers(reduced, len(layout.ranks))
    exchange, source = _exchange(reduced, layout)
    own = [phase for phase in PHASES if phase not in exchange]
    columns = {phase: f"{phase}_us" for phase in own} | {"gc": "gc_us", "compute": "compute_us", "tokens": "tokens"}
    columns["collective"] = "collective_us"
    shape = len(numbers), len(layout.ranks)
    wall = np.full(shape, np.nan, np.float32)
    start = np.full(len(numbers), np.nan)
    ahead_us: dict[str, float] = {}
    windowed = np.zeros(len(numbers), np.int64)  # ranks of whose windows a step was, less those of whose it was not
    hosts = [host for host in reduced.hosts if host.tables["steps"].rows] if len(numbers) else []
    made: dict[str, Matrix] = {}
    new = Lock()

    def fill(host: Index) -> tuple[Int64, pl.Series, Bools]:
        """Ranks are columns, and no rank is of two hosts: no cell is written twice."""
        frame, row, column = _cells(reduced, host, layout, numbers, [*columns.values()])
        walls = frame["wall_us"].cast(pl.Float32).to_numpy() / np.float32(1000)
        wall[row, column] = walls
        for name, source_column in columns.items():
            values = frame[source_column]
            if values.null_count() == len(values):
                continue
            with new:
                if name not in made:
                    made[name] = np.full(shape, np.nan, np.float32)
            cells = values.cast(pl.Float32).fill_null(np.nan).to_numpy()
            # a part of a step is no longer than it
            made[name][row, column] = cells if name == "tokens" else np.minimum(cells / np.float32(1000), walls)
        return row, frame["start_us"], frame["label"].to_numpy() == _WINDOW

    for host, (row, begun, in_window) in zip(hosts, side_by_side(fill, hosts), strict=True):
        ahead_us[host.host] = _begun(start, row, begun)
        windowed += np.bincount(row[in_window], minlength=len(windowed)) - np.bincount(
            row[~in_window], minlength=len(windowed)
        )
    compute, collective = made.pop("compute", None), made.pop("collective", None)
    by_slices = compute is not None
    compute = _worked(reduced, layout, numbers) if compute is None else compute
    gc, tokens = made.pop("gc", None), made.pop("tokens", None)
    phases = {phase: made[phase] for phase in own if phase in made}
    total = np.full(shape, np.nan, np.float32)
    for phase in phases.values():  # a rank without a loader has no wait for data: what is known of each is added
        np.copyto(total, np.where(np.isfinite(total), total + np.nan_to_num(phase), phase))
    if gc is not None and layout.waits_inside and phases:
        total += np.nan_to_num(gc)  # it falls into the phases that are left out
    np.minimum(total, wall, out=total)
    if compute is None and collective is not None:  # what is neither spent in collectives nor by the host before
        compute = np.maximum(wall - collective - np.nan_to_num(total), np.float32(0))
    windows = np.zeros(0, np.int64)
    if compute is not None:
        windows = np.flatnonzero(np.isfinite(compute).any(axis=1))
        compute = compute[windows]
    return Steps(
        numbers, start, ahead_us, windowed > 0, wall, total, phases, gc, tokens, compute, by_slices, windows, exchange,
        source, all_steps,
    )  # fmt: skip


def _begun(start: Floats, row: Int64, values: pl.Series) -> float:
    """Fill in when steps began that no host told yet; returns how much later this one tells it of the others."""
    known = values.is_not_null().to_numpy()
    row, told = row[known], values.drop_nulls().to_numpy().astype(np.float64)
    before = told - start[row]
    new = ~np.isfinite(before)
    start[row[new]] = told[new]
    return float(np.median(before[~new])) if not new.all() else 0.0


def _cells(
    reduced: Reduced, host: Index, layout: Layout, numbers: Int64, columns: list[str]
) -> tuple[pl.DataFrame, Int64, Int64]:
    """A host's rows of steps that count, and the positions of their steps and ranks."""
    frame = (
        reduced.part("steps", host)
        .filter(pl.col("label").is_in([_STEADY, _WINDOW]) & (pl.col("wall_us") > 0))
        .select("rank", "step", "start_us", "wall_us", "label", *columns)
        .collect()
    )
    row = np.minimum(np.searchsorted(numbers, frame["step"].to_numpy()), len(numbers) - 1)
    column = layout.at(frame["rank"].cast(pl.Int64).to_numpy())
    kept = (numbers[row] == frame["step"].to_numpy()) & (column >= 0)
    return frame.filter(pl.Series(kept)), row[kept], column[kept]


def _numbers(reduced: Reduced, ranks: int) -> tuple[Int64, int]:
    """The steps to judge, and how many there are: all, or blocks over the whole run where there are too many."""

    def counted(host: Index) -> Int64:
        kept = pl.col("label").is_in([_STEADY, _WINDOW]) & (pl.col("wall_us") > 0) & (pl.col("step") >= 0)
        steps = reduced.part("steps", host).filter(kept).select(pl.col("step").unique()).collect()["step"]
        return steps.to_numpy().astype(np.int64)

    hosts = [host for host in reduced.hosts if host.tables["steps"].rows]
    numbers = np.unique(np.concatenate([np.zeros(0, np.int64), *side_by_side(counted, hosts)]))
    most = max(at.MAX_CELLS // max(ranks, 1), at.MIN_STEPS)
    if len(numbers) > most:
        every = -(-len(numbers) // most)
        return numbers[(np.arange(len(numbers)) // STEPS_OF_BLOCK) % every == 0], len(numbers)
    return numbers, len(numbers)


def _worked(reduced: Reduced, layout: Layout, numbers: Int64) -> Matrix | None:
    """What windows tell of passes and the optimizer, where no device slices were added up."""
    found: Matrix | None = None
    spent = pl.col("end_ns") - pl.col("start_ns")
    for host in reduced.hosts:
        if not host.tables["work"].rows or not len(numbers):
            continue
        frame = (
            reduced.part("work", host)
            .filter(pl.col("kind").is_in(_COMPUTED) & spent.is_between(0, _MAX_NS))
            .group_by("rank", "step")
            .agg(ms=spent.sum() / 1e6)
            .collect()
        )
        row = np.minimum(np.searchsorted(numbers, frame["step"].to_numpy()), len(numbers) - 1)
        column = layout.at(frame["rank"].cast(pl.Int64).to_numpy())
        kept = (numbers[row] == frame["step"].to_numpy()) & (column >= 0)
        if kept.any():
            found = np.full((len(numbers), len(layout.ranks)), np.nan, np.float32) if found is None else found
            found[row[kept], column[kept]] = frame["ms"].to_numpy()[kept]
    return found


def _exchange(reduced: Reduced, layout: Layout) -> tuple[tuple[str, ...], str]:
    """The phases in which ranks wait for each other: as most of them say, and of a pipeline all with passes in them."""
    if layout.waits_inside:
        return _WAITS_INSIDE, "stages of a pipeline and tensor slots wait for each other inside their passes"
    said = Counter(
        (rank.exchange, rank.exchange_source)
        for host in reduced.hosts
        for rank in host.ranks
        if rank.exchange is not None
    )
    if not said:
        return _ASSUMED, "assumed: gradients are exchanged after the forward pass"
    phases, source = said.most_common(1)[0][0]
    return tuple(phase for phase in PHASES if phase in phases), source


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
    if columns is None:
        if len(groups) == 1 and values.shape[1] != 2:
            return values - middle(values)[:, None]
        excess = np.empty_like(values)
        for group in groups:
            mine = values[:, group]
            # of two each is beside the other: beside the shorter of both, noise alone would make both late
            usual = mine[:, ::-1] if len(group) == 2 else middle(mine)[:, None]
            excess[:, group] = mine - usual if len(group) > 1 else np.nan  # alone, nothing tells what is usual
        return excess
    found = np.empty((len(values), len(columns)), np.float32)
    some = {int(layout.peers[group[0]]): group for group in groups}
    middles: dict[int, Matrix] = {}
    for position, column in enumerate(columns.tolist()):
        peers = int(layout.peers[column])
        group = some[peers]
        if len(group) < 2:
            found[:, position] = np.nan
            continue
        if len(group) == 2:
            found[:, position] = values[:, column] - values[:, group[group != column][0]]
            continue
        if peers not in middles:
            middles[peers] = middle(values[:, group[:: -(-len(group) // 33)]])
        found[:, position] = values[:, column] - middles[peers]
    return found


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
