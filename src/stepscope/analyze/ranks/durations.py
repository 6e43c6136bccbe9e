"""The steps of several ranks side by side: whose own work is longest, and whether the others wait for it.

Ranks that exchange gradients take their steps together: one that works longer waits less, and the others wait for it
in the phases of the exchange. Only durations are compared, so that clocks of different hosts do not matter.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

import numpy as np
import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from stepscope.analyze.context import Context
from stepscope.analyze.host.sampled_time import SampledLoop
from stepscope.analyze.step_times import with_all_phases
from stepscope.engine.call_tree import UserPaths, at, rows_of
from stepscope.engine.step_labels import STEADY, LabelledSteps
from stepscope.model import PHASES, Place, Site
from stepscope.model.counted import short
from stepscope.model.machine import RanksFacts, RankWork
from stepscope.model.sampled import RankLine, RankLines
from stepscope.read.raw import Frame
from stepscope.tables.arrays import Floats, Int64
from stepscope.tables.phases import DATA_WAIT, in_file, is_wait, last_part

MIN_STEPS = 8  # two for each quarter of the run; fewer tell a slow rank from a slow moment by luck
QUARTERS = 4
ALSO_SLOW = 0.5  # of the slowest rank's excess: a rank with as much has the same loss
MIN_PHASE = 0.02  # of the loop's samples: a phase with so many inside torch.distributed is one of the exchange
_COLUMNS = tuple(f"{phase}_ns" for phase in PHASES)
_ASSUMED = ("backward", "optimizer", "other")
_ASSUMED_TEXT = "assumed: gradients are exchanged after the forward pass"


def facts(context: Context, sites: Sequence[Site]) -> RanksFacts | None:
    """None for one rank, or where too few steady steps are known of every rank, with their phases."""
    frame, ranks = _together(context.labelled)
    if frame is None:
        return None
    exchange, source = exchange_phases(context, sites) or (_ASSUMED, _ASSUMED_TEXT)
    inside = np.array([phase in exchange for phase in PHASES])
    # (phases, ranks, steps), ms
    phases = np.stack([_matrix(frame, column, len(ranks)) * 1e-6 for column in _COLUMNS])
    own, shared = phases[~inside].sum(axis=0), phases[inside].sum(axis=0)
    slowest = int(own.mean(axis=1).argmax())
    others = np.arange(len(ranks)) != slowest
    excess = own[slowest] - np.median(own[others], axis=0)
    waited = np.median(shared[others], axis=0) - shared[slowest]
    samples = _matrix(frame, "samples", len(ranks))
    by_phase = phases[:, slowest] - np.median(phases[:, others], axis=1)
    # whether each rank shares what makes the slowest one late, by their mean own work
    above = own.mean(axis=1) - np.median(own[others].mean(axis=1))
    late = above >= ALSO_SLOW * max(above[slowest], 1e-9)
    # the excess in the quarter of the run in which it was the largest part of the step, of the mean step
    wall = own[slowest] + shared[slowest]
    quarters = zip(np.array_split(excess, QUARTERS), np.array_split(wall, QUARTERS), strict=True)
    most = max(part.mean() / max(step.mean(), 1e-9) for part, step in quarters) * wall.mean()
    return RanksFacts(
        ranks=tuple(
            RankWork(
                rank=rank,
                wall_ms=float(phases[:, row].sum(axis=0).mean()),
                own_ms=float(own[row].mean()),
                exchange_ms=float(shared[row].mean()),
                phases_ms=dict(zip(PHASES, phases[:, row].mean(axis=1).tolist(), strict=True)),
                samples=None if np.isnan(samples[row]).any() else float(samples[row].mean()),
            )
            for row, rank in enumerate(ranks)
        ),
        steps=own.shape[1],
        exchange=exchange,
        exchange_source=source,
        slowest=ranks[slowest],
        excess_ms=float(excess.mean()),
        least_excess_ms=float(min(part.mean() for part in np.array_split(excess, QUARTERS))),
        waited_ms=float(waited.mean()),
        slowest_share=float((own.argmax(axis=0) == slowest).mean()),
        excess_by_phase_ms={
            phase: float(by_phase[row].mean()) for row, phase in enumerate(PHASES) if phase not in exchange
        },
        most_excess_ms=float(most),
        slow=tuple(ranks[row] for row in np.flatnonzero(late)),
        longest_own_ms=float(own.max(axis=0).mean()),
    )


def _together(labelled: LabelledSteps) -> tuple[pl.DataFrame | None, list[int]]:
    """Steps that are steady on all ranks, by rank and number: rows of `n` equal numbers, one per rank, in order.

    A rank's evaluation steps do not count, so the n-th training step is the n-th of every rank. Of a rank that was
    started again the longest part counts.
    """
    train = labelled.frame.filter((pl.col("kind") == "train") & pl.col("rank").is_not_null())
    parts = train.group_by("rank", "process").len().sort(["len", "process"], descending=[True, False])
    train = train.join(parts.unique("rank", keep="first", maintain_order=True), on="process", how="semi")
    train = with_all_phases(train.sort("rank", "step").with_columns(n=pl.int_range(pl.len()).over("rank")))
    ranks: list[int] = train["rank"].unique().sort().to_list()
    steady = train.filter(pl.col("reason") == STEADY).drop_nulls(_COLUMNS)
    everywhere = steady.group_by("n").len().filter(pl.col("len") == len(ranks))
    if len(ranks) < 2 or everywhere.height < MIN_STEPS:
        return None, ranks
    return steady.join(everywhere, on="n", how="semi").sort("rank", "n"), ranks


def own_together(labelled: LabelledSteps, exchange: Sequence[str]) -> tuple[Int64, Floats]:
    """Numbers of the steps that all ranks took together, as the first of them counts, and own work (ranks, steps), ms.

    For where `facts` found such steps.
    """
    frame, ranks = _together(labelled)
    assert frame is not None
    columns = [f"{phase}_ns" for phase in PHASES if phase not in exchange]
    own: Floats = sum((_matrix(frame, column, len(ranks)) for column in columns), start=np.zeros((len(ranks), 1)))
    return _matrix(frame, "step", len(ranks))[0].astype(np.int64), own * 1e-6


def _matrix(frame: pl.DataFrame, column: str, ranks: int) -> Floats:
    """A column as (ranks, steps); what is missing is NaN."""
    values: Floats = frame[column].cast(pl.Float64).fill_null(float("nan")).to_numpy()
    return values.reshape(ranks, -1)


def exchange_phases(context: Context, sites: Sequence[Site]) -> tuple[tuple[str, ...], str] | None:
    """The phases in which ranks wait for each other, and how that is known; None where nothing tells it.

    By samples these are phases with a notable part of the loop's samples in torch.distributed; not the data wait: what
    a loader does there is its rank's own affair. To samples
    what a script without a loader does before the forward pass is "other".
    """
    found = set()
    if context.sampled is not None:
        rows, tree = context.sampled.rank_steps(), context.calls
        distributed = np.array([_of_distributed(frame) for frame in tree.frames] + [False])
        leaf = np.append(tree.frame, -1)[rows_of(rows["node"])]
        within = rows.filter(pl.Series(distributed[leaf])).group_by("phase").agg(pl.col("samples").sum())
        least = MIN_PHASE * max(int(rows["samples"].sum()), 1)
        found = {str(phase) for phase, count in within.iter_rows() if phase != DATA_WAIT and count >= least}
        found |= {"before_forward"} if "other" in found else set()
    source = "sampled stacks inside torch.distributed"
    if any(site.what == "DistributedDataParallel" for site in sites):
        source = f"DistributedDataParallel, and {source}" if found else "DistributedDataParallel"
        found.add("backward")
    if not found:
        return None
    return tuple(phase for phase in PHASES if phase in found), source


def _of_distributed(frame: Frame) -> bool:
    return "/torch/distributed/" in f"/{frame.file}"


MIN_SAMPLES = 50  # of a rank's loop: with fewer, chance alone moves a share of a fifth by a quarter of it
MIN_SPREAD = 0.02  # of the loop: smaller differences between ranks are not worth a look
MIN_SIGMA = 4.0  # times what chance makes of samples: so large must be a difference of the extremes of all ranks
MIN_WAIT = 0.05  # of the loop, by which the others must wait longer than the straggler
MIN_PART = 0.25  # of that: a line must explain so much of it to be named
NAMED_RANKS = 4  # more are counted
MAX_LINES = 20
SHARES, MS = "share of samples", "ms per step"
_EXCHANGES = ("torch/distributed/", "torch/nn/parallel/distributed.py", "deepspeed/", "horovod/", "torch_xla/")
_US_PER_SAMPLE = 10_000  # of files that hold weights: what a sampler of 100 Hz has; how sure they are is not in them
_KEY = ["line", "phase", "waiting"]


class _Shares(Struct, frozen=True):
    """`share` of a rank's samples, shape (ranks, keys). A key is a line, a phase, and whether ranks wait there."""

    ranks: tuple[int, ...]
    samples: Int64  # by rank
    keys: pl.DataFrame  # line, phase, waiting, leaf
    share: Floats
    step_ms: Floats | None  # the mean steady step of every rank; None unless all are known
    users: UserPaths

    def place(self, key: int | None) -> Place | None:
        return None if key is None else self.users.place(self.keys["line"][key])

    def amount(self, rank: int, key: int) -> str:
        share = float(self.share[rank, key])
        return f"{100 * share:.0f} %" if self.step_ms is None else f"{short(share * self.step_ms[rank])} ms"


