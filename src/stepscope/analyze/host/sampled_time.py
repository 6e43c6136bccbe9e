"""What sampled stacks of main threads are in milliseconds of the steady step, and at most; and which lie in the loop.

The journal times the backward pass, the optimizer and the loader exactly; samples only divide what lies inside each.
So a sample counts as many milliseconds as its part of the step has for each of its samples, and chance moves shares
within a part alone. Where the parts of both disagree by more than chance, the whole step is one part.

Samples that could not be taken are not missing by chance: most are of busy Python code. An upper bound counts all of
them, as far as the parts have room.

Where steps are known, the loop is what steady steps fill. Where they are not (files that others recorded), it is the
user's function in which a batch is fetched and a model is called, forwards, backwards or by an optimizer, from the line
of the fetch on; without a loader, the innermost function below which all of these are called. Setting up a parallel
model, and what is imported or compiled, belongs to no loop.

A sampled stack could be spared with a **call** of the user's: the outermost one that trains nothing.
`describe(outputs)` in a training loop calls no module, no backward pass and no optimizer, so leaving the call out saves
all that is sampled below it: list work, JSON, operators and collections. A call that leads to training work is the loop
or the model itself, and is never spared; neither is a module's own `forward`, but what it calls may be. Where the
user's innermost line only leads to training, as `trainer.train()` does, what a library does there on its own is the
library's: the outermost function of it that trains nothing is its place, and the line is where it was entered.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct
from msgspec.structs import replace

from stepscope.analyze.context import Context
from stepscope.engine.call_tree import CallTree, UserPaths, at, rows_of
from stepscope.engine.intervals import Intervals
from stepscope.engine.samples import Samples, bare, short
from stepscope.engine.step_labels import times_of
from stepscope.model import Place, Quality, StepFacts
from stepscope.read.raw import Frame
from stepscope.tables import phases
from stepscope.tables.arrays import NONE, Bools, Floats, Int32, Int64, Numbers, unique
from stepscope.tables.phases import BACKWARD, DATA_WAIT, FORWARD, OPTIMIZER, in_file, phase_mark

REST = "rest"
SIGMAS = 1.96  # of a share: 95 % of all samplings of the same run lie within
DOUBT_SIGMAS = 4.0  # beyond it, and `DOUBT` more, the journal and the samples do not mean the same by a part
DOUBT = 0.03
RANK_SAMPLES = 50  # of a rank's steps: with fewer, chance alone moves a share of a fifth by a quarter of it


class Share(Struct, frozen=True):
    """Time per steady step by sampled stacks: as sampled, and the most that chance and missing samples make of it.

    Of several ranks `ms` is the mean; `at_most_ms` is that of the rank with the most of it, because all wait for it.
    """

    ms: float
    at_most_ms: float
    samples: int


class SampledTime(Struct, frozen=True):
    """`rows`: steady stacks inside steps with `part`; `part_ms`, `part_samples`: of each part of the mean step.

    `rank_samples`: of each rank with enough of them to be told apart. `missed`: the share of samples of the whole run
    that could not be taken, or were torn and left out.
    """

    rows: pl.DataFrame
    part_ms: Mapping[str, float]
    part_samples: Mapping[str, int]
    mean_ms: float
    rank_samples: Mapping[int, int]
    missed: float = 0.0

    @property
    def samples(self) -> int:
        return sum(self.part_samples.values())

    def with_ms(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Rows of `rows` with `ms`: what each stands for in the mean step."""
        per_sample = {part: self.part_ms[part] / count for part, count in self.part_samples.items()}
        ms = pl.col("part").replace_strict(per_sample, default=0.0, return_dtype=pl.Float64) * pl.col("samples")
        return rows.with_columns(ms=ms)

    def share(self, rows: pl.DataFrame) -> Share:
        """Of rows out of `rows`."""
        ms = variance = room_ms = 0.0
        count, worst = 0, 1.0
        for part, samples in rows.group_by("part").agg(pl.col("samples").sum()).sort("part").iter_rows():
            total, part_ms = self.part_samples[part], self.part_ms[part]
            fraction = samples / total
            ms += part_ms * fraction
            variance += part_ms**2 * fraction * (1.0 - fraction) / total
            count += int(samples)
            room_ms += part_ms * (1.0 - fraction)
        if len(self.rank_samples) > 1 and count:  # what the rank with the most of them has, by the mean over ranks
            own = dict(rows.filter(pl.col("rank").is_not_null()).group_by("rank").agg(pl.col("samples").sum()).rows())
            worst = max(own.get(rank, 0) / total for rank, total in self.rank_samples.items()) * self.samples / count
        most = max(ms + SIGMAS * math.sqrt(variance), ms * float(worst))
        if count:
            most += min(room_ms, self.missed * (self.mean_ms - ms))
        return Share(ms, min(self.mean_ms, most), count)

    def share_of(self, rows: Sequence[int] | pl.Series) -> Share:
        """Of the stacks of these numbers (`row`); those outside of steady steps count nothing."""
        numbers = pl.Series("row", rows, dtype=self.rows["row"].dtype)
        return self.share(self.rows.filter(pl.col("row").is_in(numbers.implode())))


