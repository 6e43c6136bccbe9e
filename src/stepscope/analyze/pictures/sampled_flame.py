"""Flame graphs of sampled stacks: a tree for everything, and one per phase, kind of process and rank; and differences.

Values are milliseconds per step where steady steps are known, else samples. What was sampled outside steady steps
(imports, compilation, warm-up, evaluation) then makes a tree of its own, in samples, so that it dilutes no other.

Of two runs, or one rank and the mean of the others, boxes match by the path of (function, file from the root of the
code on), so that runs in different folders match. Where not both sides are per step the other one is scaled to the same
total, which shows how the share of a path changed and nothing about speed.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct, field
from msgspec.structs import replace

from stepscope.analyze.context import Context
from stepscope.analyze.host.hotspots import PARKED, StackSelection, check, choose, idle_sampled, main_roles
from stepscope.analyze.host.sampled_time import sampled_loop
from stepscope.analyze.pictures.flame_tree import (
    NO_FRAME,
    Limits,
    Paths,
    PlannedTree,
    drawn,
    flame_tree,
    merged,
    nested,
    summed,
    together,
)
from stepscope.analyze.pictures.trace_flame import TraceWindows
from stepscope.engine.call_tree import UserPaths
from stepscope.errors import UnreadableInputError, UsageError
from stepscope.model import PHASES
from stepscope.model.sampled import FlameFrame, FlameGraph, FlameTree
from stepscope.tables.arrays import NONE, Bools, Floats, Int32, Numbers

MAX_RANK_TREES = 64  # more trees than anyone chooses from; --rank draws any other
MAIN, WORKERS, THREADS, OTHERS = "main", "workers", "threads", "other"
KINDS = {
    MAIN: "main threads",
    WORKERS: "loader workers",
    THREADS: "other threads of training processes",
    OTHERS: "other processes",
}
_PHASE_ORDER = {name: position for position, name in enumerate((*PHASES, "startup"))}
MS_PER_STEP = "ms per step"
FOLD = 8  # direct recursion deeper than this is drawn as one box
_RECORD = "record with stepscope run, or give a file of py-spy or speedscope"


class FlameOptions(Struct, frozen=True):
    """What to draw. `by`: "function" or "line", what makes two frames one box. `per_step` False counts samples.

    `source` False quotes no line of the user's.
    """

    selection: StackSelection = field(default_factory=StackSelection)
    by: str = "function"
    limits: Limits = field(default_factory=Limits)
    per_step: bool = True
    source: bool = True


class Names(Struct, frozen=True):
    """Numbers of boxes and of frames as drawn, shared by all trees of a graph and by both sides of a difference."""

    keys: Numbers[tuple[str, str, int | None]] = field(default_factory=Numbers)
    frames: Numbers[FlameFrame] = field(default_factory=Numbers)


class Side:
    """One run, ready to be drawn: rows of its samples as arrays of one length, and what makes trees of them.

    `kind` is one of the four above; `rank` is -1 and `phase` None where unknown. A sample counts for `rank_weight` in
    a tree of its rank alone, in one of all ranks for `weight`: ms per step where steady steps are known and
    `options.per_step` does not forbid it. Rows that are not `steady` are in no step: they belong in no tree whose unit
    is per step. `loop`: main threads in the training loop, as far as steps or paths tell.
    """

    def __init__(self, context: Context, options: FlameOptions, names: Names) -> None:
        check(context.tables, options.selection)
        self.context, self.options, self.names = context, options, names
        tables, chosen = context.tables, choose(context.tables, options.selection)
        stacks, self.left_out = chosen.rows, chosen.left_out
        self.samples = stacks["samples"].to_numpy().astype(np.float64)
        if not self.samples.sum():
            left_out = ", ".join(f"{count:,} samples of {reason}" for reason, count in self.left_out.items())
            hint = f"left out are {left_out}" if left_out else _RECORD
            raise UnreadableInputError(f"{title(context)}: holds no sampled stack of what was asked for; {hint}")
        self._node = stacks["node"].fill_null(len(context.calls)).to_numpy()  # no frames: a node behind all others
        self._waiting = stacks["waiting"].fill_null(False).to_numpy()
        self.kind = _kinds(stacks, main_roles(tables.stacks))
        self.main: Bools = self.kind == MAIN
        self.phase = stacks["phase"].to_numpy().astype(object)
        self.rank = stacks["rank"].fill_null(NONE).to_numpy().astype(np.int32)
        self.steady = np.ones(len(self.rank), dtype=np.bool_)
        sampled = context.sampled if options.per_step else None
        per_sample = sampled.ms_per_sample(context.labelled) if sampled else {}
        if sampled is not None and per_sample:
            steady, in_phase = sampled.in_steady_steps(stacks)
            steady &= ~self.main | in_phase
            if steady.any():
                self.steady = steady
            else:  # asked for what lies in no steady step, such as startup
                per_sample = {}
        self.per_step = bool(per_sample)
        if self.per_step:
            usual = sum(per_sample.values()) / len(per_sample)  # of rows of no rank, and of ranks without steps
            self.rank_weight = np.asarray([per_sample.get(int(each), usual) for each in self.rank], dtype=np.float64)
            self.unit, self._source = MS_PER_STEP, "share of the main thread's samples in steady steps x mean step"
            self.loop = self.steady & self.main
        else:
            units = tables.segments["unit"].drop_nulls().unique().to_list()
            self.rank_weight = np.ones(len(self.rank))
            self.unit = str(units[0]) if len(units) == 1 else "samples"  # only files of one can be opened together
            self._source = "as the files count them"
            self.loop = _in_loop(context, stacks, self.main)
        self.weight = self.rank_weight / max(1, len(per_sample))
        self._mean = f", mean of {len(per_sample)} ranks" if len(per_sample) > 1 else ""
        self.ranks = tuple(sorted(set(self.rank[self.main & self.steady].tolist()) - {NONE}))
        present = set(self.kind[self.steady].tolist())
        self.kinds = [kind for kind in KINDS if kind in present] or [MAIN]
        roots = (*tables.run.user_roots, *context.options.source_roots)
        self._frames = [NO_FRAME, *drawn(context.calls.frames, context.code, roots)]
        self._keys = self._numbered(self._frames)

    @property
    def loop_apart(self) -> bool:
        """Whether a training loop was found that is less than what the trees hold: in files that know no steps."""
        return bool(not self.per_step and self.loop.any())

    def planned(self) -> Iterator[PlannedTree]:
        """Every tree of the run, the one of everything first. A tree that would equal it is left out."""
        by_kind = {kind: self._boxes((self.kind == kind) & self.steady, self.weight) for kind in self.kinds}
        yield self.plan("all", "everything", self._below_kinds(by_kind))
        if len(by_kind) > 1:
            for kind, paths in by_kind.items():
                yield self.plan(f"process:{kind}", KINDS[kind], paths)
        main = self.main & self.steady
        if self.loop_apart:
            yield self.plan("loop", "training loop (main threads)", self._boxes(self.loop & self.steady, self.weight))
        phases = sorted(
            {str(each) for each in self.phase[main] if each},
            key=lambda name: (_PHASE_ORDER.get(name, len(_PHASE_ORDER)), name),
        )
        if len(phases) > 1:
            for phase in phases:
                paths = self._boxes(main & (self.phase == phase), self.weight)
                yield self.plan(f"phase:{phase}", f"phase: {phase.replace('_', ' ')}", paths)
        if len(self.ranks) > 1:
            for rank in self.ranks[:MAX_RANK_TREES]:
                yield self.plan(f"rank:{rank}", f"rank {rank}, main thread", self.of_rank(rank), rank=rank)
        if self.per_step and (outside := self.main & ~self.steady).any():
            label, paths = "outside steady steps (main threads)", self._boxes(outside, np.ones(len(self.samples)))
            yield PlannedTree("outside", label, paths, "samples", "as they were counted")

    def with_operators(self, windows: TraceWindows) -> Iterator[PlannedTree]:
        """The main threads once more, their innermost frames split by the operators that traces saw there."""
        calls = self.context.calls
        own, waits = self._by_node(self.main & self.steady, self.weight)
        leaves = windows.operator_leaves(calls, own[:-1])
        if not leaves.frames:
            return
        frames, keys = [*self._frames, *leaves.frames], np.append(self._keys, self._numbered(leaves.frames))
        parent, frame = self._nodes()
        above = np.where(leaves.parent < len(calls), leaves.parent, leaves.parent + 1)
        parent = np.concatenate([parent, above]).astype(np.int32)
        frame = np.concatenate([frame, leaves.frame + len(self._frames)]).astype(np.int32)
        own = np.concatenate([leaves.own, own[-1:], leaves.value])
        waits = np.concatenate([waits, np.zeros(len(leaves.value))])
        paths = self._merged(parent, frame, own, waits, frames, keys)
        planned = self.plan(f"process:{MAIN}+operators", "main threads with operators", paths)
        how = f"operators below sampled functions are estimated: split like the functions' time in {windows.named}"
        yield replace(planned, source=f"{planned.source}; {how}")

    def plan(self, key: str, label: str, paths: Paths, *, rank: int | None = None) -> PlannedTree:
        """A tree in the side's unit."""
        return PlannedTree(key, label, paths, self.unit, self._source + (self._mean if rank is None else ""))

    def of_rank(self, *ranks: int, loop: bool = False) -> Paths:
        """The boxes of the main threads of `ranks`, or of their training loops; of several, their mean."""
        chosen = (self.loop if loop else self.main & self.steady) & np.isin(self.rank, ranks)
        return self._boxes(chosen, self.rank_weight / len(ranks))

    def source(self) -> dict[int, str]:
        """The text of the user's lines among the frames of the graph, by their number, unless none is wanted."""
        drawn_as = zip(self._frames[1:], self.context.calls.frames, strict=True)
        files = {(frame.file, frame.line): call.file for frame, call in drawn_as}
        texts: dict[int, str] = {}
        lines: dict[str, list[str]] = {}
        for number, frame in enumerate(self.names.frames if self.options.source else ()):
            path = self.context.code.resolve(files.get((frame.file, frame.line)))
            if path is None or frame.line is None or path not in self.context.sources:
                continue
            text = lines.setdefault(path, self.context.sources[path].splitlines())
            if 0 < frame.line <= len(text):
                texts[number] = text[frame.line - 1].strip()
        return texts

    def notes(self) -> list[str]:
        """What must be known of this side before the picture is believed."""
        notes = [note.text for note in self.context.tables.quality.notes]
        idle = idle_sampled(self.context.tables)
        if idle is False:
            notes.append("Idle threads were not sampled: time spent waiting is missing from these pictures.")
        elif idle is None:
            notes.append("The files do not say whether idle threads were sampled; if not, waiting is missing.")
        if self.left_out:
            parts = ", ".join(f"{count:,} of {reason}" for reason, count in self.left_out.items())
            shown = " (--parked draws parked threads)" if PARKED in self.left_out else ""
            notes.append(f"Samples left out: {parts}{shown}.")
        if len(self.kinds) > 1:
            notes.append(
                "Processes and threads run at the same time, so their times add up to more than the wall time."
            )
        if self.per_step and self.context.sampled is not None and self.context.sampled.fallback:
            notes.append("No stretch of sampling lies in steady steps alone: all that touch one stand in for them.")
        return notes

    def _numbered(self, frames: Sequence[FlameFrame]) -> Int32:
        by_line = self.options.by == "line"
        keys = [self.names.keys[frame.name, frame.file, frame.line if by_line else None] for frame in frames]
        return np.asarray(keys, dtype=np.int32)

    def _nodes(self) -> tuple[Int32, Int32]:
        """Parent and frame of every sampled path, and behind them of a stack without frames."""
        calls = self.context.calls
        return np.append(calls.parent, NONE).astype(np.int32), np.append(calls.frame + 1, 0).astype(np.int32)

    def _by_node(self, chosen: Bools, weight: Floats) -> tuple[Floats, Floats]:
        """What the chosen rows are worth by node, a sample of which counts for `weight`; the share of it that waits."""
        count = len(self.context.calls) + 1
        value, node = self.samples[chosen] * weight[chosen], self._node[chosen]
        own = summed(node, value, count)
        waiting = summed(node, value * self._waiting[chosen], count)
        return own, np.divide(waiting, own, out=np.zeros(count), where=own > 0)

    def _boxes(self, chosen: Bools, weight: Floats) -> Paths:
        return self._merged(*self._nodes(), *self._by_node(chosen, weight), self._frames, self._keys)

    def _merged(
        self, parent: Int32, frame: Int32, own: Floats, waits: Floats, frames: Sequence[FlameFrame], keys: Int32
    ) -> Paths:
        """Nodes of `frames` as boxes. `waits` is the share of `own` that waits."""
        total = nested(parent).totals(own)
        used = total > 0
        number = (np.cumsum(used) - 1).astype(np.int32)
        above = np.where(parent[used] < 0, NONE, number[parent[used]]).astype(np.int32)
        up, key, group = merged(above, keys[frame[used]], fold=FOLD)
        own_of = summed(group, own[used], len(up))
        waiting = summed(group, (waits * own)[used], len(up)) > own_of / 2
        # the frame of each box with the most weight: of several assignments the last one, the heaviest, stays
        span = len(frames)
        distinct, which = np.unique(group.astype(np.int64) * span + frame[used], return_inverse=True)
        order = np.lexsort((summed(which, total[used], len(distinct)), distinct // span))
        shown = np.zeros(len(up), np.int64)
        shown[(distinct // span)[order]] = (distinct % span)[order]
        pairs, which = np.unique(shown * 2 + waiting, return_inverse=True)
        numbers = [
            self.names.frames[replace(frames[pair // 2], kind="wait") if pair % 2 else frames[pair // 2]]
            for pair in pairs.tolist()
        ]
        return Paths(up, key, np.asarray(numbers, np.int32)[which], own_of)

    def _below_kinds(self, by_kind: Mapping[str, Paths]) -> Paths:
        """All of them, below one box for each kind of thread where there are several."""
        filled = {kind: paths for kind, paths in by_kind.items() if len(paths)}
        if len(filled) <= 1:
            return next(iter((filled or by_kind).values()))
        below = []
        for kind, paths in filled.items():
            top = FlameFrame(KINDS[kind], "", None, "root")
            below.append(
                Paths(
                    parent=np.append(NONE, np.where(paths.parent < 0, 0, paths.parent + 1)).astype(np.int32),
                    key=np.append(self._numbered([top]), paths.key).astype(np.int32),
                    frame=np.append(self.names.frames[top], paths.frame).astype(np.int32),
                    own=np.append(0.0, paths.own),
                )
            )
        return together(below)


def flame_graph(context: Context, options: FlameOptions | None = None) -> FlameGraph:
    """Trees of the run's sampled stacks, and of its traces where these hold Python stacks.

    Raises `UsageError` for a rank, phase or kind of process that was not sampled, `UnreadableInputError` for a run of
    which nothing can be drawn.
    """
    options = options or FlameOptions()
    names = Names()
    trees: list[FlameTree] = []
    notes = tuple(note.text for note in context.tables.quality.notes)
    side = None
    windows = TraceWindows(context) if context.tables.events.height else None
    if context.tables.stacks.height or windows is None or windows.absent:
        side = Side(context, options, names)
        planned = [*side.planned(), *(side.with_operators(windows) if windows and not windows.absent else ())]
        trees += [flame_tree(each, names.frames, options.limits) for each in planned]
        notes = notes_of(side, trees)
        if windows is not None and windows.absent:
            notes = (*notes, f"Nothing of the traces is drawn: {windows.absent}.")
    if windows is not None and options.selection.phase is None and options.selection.process != "workers":
        traced, rank = windows.trees(names.frames, options.limits), options.selection.rank
        several = any(tree.key.startswith("gpu:rank:") for tree in traced)  # of one rank there is no tree of its own
        trees += [tree for tree in traced if rank is None or not several or tree.key == f"gpu:rank:{rank}"]
    return FlameGraph(
        title=title(context),
        frames=tuple(names.frames),
        trees=tuple(trees),
        notes=notes,
        source=side.source() if side is not None else {},
    )


def notes_of(side: Side, trees: list[FlameTree]) -> tuple[str, ...]:
    """The notes of a graph: those of its side, and what was left out of the drawing."""
    notes = side.notes()
    if any(tree.hidden for tree in trees):
        notes.append("Paths too thin to be seen are not drawn; the boxes that lead to them keep their time.")
    if len(side.ranks) > MAX_RANK_TREES:
        notes.append(f"Of {len(side.ranks)} ranks the first {MAX_RANK_TREES} have a tree; --rank draws any other.")
    return tuple(dict.fromkeys(notes))


def title(context: Context) -> str:
    """What the picture is of: a run by its name, files of stacks by theirs."""
    run, files = context.tables.run, context.tables.segments
    folder = run.folder.rstrip("/").rsplit("/", 1)[-1]
    if run.name and run.name != folder:
        return run.name
    if files.height == 1 and not files["host"][0]:
        return posixpath.basename(str(files["file"][0]))
    if files.is_empty() and context.tables.traces.height == 1 and not run.name:
        return str(context.tables.traces["trace"][0])
    return folder or "samples"


def _kinds(stacks: pl.DataFrame, main: tuple[str, ...]) -> npt.NDArray[np.object_]:
    role = pl.col("role").fill_null("other")
    kind = (
        pl.when(role == "loader_worker")
        .then(pl.lit(WORKERS))
        .when(~role.is_in(main))
        .then(pl.lit(OTHERS))
        .when(pl.col("main_thread").fill_null(True))
        .then(pl.lit(MAIN))
        .otherwise(pl.lit(THREADS))
    )
    return stacks.select(kind.alias("kind"))["kind"].to_numpy().astype(object)


def _in_loop(context: Context, stacks: pl.DataFrame, main: Bools) -> Bools:
    """Main threads in the training loop, of files that know no steps."""
    found = sampled_loop(context, UserPaths(context.calls, context.code))
    if found is None or found.inside is None:
        return np.zeros(len(main), dtype=np.bool_)
    inside = np.append(found.inside, False)[stacks["node"].fill_null(NONE).to_numpy()]
    working: Bools = inside & stacks["stage"].is_null().to_numpy() & main
    return working


SCALED = "scaled to the same total"


def flame_diff(this: Context, other: Context, options: FlameOptions | None = None) -> FlameGraph:
    """This run with `other` as what it is compared with; one tree for each that both have.

    Raises `UsageError` for files that count different things or of which only one sampled idle threads.
    """
    options = options or FlameOptions()
    names = Names()
    sides = [Side(context, options, names) for context in (this, other)]
    if sides[0].per_step != sides[1].per_step:
        sides = [Side(context, replace(options, per_step=False), names) for context in (this, other)]
    notes = _comparable(*sides)
    this_side, other_side = sides
    others, mine = {planned.key: planned.paths for planned in other_side.planned()}, list(this_side.planned())
    # one scale for all trees, but for loops: a phase that takes a larger part of the whole must show as grown
    whole, trees = _same_total(mine[0].paths, others[mine[0].key]), []
    for planned in mine:
        if planned.key in others and planned.key != "outside":
            match = others[planned.key]
            scale = _same_total(planned.paths, match) if planned.key == "loop" else whole
            pair = _pair(this_side, planned, match, scale, f"the other side {SCALED}")
            trees.append(flame_tree(pair, names.frames, options.limits))
    labels = _labels(this, other)
    for label, side in zip(labels, sides, strict=True):
        notes += [f"{label}: {note}" for note in side.notes()]
    return FlameGraph(
        title=f"{labels[0]} compared with {labels[1]}",
        frames=tuple(names.frames),
        trees=tuple(trees),
        notes=tuple(dict.fromkeys(notes)),
        sides=labels,
        source=sides[0].source(),
    )


def flame_rank_diff(context: Context, rank: int, options: FlameOptions | None = None) -> FlameGraph:
    """One rank's main thread with the mean of all other ranks' as what it is compared with.

    `options.selection` says which phase; its rank is not looked at. Raises `UsageError` where there is no other rank.
    """
    options = options or FlameOptions()
    side = Side(context, replace(options, selection=replace(options.selection, rank=None, process="all")), Names())
    others = tuple(each for each in side.ranks if each != rank)
    if rank not in side.ranks or not others:
        several = len(side.ranks) > 1
        known = f"ranks with samples: {', '.join(map(str, side.ranks))}" if several else "one rank was sampled"
        raise UsageError(f"--rank {rank} --diff others: needs samples of this rank and of another; {known}")
    trees = []
    for loop in (True, False) if side.loop_apart else (False,):  # the training loop, where it is known apart, and all
        mine, rest = side.of_rank(rank, loop=loop), side.of_rank(*others, loop=loop)
        if len(mine) and len(rest):
            key, label = (f"rank:{rank}:loop", "training loop") if loop else (f"rank:{rank}", "main thread")
            planned = side.plan(key, f"rank {rank}, {label}", mine, rank=rank)
            pair = _pair(side, planned, rest, _same_total(mine, rest), f"the others' mean {SCALED}")
            trees.append(flame_tree(pair, side.names.frames, options.limits))
    labels = (f"rank {rank}", f"rank {others[0]}" if len(others) == 1 else f"mean of {len(others)} other ranks")
    return FlameGraph(
        title=f"{title(context)}: {labels[0]} compared with {labels[1]}",
        frames=tuple(side.names.frames),
        trees=tuple(trees),
        notes=notes_of(side, trees),
        sides=labels,
        source=side.source(),
    )


def _same_total(this: Paths, other: Paths) -> float:
    total = float(other.own.sum())
    return float(this.own.sum()) / total if total else 1.0


def _pair(this: Side, planned: PlannedTree, other: Paths, scale: float, scaled: str) -> PlannedTree:
    """Both sides in one tree, the other one scaled unless both are per step. A box is drawn as on this side, where it
    is there at all.
    """
    mine = replace(planned.paths, base=np.zeros(len(planned.paths)))
    base = other.own if this.per_step else other.own * scale
    paths = together([mine, replace(other, own=np.zeros(len(other)), base=base)])
    return replace(planned, paths=paths, source=planned.source if this.per_step else scaled)


def _comparable(this: Side, other: Side) -> list[str]:
    """Warnings about what is not known; raises `UsageError` for sides that cannot be compared."""
    if this.unit != other.unit:
        raise UsageError(f"--diff: one side counts {this.unit}, the other {other.unit}; compare files of one kind")
    idle = [idle_sampled(side.context.tables) for side in (this, other)]
    if None in idle:
        return ["Whether idle threads were sampled is not known of both sides; if it differs, waiting seems to appear."]
    if idle[0] != idle[1]:
        with_idle = "the first" if idle[0] else "the second"
        raise UsageError(
            f"--diff: only {with_idle} side sampled idle threads, so waiting would show as a change; record both alike"
        )
    rates = [set(side.context.tables.segments["rate_hz"].drop_nulls().to_list()) for side in (this, other)]
    if not this.per_step and all(rates) and rates[0] != rates[1]:
        return ["The sides were sampled at different rates; values are scaled to the same total."]
    return []


def _labels(this: Context, other: Context) -> tuple[str, str]:
    names = title(this), title(other)
    if names[0] != names[1]:
        return names
    folders = this.tables.run.folder, other.tables.run.folder
    if folders[0] != folders[1] and all(folders):
        return folders
    return f"{names[0]} (this)", f"{names[1]} (other)"