def rank_lines(
    context: Context, loop: SampledLoop | None, users: UserPaths, idle: bool | None
) -> tuple[RankLines | None, str]:
    """Where ranks differ, or None and why that cannot be said.

    Args:
        idle: whether waiting threads were sampled (`hotspot_idle`); without, nobody is seen to wait.
    """
    if loop is None:
        return None, "no stack was sampled in a training loop"
    per_sample = _US_PER_SAMPLE if "us" in context.tables.segments["unit"] else 1
    enough = loop.rows.group_by("rank").agg(pl.col("samples").sum() // per_sample)
    enough = enough.filter(pl.col("samples") >= MIN_SAMPLES)
    if enough.height < 2:
        several = loop.rows["rank"].drop_nulls().n_unique() > 1
        reason = f"fewer than two ranks have {MIN_SAMPLES} samples in their loop"
        return None, reason if several else "one rank alone was sampled"
    shares = _shares(context, loop.rows.join(enough, on="rank", how="semi"), users, per_sample)
    exchanges = users.passes(lambda frame: any(f"/{part}" in f"/{frame.file}" for part in _EXCHANGES))
    together = bool(at(exchanges, rows_of(loop.rows["node"]), False).any())
    lines = _lines(shares)
    found = RankLines(
        unit=SHARES if shares.step_ms is None else MS,
        ranks=shares.ranks,
        lines=lines,
        straggler=None,
        straggler_place=None,
        waiters=(),
        waiter_place=None,
        verdict="no line tells the ranks apart",
        source=f"sampled stacks of main threads, {loop.basis}",
    )
    late = _straggler(found, shares) if together and idle is not False else None
    if late is not None:
        return late, ""
    if idle is False:
        return replace(found, verdict="waiting was not sampled, so none can be said to wait for another"), ""
    if not together:
        text = "nothing in the samples shows that the ranks exchange gradients, so none waits for another"
        return replace(found, verdict=text), ""
    text = "the ranks differ, but none of them keeps the others waiting"
    return (replace(found, verdict=text) if lines else found), ""


def _shares(context: Context, rows: pl.DataFrame, users: UserPaths, per_sample: int) -> _Shares:
    nodes = rows_of(rows["node"])
    waits = pl.Series(at(users.marked(may_wait), nodes, False))
    by_rank = rows.select(
        "rank",
        "phase",
        "samples",
        leaf=users.leaf_names(rows["node"]).set(pl.Series(at(users.user, nodes, False)), None),
        line=pl.Series(at(users.line, at(users.innermost, nodes, -1), -1)),
        waiting=waits & (pl.col("phase") != DATA_WAIT),
    )
    keys = (
        by_rank.group_by(*_KEY, "leaf")
        .agg(pl.col("samples").sum())
        .sort(["samples", "leaf"], descending=[True, False])
        .unique(_KEY, keep="first", maintain_order=True)
        .select(*_KEY, "leaf")
        .sort(_KEY)
        .with_row_index("key")
    )
    cells = by_rank.group_by("rank", *_KEY).agg(pl.col("samples").sum()).join(keys.drop("leaf"), on=_KEY)
    numbers, row = np.unique(cells["rank"].to_numpy(), return_inverse=True)
    ranks = tuple(numbers.tolist())
    count = np.zeros((len(ranks), keys.height), np.int64)
    count[row, cells["key"].to_numpy()] = cells["samples"].to_numpy()
    samples = count.sum(axis=1)
    means = dict(context.labelled.steady().group_by("rank").agg(pl.col("wall_ns").mean() / 1e6).iter_rows())
    known = [means.get(rank) for rank in ranks]
    step_ms = None if None in known else np.array(known, np.float64)
    return _Shares(ranks, np.maximum(samples // per_sample, 1), keys, count / samples[:, None], step_ms, users)


def _straggler(facts: RankLines, shares: _Shares) -> RankLines | None:
    """With the rank that waits least for the others, where that is notably less than they wait."""
    waiting = shares.keys["waiting"].to_numpy()
    wait = shares.share[:, waiting].sum(axis=1)
    least = int(np.argmin(wait))
    others = np.arange(len(wait)) != least
    usual = float(np.median(wait[others]))
    ahead = usual - float(wait[least])
    samples = int(shares.samples[least]), int(np.median(shares.samples[others]))
    if ahead < max(MIN_WAIT, MIN_SIGMA * float(_sigma((usual + float(wait[least])) / 2, *samples))):
        return None
    more = shares.share[least] - np.median(shares.share[others], axis=0)
    named = (shares.keys["line"] >= 0).to_numpy()
    line = int(np.argmax(np.where(named & ~waiting, more, -np.inf)))
    rest = int(np.argmax(np.where(named & waiting, -more, -np.inf)))
    own = shares.place(line if named[line] and not waiting[line] and more[line] >= MIN_PART * ahead else None)
    place = shares.place(rest)
    waiters = np.flatnonzero(others & (wait - wait[least] >= ahead / 2)).tolist()
    rank, names = shares.ranks[least], [shares.ranks[waiter] for waiter in waiters]
    of = "of its loop" if shares.step_ms is None else "a step"
    text = f"rank {rank} works longer than the others, at no single line"
    if own is not None:
        text = f"rank {rank} spends {shares.amount(least, line)} {of} at {_short(own)}"
    who = f"{len(names)} of {len(shares.ranks)} ranks wait"
    if len(names) == 1:
        who = f"rank {names[0]} waits"
    elif len(names) <= NAMED_RANKS:
        who = f"ranks {', '.join(map(str, names[:-1]))} and {names[-1]} wait"
    elif len(names) == len(shares.ranks) - 1:
        who = f"all {len(names)} others wait"
    text += f"; {who} for it"
    if place is not None:
        longest = waiters[int(np.argmax(shares.share[waiters, rest]))]
        mine = f"rank {rank} {shares.amount(least, rest)}"
        text += f" at {_short(place)} in {shares.keys['phase'][rest]}: {shares.amount(longest, rest)} {of}, {mine}"
    return replace(facts, straggler=rank, straggler_place=own, waiters=tuple(names), waiter_place=place, verdict=text)


def _lines(shares: _Shares) -> tuple[RankLine, ...]:
    """The lines whose shares differ by more than chance, largest difference first."""
    most, least = shares.share.argmax(axis=0), shares.share.argmin(axis=0)
    high, low = shares.share.max(axis=0), shares.share.min(axis=0)
    chance = _sigma((high + low) / 2, shares.samples[most], shares.samples[least])
    notable = pl.Series(high - low >= np.maximum(MIN_SPREAD, MIN_SIGMA * chance))
    values = shares.share if shares.step_ms is None else shares.share * shares.step_ms[:, None]
    found = []
    for row in shares.keys.filter(notable & (pl.col("line") >= 0)).iter_rows(named=True):
        own, place = values[:, row["key"]], shares.place(row["key"])
        if place is not None:
            by_rank, spread = dict(zip(shares.ranks, own.tolist(), strict=True)), float(own.max() - own.min())
            slow = shares.ranks[int(own.argmax())]
            found.append(RankLine(place, row["phase"], by_rank, spread, slow, row["waiting"], row["leaf"]))
    return tuple(sorted(found, key=lambda line: (-line.spread, line.place.file, line.place.line or 0))[:MAX_LINES])


def _short(place: Place) -> str:
    line = "" if place.line is None else f":{place.line}"
    return f"{posixpath.basename(place.file)}{line}"


def _sigma(share: Floats | float, samples: Int64 | int, others: Int64 | int) -> Floats:
    """What chance makes of the difference of two shares."""
    return np.sqrt(np.maximum(share * (1.0 - share), 0.0) * (1.0 / np.asarray(samples) + 1.0 / np.asarray(others)))


def may_wait(leaf: Frame) -> bool:
    """Whether time on top of which this frame stands may be time in which a rank waits for others.

    On a CPU, backward runs in the calling thread and waits for the others' gradients there, too.
    """
    if _of_distributed(leaf) or is_wait(leaf, on_device=True):
        return True
    return last_part(leaf.function) == "_engine_run_backward" and in_file(leaf.file, "torch/autograd/graph.py")