def sampled_time(samples: Samples | None, train: StepFacts | None, quality: Quality) -> SampledTime | None:
    """None without stacks in steady steps. `quality` tells how many samples could not be taken."""
    if samples is None or train is None:
        return None
    rows = samples.rank_steps()
    if not int(rows["samples"].sum()):
        return None
    ranks = rows.filter(pl.col("rank").is_not_null()).group_by("rank").agg(pl.col("samples").sum()).sort("rank").rows()
    by_rank = {int(rank): int(count) for rank, count in ranks if count >= RANK_SAMPLES}
    timed = {part.category: part.ms for part in train.partition}
    # without a loader's own frames, what the journal calls data wait is whatever stands before the forward pass
    own = [phase for phase in (BACKWARD, OPTIMIZER) if phase in timed]
    own += [DATA_WAIT] if DATA_WAIT in timed and (rows["phase"] == DATA_WAIT).any() else []
    # the loss is computed in the journal's forward pass and outside of any module: modules take no more than the pass
    for tried in ([*own, FORWARD], own) if FORWARD in timed else (own,):
        parts = {phase: timed[phase] for phase in tried}
        parts[REST] = train.mean_ms - sum(parts.values())
        divided = rows.with_columns(part=pl.when(pl.col("phase").is_in(tried)).then("phase").otherwise(pl.lit(REST)))
        counts = dict(divided.group_by("part").agg(pl.col("samples").sum()).sort("part").rows())
        if parts[REST] <= 0 or not counts.get(REST) or not _agree(counts, parts, train.mean_ms):
            continue
        per_sample = parts[REST] / counts[REST]
        if FORWARD not in tried or counts.get(FORWARD, 0) * per_sample > parts[FORWARD]:
            break
    else:
        divided, parts = rows.with_columns(part=pl.lit(REST)), {REST: train.mean_ms}
        counts = {REST: int(rows["samples"].sum())}
    errors = quality.counts.get("stack_errors", 0)
    lost, tried_samples = (errors + quality.counts.get(name, 0) for name in ("torn_stack_samples", "stack_samples"))
    missed = min(1.0, lost / tried_samples) if tried_samples else 0.0
    return SampledTime(divided, parts, counts, train.mean_ms, by_rank, missed)


def _agree(counts: Mapping[str, int], parts: Mapping[str, float], mean_ms: float) -> bool:
    total = sum(counts.values())
    for part, ms in parts.items():
        timed = ms / mean_ms
        chance = math.sqrt(max(timed * (1.0 - timed), 1.0 / total) / total)
        if abs(counts.get(part, 0) / total - timed) > DOUBT_SIGMAS * chance + DOUBT:
            return False
    return True


def whole_by_weight(samples: Int64, weights: Floats) -> Int64:
    """Whole samples by weight, which add up to those of each row: what is left over goes to the largest fractions."""
    ideal = samples[:, None] * (weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-300))
    found = np.floor(ideal).astype(np.int64)
    found = np.minimum(found, samples[:, None])
    left = samples - found.sum(axis=1)
    order = np.argsort(-(ideal - found), axis=1, kind="stable")
    place = np.argsort(order, axis=1, kind="stable")
    whole: Int64 = found + (place < left[:, None])
    return whole


_SET_UP = ("__init__", "init_process_group")
_SET_UP_FOLDERS = ("torch/nn/parallel/", "torch/distributed/", "torch/optim/")


