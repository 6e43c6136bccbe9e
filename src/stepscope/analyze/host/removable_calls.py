"""Which call of the user's a sampled stack could be spared with: the outermost one that trains nothing.

`describe(outputs)` in a training loop calls no module, no backward pass and no optimizer, so leaving the call out saves
all that is sampled below it: list work, JSON, operators and collections. A call that leads to training work is
the loop or the model itself, and is never spared; neither is a module's own `forward`, but what it calls may be.

Where the user's innermost line only leads to training, as `trainer.train()` does, what a library does there on its own
is the library's: the outermost function of it that trains nothing is its place, and the line is where it was entered.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl
from msgspec import Struct

from stepscope.analyze.host.sampled_time import SampledTime, Share, is_fetch
from stepscope.engine.call_tree import CallTree, UserPaths, rows_of
from stepscope.engine.samples import Samples, bare, short
from stepscope.model import Place
from stepscope.tables.arrays import NONE, Bools, Floats, Int32, Int64, Numbers
from stepscope.tables.phases import BACKWARD, FORWARD, OPTIMIZER, in_file, phase_mark

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
    leading = {tree.frames[frame][:2] for frame in np.unique(tree.frame[leads & library]).tolist()}
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