class SampledLoop(Struct, frozen=True, dict=True):
    """`rows` of the table `stacks`: main threads of ranks in their loop. `inside`, by node, says what is in the loop.

    `inside` is None where steps tell it; `steady` holds the steady steps then. `basis` is said to the reader.
    """

    rows: pl.DataFrame
    inside: Bools | None
    steady: pl.DataFrame
    basis: str

    @cached_property
    def times(self) -> dict[str, Intervals]:
        """When each process was in steady steps."""
        known = self.steady.filter(pl.col("start_ns").is_not_null()).partition_by("process", as_dict=True)
        return {process: times_of(own) for (process,), own in known.items()}

    def within(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Those of other rows with nodes that lie in the loop as far as paths tell."""
        if self.inside is None:
            return rows
        return rows.filter(pl.Series(at(self.inside, rows_of(rows["node"]), False)))


def sampled_loop(context: Context, users: UserPaths) -> SampledLoop | None:
    """None without a sample in a loop."""
    if context.sampled is None:
        return None
    labelled = context.labelled
    rows = context.sampled.rank_steps().filter(pl.col("stage").is_null() & pl.col("node").is_not_null())
    kinds = labelled.frame["kind"].unique().drop_nulls().to_list()
    steady = labelled.steady("train" if "train" in kinds or not kinds else kinds[0])
    if labelled.frame.height:
        loop = SampledLoop(rows, None, steady, "steady steps")
    else:
        inside = _inside(users, rows)
        loop = SampledLoop(rows, inside, steady, "the function that runs the loop, as no step is known")
        loop = replace(loop, rows=loop.within(rows))
    return loop if loop.rows.height else None


def is_fetch(frame: Frame) -> bool:
    """Whether a batch is asked for here."""
    return phases.phase_mark(frame) == phases.DATA_WAIT


def _inside(users: UserPaths, rows: pl.DataFrame) -> Bools:
    """Whether a path lies in the loop, by node."""
    tree = users.tree
    own = np.zeros(len(tree), np.float64)
    own[rows_of(rows["node"])] = 1.0
    reached = tree.totals(own) > 0
    fetch = users.marked(is_fetch) & reached
    open_to_calls = reached & ~(tree.innermost(fetch) >= 0)
    opened = np.array([phases.phase_mark(frame) for frame in tree.frames], object)
    calls = [
        _outermost(users, tree.by_node(opened == phase) & open_to_calls) for phase in (FORWARD, BACKWARD, OPTIMIZER)
    ]
    # the user's functions that stand above them
    above = (users.user & (tree.totals(nodes.astype(np.float64)) > 0) for nodes in calls if nodes.any())
    callers = [unique(users.function[standing]) for standing in above]
    if fetch.any():
        functions = unique(np.concatenate(callers)) if callers else np.empty(0, np.int32)
        marks = np.flatnonzero(_outermost(users, fetch))
    elif callers:
        functions = functools.reduce(np.intersect1d, callers)
        marks = np.flatnonzero(np.logical_or.reduce(calls))
    else:
        return np.zeros(len(tree), bool)
    home = tree.innermost(users.user & np.isin(users.function, functions))[marks]
    home = np.where(home >= 0, home, tree.innermost(users.user)[marks])
    home = unique(home[home >= 0])
    loops = users.user & np.isin(users.function, users.function[home])
    if fetch.any():  # not before the first line of each function that fetches
        first = np.full(int(users.function.max(initial=0)) + 1, np.iinfo(np.int64).max)
        np.minimum.at(first, users.function[home], users.source_line[home])
        loops &= (users.source_line < 0) | (users.source_line >= first[users.function])
    sets_up = users.passes(
        lambda frame: (
            phases.last_part(frame.function) in _SET_UP and any(part in frame.file for part in _SET_UP_FOLDERS)
        )
    )
    found: Bools = (tree.innermost(loops) >= 0) & ~sets_up
    return found


def _outermost(users: UserPaths, marked: Bools) -> Bools:
    """Those of the marked nodes that have no marked one above them."""
    found: Bools = marked & (users.tree.outermost(marked) == np.arange(len(marked)))
    return found


TRAINS = 0.05  # of the sampled training work: a call that leads to less of it holds a metric, not the model; untuned
LOOP = 0.95  # of all samples: where no training work is told apart, a line that holds so much is the loop
FEW = 10  # samples of training work; with fewer it is not told apart
_MACHINERY = (FORWARD, OPTIMIZER)  # what calls a user's module or optimizer
_AUTOGRAD = "torch/autograd/function.py"
Name = tuple[str, str]  # file and bare name of a function
_PLACE = ("file", "line", "function")
PLACE_COLUMNS = [f"{whose}_{part}" for whose in ("user", "library") for part in _PLACE]  # of `Calls.rows`


class Calls(Struct, frozen=True):
    """`rows` are those of `time`, each with the number of its call, or null; `names` what the calls are of.

    A call is a function of the user's with all that runs below it. Lines of the training loop or of a module's
    `forward` that call no function of the user's are told under the name of that function, with `own` true: they share
    a name but are not spared together.
    """

    time: SampledTime
    rows: pl.DataFrame  # also in_module; library_file, _line, _function where a library works on its own
    names: tuple[Name, ...]
    own: tuple[bool, ...]
    lines: Mapping[tuple[Any, ...], int]  # the user's innermost frame (file, function, line) -> its call
    functions: Mapping[tuple[Any, ...], int]  # (file, function)

    def entries(self) -> pl.DataFrame:
        """(file, function, callee): the user's functions that enter a library's training, and by what; bare names."""
        led = self.rows.filter(pl.col("library_file").is_not_null())
        names = {"function": short(pl.col("user_function")), "callee": short(pl.col("below_function"))}
        return led.select(pl.col("user_file").alias("file"), **names).unique()

    def number(self, place: Place) -> int | None:
        """The call a place belongs to, by its line, else by its function; None where no sample saw it."""
        name = bare(place.function)
        found = self.lines.get((place.file, name, place.line))
        return found if found is not None else self.functions.get((place.file, name))

    def place(self, number: int | None) -> Place | None:
        """The function that a call is of; None for none."""
        return None if number is None else Place(self.names[number][0], None, self.names[number][1])

    def share(self, number: int | None, blamed: pl.Series) -> Share | None:
        """What leaving out a call would save at most, where its blamed stacks are notable; None for no call.

        Args:
            blamed: `row` of the stacks a finding speaks of. Of lines told under the loop's name only theirs count.
        """
        if number is None:
            return None
        rows = self.rows.filter(pl.col("call") == number)
        if self.own[number]:
            marked = rows.with_columns(mine=pl.col("row").is_in(blamed.implode()))
            line = ["user_file", "user_line", "user_function"]
            mostly = (
                marked.group_by(line)
                .agg(part=(pl.col("samples") * pl.col("mine")).sum() / pl.col("samples").sum())
                .filter(pl.col("part") >= 0.5)
            )
            rows = rows.join(mostly, on=line, how="semi", nulls_equal=True)
        return self.time.share(rows)


def place_of(row: Mapping[str, Any]) -> Place:
    """Where a row of `PLACE_COLUMNS` stands: at a line of the user's, or of the library that works on its own."""
    whose = "user" if row.get("library_file") is None else "library"
    return Place(*(row[f"{whose}_{part}"] for part in _PLACE))


def entry_of(row: Mapping[str, Any]) -> Place | None:
    """The user's line that only leads to such a library; None where the place is the user's."""
    return None if row["library_file"] is None else Place(*(row[f"user_{part}"] for part in _PLACE))


def removable_calls(samples: Samples | None, time: SampledTime | None) -> Calls | None:
    """None without stacks in steady steps."""
    if samples is None or time is None or not len(samples.calls):
        return None
    users = UserPaths(samples.calls, samples.code)
    nodes, weights = rows_of(time.rows["node"]), time.rows["samples"].to_numpy()
    count = np.zeros(len(samples.calls), np.float64)
    np.add.at(count, nodes[nodes >= 0], weights[nodes >= 0])
    essential = _essential(users, count)
    site = _sites(users, essential)
    keys, name_of = _dominant(users, site, nodes, weights)
    names: Numbers[tuple[Name, bool]] = Numbers()
    of_site: dict[_Key | None, int] = {key: names[name] for key, name in name_of.items()}
    numbers = [of_site.get(key) for key in keys]
    rows = time.rows.hstack(_of_libraries(users, essential, nodes))
    call = pl.when(pl.col("library_file").is_null()).then(pl.Series(numbers, dtype=pl.Int64))
    rows = rows.with_columns(call=call)
    called = rows.filter(pl.col("call").is_not_null() & pl.col("user_file").is_not_null())
    places = called.with_columns(name=short(pl.col("user_function")).fill_null(""))
    return Calls(
        time=time,
        rows=rows,
        names=tuple(name for name, _ in names),
        own=tuple(own for _, own in names),
        lines=_most(places, ["user_file", "name", "user_line"]),
        functions=_most(places, ["user_file", "name"]),
    )


def _essential(users: UserPaths, count: Floats) -> Bools:
    """Whether a node leads to training work."""
    tree = users.tree
    trains = users.marked(lambda frame: phase_mark(frame) in (FORWARD, BACKWARD, OPTIMIZER))
    total = tree.totals(count)
    below = _work_below(tree, trains, total)
    roots = tree.parent < 0
    work = float(np.where(trains, total, below)[roots].sum())
    found: Bools = below >= TRAINS * work if work >= FEW else total >= LOOP * float(total[roots].sum())
    return found


def _of_libraries(users: UserPaths, essential: Bools, nodes: Int64) -> pl.DataFrame:
    """By row, where the user's line only leads to training or to a batch: the library's function that works there.

    The outermost one that never leads there itself, else the innermost; `in_module`: a module's forward pass runs below
    the user's line.
    """
    tree = users.tree
    fetches = _work_below(tree, users.marked(is_fetch), np.ones(len(tree), np.float64)) > 0
    leads = essential | fetches
    library = users.marked(lambda frame: users.code.library(frame.file) is not None)
    leading = {tree.frames[frame][:2] for frame in unique(tree.frame[leads & library]).tolist()}
    works = library & ~users.marked(lambda frame: frame[:2] in leading)
    own, nearest = tree.outermost(works & ~leads), tree.innermost(library)
    found = np.where(own >= 0, own, nearest)
    user = users.innermost
    entered = (user >= 0) & leads[np.maximum(user, 0)] & users.is_below(found, user)
    module = users.is_below(users.innermost_of(lambda frame: phase_mark(frame) == FORWARD), user)
    at = np.where(nodes >= 0, np.where(entered, found, np.int32(NONE))[np.maximum(nodes, 0)], NONE)
    frames = [tree.frames[tree.frame[node]] if node >= 0 else None for node in at.tolist()]
    return pl.DataFrame(
        {
            "in_module": pl.Series((nodes >= 0) & module[np.maximum(nodes, 0)], dtype=pl.Boolean),
            "library_file": pl.Series([users.code.library(f.file) if f else None for f in frames], dtype=pl.String),
            "library_line": pl.Series([f.line if f else None for f in frames], dtype=pl.Int64),
            "library_function": pl.Series([f.function if f else None for f in frames], dtype=pl.String),
        }
    )


def _sites(users: UserPaths, essential: Bools) -> Int32:
    """For every node the outermost frame of the user's on its path from which on nothing trains; -1 for none."""
    tree = users.tree
    roots = tree.parent < 0
    called = np.zeros(len(tree), bool)
    machinery = users.marked(lambda frame: phase_mark(frame) in _MACHINERY or in_file(frame.file, _AUTOGRAD))
    called[~roots] = machinery[tree.parent[~roots]]
    model = tree.innermost(users.user & called)
    spared = tree.outermost(users.user & ~essential)
    inside = (model >= 0) & (tree.depth[np.maximum(model, 0)] > tree.depth[np.maximum(spared, 0)]) & (spared >= 0)
    return np.where(inside, model, spared).astype(np.int32)


def _work_below(tree: CallTree, trains: Bools, total: Floats) -> Floats:
    """Samples below each node that pass a frame of training work there."""
    below = np.zeros(len(tree), np.float64)
    for level in reversed(tree.levels[1:]):
        np.add.at(below, tree.parent[level], np.where(trains[level], total[level], below[level]))
    return below


_Key = tuple[int, int]  # function and line of a site


def _dominant(
    users: UserPaths, site: Int32, nodes: Int64, samples: Int64
) -> tuple[list[_Key | None], dict[_Key, tuple[Name, bool]]]:
    """The site of each node's path, and what each site is told as: the function that most of its samples stand in, or
    its own; True for its own.

    That is the user's first named function below the site's line; none where the line itself does the work.
    """
    tree = users.tree
    named = users.user & users.marked(lambda frame: not bare(frame.function).startswith("<"))
    below = np.full(len(tree), NONE, np.int32)
    for level in tree.levels[1:]:
        above = tree.parent[level]
        same, inherited = site[level] == site[above], below[above]
        below[level] = np.where(
            same, np.where(named[level] & (inherited < 0) & (site[level] >= 0), level, inherited), NONE
        )
    keys: list[_Key | None] = []
    votes: dict[_Key, Counter[tuple[Name, bool]]] = defaultdict(Counter)
    for node, weight in zip(nodes.tolist(), samples.tolist(), strict=True):
        at = int(site[node]) if node >= 0 else NONE
        if at < 0:
            keys.append(None)
            continue
        key, own = (int(users.function[at]), int(users.source_line[at])), bool(below[node] < 0)
        place = users.place(int(users.line[at if own else below[node]]))
        keys.append(key)
        votes[key][(place.file, bare(place.function)) if place is not None else ("?", "?"), own] += int(weight)
    return keys, {key: max(sorted(own), key=lambda name: own[name]) for key, own in votes.items()}


def _most(rows: pl.DataFrame, columns: list[str]) -> dict[tuple[Any, ...], int]:
    """The call that most samples of each of these belong to."""
    sums = rows.group_by(*columns, "call").agg(pl.col("samples").sum())
    ordered = sums.sort("samples", "call", descending=[True, False]).unique(columns, keep="first", maintain_order=True)
    return {tuple(key): call for *key, call in ordered.select(*columns, "call").iter_rows()}
