"""Flame graphs of sampled stacks: one tree for everything, and one per phase, kind of process and rank.

Values are milliseconds per step where steady steps are known, else samples. What was sampled outside steady steps
(imports, compilation, warm-up, evaluation) then makes a tree of its own, in samples, so that it dilutes no other.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import polars as pl
from msgspec import Struct, field
from msgspec.structs import replace

from stepscope.analyze.context import Context
from stepscope.analyze.host.sampled_time import sampled_loop
from stepscope.analyze.host.stack_selection import PARKED, StackSelection, check, choose, idle_sampled, main_roles
from stepscope.analyze.pictures.flame_tree import (
    NO_FRAME,
    ROOT,
    FrameIndex,
    Limits,
    Names,
    Paths,
    drawn,
    flame_tree,
    merged,
    nested,
    summed,
)
from stepscope.analyze.pictures.operator_leaves import OperatorLeaves
from stepscope.analyze.pictures.trace_flame import TraceWindows
from stepscope.engine.call_tree import CallTree, UserPaths
from stepscope.errors import UnreadableInputError
from stepscope.model import PHASES
from stepscope.model.sampled import FlameFrame, FlameGraph, FlameTree
from stepscope.tables.arrays import NONE, Bools, Floats, Int32

MAX_RANK_TREES = 64  # more trees than anyone chooses from; --rank draws any other
MAIN, WORKERS, THREADS, OTHERS = "main", "workers", "threads", "other"
KINDS = {
    MAIN: "main threads",
    WORKERS: "loader workers",
    THREADS: "other threads of training processes",
    OTHERS: "other processes",
}
_PHASE_ORDER = {name: position for position, name in enumerate((*PHASES, "startup"))}
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


class PlannedTree(Struct, frozen=True):
    """A tree to be drawn: which rows, what a sample counts for, and how the tree is named."""

    key: str
    label: str
    boxes: Boxes
    unit: str
    source: str


class Side:
    """One run, ready to be drawn: its rows and the boxes of its trees. Two sides of a difference share `names`."""

    def __init__(self, context: Context, options: FlameOptions, names: Names) -> None:
        check(context.tables, options.selection)
        self.context = context
        self.rows = sample_rows(context, options.selection, per_step=options.per_step)
        if not self.rows.samples.sum():
            left_out = ", ".join(f"{count:,} samples of {reason}" for reason, count in self.rows.left_out.items())
            hint = f"left out are {left_out}" if left_out else _RECORD
            raise UnreadableInputError(f"{title(context)}: holds no sampled stack of what was asked for; {hint}")
        roots = (*context.tables.run.user_roots, *context.options.source_roots)
        frames = drawn(context.calls.frames, context.code, roots)
        self._painter = BoxMaker(self.rows, frames, names)
        self._frames = frames

    def planned(self) -> Iterator[PlannedTree]:
        """Every tree of the run, the one of everything first. A tree that would equal it is left out."""
        rows = self.rows
        yield self.plan("all", "everything", self.everything())
        kinds = self._kinds()
        if len(kinds) > 1:
            for kind in kinds:
                yield self.plan(f"process:{kind}", KINDS[kind], self.boxes(rows.kind == kind))
        main = rows.kind == MAIN
        if self.loop_apart:
            yield self.plan("loop", "training loop (main threads)", self.boxes(rows.loop))
        phases = sorted(
            {str(each) for each in rows.phase[main & rows.steady] if each},
            key=lambda name: (_PHASE_ORDER.get(name, len(_PHASE_ORDER)), name),
        )
        if len(phases) > 1:
            for phase in phases:
                label = f"phase: {phase.replace('_', ' ')}"
                yield self.plan(f"phase:{phase}", label, self.boxes(main & (rows.phase == phase)))
        ranks = rows.ranks
        if len(ranks) > 1:
            for rank in ranks[:MAX_RANK_TREES]:
                yield self.plan(f"rank:{rank}", f"rank {rank}, main thread", self.of_rank(rank), rank=rank)
        if rows.per_step and (outside := main & ~rows.steady).any():
            boxes = self._painter.boxes(outside, np.ones(len(rows.samples)))
            yield PlannedTree(
                "outside", "outside steady steps (main threads)", boxes, "samples", "as they were counted"
            )

    def with_operators(self, windows: TraceWindows | None) -> Iterator[PlannedTree]:
        """The main threads once more, their innermost frames split by the operators that traces saw there."""
        if windows is None or windows.absent:
            return
        sources: list[str] = []

        def leaves(calls: CallTree, own: Floats) -> OperatorLeaves:
            found = windows.operator_leaves(calls, own)
            sources.extend([] if found.absent else [found.source])
            return found

        rows = self.rows
        boxes = self._painter.boxes((rows.kind == MAIN) & rows.steady, rows.weight, leaves)
        if sources:
            planned = self.plan(f"process:{MAIN}+operators", "main threads with operators", boxes)
            yield replace(planned, source=f"{planned.source}; {sources[0]}")

    def plan(self, key: str, label: str, boxes: Boxes, *, rank: int | None = None) -> PlannedTree:
        """A tree in the side's unit."""
        source = self.rows.source.split(", mean of")[0] if rank is not None else self.rows.source
        return PlannedTree(key, label, boxes, self.rows.unit, source)

    def boxes(self, chosen: Bools) -> Boxes:
        """The boxes of chosen rows that are in the steady state, for a tree of all ranks."""
        return self._painter.boxes(chosen & self.rows.steady, self.rows.weight)

    def everything(self) -> Boxes:
        """The boxes of all rows, below one box for each kind of thread where there are several."""
        return self._painter.grouped([(KINDS[kind], self.boxes(self.rows.kind == kind)) for kind in self._kinds()])

    @property
    def loop_apart(self) -> bool:
        """Whether a training loop was found that is less than what the trees hold: in files that know no steps."""
        return bool(not self.rows.per_step and self.rows.loop.any())

    def of_rank(self, *ranks: int, loop: bool = False) -> Boxes:
        """The boxes of the main threads of `ranks`, or of their training loops; of several, their mean."""
        rows = self.rows
        chosen = (rows.loop if loop else (rows.kind == MAIN) & rows.steady) & np.isin(rows.rank, ranks)
        return self._painter.boxes(chosen, rows.rank_weight / len(ranks))

    def _kinds(self) -> list[str]:
        present = set(self.rows.kind[self.rows.steady].tolist())
        return [kind for kind in KINDS if kind in present] or [MAIN]

    def source(self, drawn_frames: tuple[FlameFrame, ...]) -> dict[int, str]:
        """The text of the user's lines among the frames of a graph, by their number."""
        paths = {
            (frame.file, frame.line): call.file
            for frame, call in zip(self._frames, self.context.calls.frames, strict=True)
        }
        texts: dict[int, str] = {}
        lines: dict[str, list[str]] = {}
        for number, frame in enumerate(drawn_frames):
            path = self.context.code.resolve(paths.get((frame.file, frame.line)))
            if path is None or frame.line is None or path not in self.context.sources:
                continue
            text = lines.setdefault(path, self.context.sources[path].splitlines())
            if 0 < frame.line <= len(text):
                texts[number] = text[frame.line - 1].strip()
        return texts

    def notes(self) -> list[str]:
        """What must be known of this side before the picture is believed."""
        rows, tables = self.rows, self.context.tables
        notes = [note.text for note in tables.quality.notes]
        idle = idle_sampled(tables)
        if idle is False:
            notes.append("Idle threads were not sampled: time spent waiting is missing from these pictures.")
        elif idle is None:
            notes.append("The files do not say whether idle threads were sampled; if not, waiting is missing.")
        if rows.left_out:
            parts = ", ".join(f"{count:,} of {reason}" for reason, count in rows.left_out.items())
            shown = " (--parked draws parked threads)" if PARKED in rows.left_out else ""
            notes.append(f"Samples left out: {parts}{shown}.")
        if len(self._kinds()) > 1:
            notes.append(
                "Processes and threads run at the same time, so their times add up to more than the wall time."
            )
        if rows.per_step and self.context.sampled is not None and self.context.sampled.fallback:
            notes.append("No stretch of sampling lies in steady steps alone: all that touch one stand in for them.")
        return notes


def flame_graph(context: Context, options: FlameOptions | None = None) -> FlameGraph:
    """Trees of the run's sampled stacks, and of its traces where these hold Python stacks.

    Raises `UsageError` for a rank, phase or kind of process that was not sampled, `UnreadableInputError` for a run of
    which nothing can be drawn.
    """
    options = options or FlameOptions()
    names = Names(FrameIndex(), options.by)
    trees: list[FlameTree] = []
    notes = tuple(note.text for note in context.tables.quality.notes)
    side = None
    windows = TraceWindows(context) if context.tables.events.height else None
    if context.tables.stacks.height or windows is None or windows.absent:
        side = Side(context, options, names)
        planned = [*side.planned(), *side.with_operators(windows)]
        trees += [tree_of(each, names.frames, options.limits) for each in planned]
        notes = notes_of(side, trees)
        if windows is not None and windows.absent:
            notes = (*notes, f"Nothing of the traces is drawn: {windows.absent}.")
    if windows is not None and options.selection.phase is None and options.selection.process != "workers":
        traced, rank = windows.trees(names.frames, options.limits), options.selection.rank
        several = any(tree.key.startswith("gpu:rank:") for tree in traced)  # of one rank there is no tree of its own
        trees += [tree for tree in traced if rank is None or not several or tree.key == f"gpu:rank:{rank}"]
    frames = names.frames.frames
    return FlameGraph(
        title=title(context),
        frames=frames,
        trees=tuple(trees),
        notes=notes,
        source=side.source(frames) if side is not None and options.source else {},
    )


def tree_of(planned: PlannedTree, frames: FrameIndex, limits: Limits) -> FlameTree:
    """The tree itself, cut to `limits`."""
    return flame_tree(
        planned.boxes.paths(),
        frames,
        key=planned.key,
        label=planned.label,
        unit=planned.unit,
        source=planned.source,
        limits=limits,
        root=replace(ROOT, name=planned.label),
    )


def notes_of(side: Side, trees: list[FlameTree]) -> tuple[str, ...]:
    """The notes of a graph: those of its side, and what was left out of the drawing."""
    notes = side.notes()
    if any(tree.hidden for tree in trees):
        notes.append("Paths too thin to be seen are not drawn; the boxes that lead to them keep their time.")
    if len(side.rows.ranks) > MAX_RANK_TREES:
        notes.append(f"Of {len(side.rows.ranks)} ranks the first {MAX_RANK_TREES} have a tree; --rank draws any other.")
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


MS_PER_STEP = "ms per step"


class SampleRows(Struct, frozen=True):
    """Rows that are drawn: arrays of one length, and what they have in common.

    `kind` is one of the four above; `rank` is -1 and `phase` None where unknown. `weight` is what one sample counts for
    in a tree of all ranks, `rank_weight` in one of its rank alone. Rows that are not `steady` are in no step: they
    belong in no tree whose unit is per step. `loop`: main threads in the training loop, as far as steps or paths tell.
    """

    calls: CallTree
    node: Int32  # -1 for a stack without frames
    samples: Floats
    waiting: Bools
    kind: npt.NDArray[np.object_]
    phase: npt.NDArray[np.object_]
    rank: Int32
    steady: Bools
    loop: Bools
    weight: Floats
    rank_weight: Floats
    unit: str
    source: str
    left_out: dict[str, int]

    @property
    def per_step(self) -> bool:
        """Whether values are per step."""
        return self.unit == MS_PER_STEP

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks whose main thread was sampled in the steady state."""
        return tuple(sorted(set(self.rank[(self.kind == MAIN) & self.steady].tolist()) - {NONE}))


def sample_rows(context: Context, selection: StackSelection, *, per_step: bool = True) -> SampleRows:
    """The rows of `selection`; with `per_step` in ms per step where steady steps are known, else in samples."""
    tables = context.tables
    chosen = choose(tables, selection)
    stacks = chosen.rows
    kind = _kinds(stacks, main_roles(tables.stacks))
    rank = stacks["rank"].fill_null(NONE).to_numpy().astype(np.int32)
    sampled = context.sampled if per_step else None
    per_sample = sampled.ms_per_sample(context.labelled) if sampled else {}
    weight, steady = np.ones(len(rank)), np.ones(len(rank), dtype=np.bool_)
    if per_sample and sampled is not None:
        steady, in_phase = sampled.in_steady_steps(stacks)
        steady = steady & ((kind != MAIN) | in_phase)
        usual = sum(per_sample.values()) / len(per_sample)  # of rows of no rank, and of ranks without steps
        weight = np.asarray([per_sample.get(int(each), usual) for each in rank], dtype=np.float64)
        if not steady.any():  # asked for what lies in no steady step, such as startup
            return sample_rows(context, selection, per_step=False)
    units = tables.segments["unit"].drop_nulls().unique().to_list()  # files of one unit only can be opened together
    several = f", mean of {len(per_sample)} ranks" if len(per_sample) > 1 else ""
    return SampleRows(
        calls=context.calls,
        node=stacks["node"].fill_null(NONE).to_numpy().astype(np.int32),
        samples=stacks["samples"].to_numpy().astype(np.float64),
        waiting=stacks["waiting"].fill_null(False).to_numpy(),
        kind=kind,
        phase=stacks["phase"].to_numpy().astype(object),
        rank=rank,
        steady=steady,
        loop=steady & (kind == MAIN) if per_sample else _in_loop(context, stacks, kind),
        weight=weight / max(1, len(per_sample)),
        rank_weight=weight,
        unit=MS_PER_STEP if per_sample else str(units[0]) if len(units) == 1 else "samples",
        source=f"share of the main thread's samples in steady steps x mean step{several}"
        if per_sample
        else "as the files count them",
        left_out=chosen.left_out,
    )


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


def _in_loop(context: Context, stacks: pl.DataFrame, kind: npt.NDArray[np.object_]) -> Bools:
    """Main threads in the training loop, of files that know no steps."""
    found = sampled_loop(context, UserPaths(context.calls, context.code))
    if found is None or found.inside is None:
        return np.zeros(len(kind), dtype=np.bool_)
    inside = np.append(found.inside, False)[stacks["node"].fill_null(NONE).to_numpy()]
    working: Bools = inside & stacks["stage"].is_null().to_numpy() & (kind == MAIN)
    return working


Leaves = Callable[[CallTree, Floats], OperatorLeaves]

FOLD = 8  # direct recursion deeper than this is drawn as one box


class Boxes(Struct, frozen=True):
    """Paths of boxes: `key` numbers boxes of `Names`, which two sides of a difference share; `frame` is as drawn."""

    parent: Int32
    key: Int32
    frame: Int32
    own: Floats

    def paths(self) -> Paths:
        """For a tree."""
        return Paths(self.parent, self.frame, self.own)


class BoxMaker:
    """Makes the boxes of trees out of rows of one run. `frames` are its distinct frames as they are drawn."""

    def __init__(self, rows: SampleRows, frames: Sequence[FlameFrame], names: Names) -> None:
        self._rows = rows
        self._names = names
        self._frames: list[FlameFrame] = []
        self._keys = np.zeros(0, dtype=np.int32)
        self._add([NO_FRAME, *frames])

    def _add(self, frames: Sequence[FlameFrame]) -> None:
        self._frames += frames
        self._keys = np.concatenate([self._keys, self._names.keys(frames)]).astype(np.int32)

    def boxes(self, chosen: Bools, weight: Floats, leaves: Leaves | None = None) -> Boxes:
        """The rows in `chosen`, a sample of which counts for `weight`; with the operators that `leaves` finds."""
        rows, calls = self._rows, self._rows.calls
        count = len(calls) + 1  # a stack without frames is a node of its own behind all others
        value = rows.samples[chosen] * weight[chosen]
        node = np.where(rows.node[chosen] < 0, len(calls), rows.node[chosen]).astype(np.int32)
        own = summed(node, value, count)
        waits = np.divide(summed(node, value * rows.waiting[chosen], count), own, out=np.zeros(count), where=own > 0)
        parent = np.append(calls.parent, NONE).astype(np.int32)
        frame = np.append(calls.frame + 1, 0).astype(np.int32)  # NO_FRAME comes first
        if leaves is not None:
            found = leaves(calls, own[:-1])
            above = np.where(found.parent < len(calls), found.parent, found.parent + 1)
            parent = np.concatenate([parent, above]).astype(np.int32)
            frame = np.concatenate([frame, found.frame + len(self._frames)]).astype(np.int32)
            self._add(found.frames)
            own = np.concatenate([found.own, own[-1:], found.value])
            waits = np.concatenate([waits, np.zeros(len(found.value))])
        return self._merged(parent, frame, own, waits)

    def _merged(self, parent: Int32, frame: Int32, own: Floats, waits: Floats) -> Boxes:
        """Nodes of sampled frames as boxes. `waits` is the share of `own` that waits."""
        total = nested(parent).totals(own)
        used = total > 0
        number = (np.cumsum(used) - 1).astype(np.int32)
        above = np.where(parent[used] < 0, NONE, number[parent[used]]).astype(np.int32)
        up, key, group = merged(above, self._keys[frame[used]], fold=FOLD)
        own_of = summed(group, own[used], len(up))
        waiting = summed(group, (waits * own)[used], len(up)) > own_of / 2
        shown = _most(group, frame[used], total[used], len(up))
        pairs, which = np.unique(shown.astype(np.int64) * 2 + waiting, return_inverse=True)
        drawn_frames = [
            replace(self._frames[pair // 2], kind="wait") if pair % 2 else self._frames[pair // 2]
            for pair in pairs.tolist()
        ]
        numbers = np.asarray([self._names.frames.number(each) for each in drawn_frames], np.int32)
        return Boxes(up, key, numbers[which], own_of)

    def grouped(self, groups: Sequence[tuple[str, Boxes]]) -> Boxes:
        """Boxes below one more box for each group; a single group needs none."""
        filled = [(label, boxes) for label, boxes in groups if len(boxes.own)]
        if len(filled) <= 1:
            return filled[0][1] if filled else groups[0][1]
        below = []
        for label, boxes in filled:
            top = FlameFrame(label, "", None, "root")
            key, frame = self._names.key(top), self._names.frames.number(top)
            below.append(
                Boxes(
                    parent=np.append(NONE, np.where(boxes.parent < 0, 0, boxes.parent + 1)).astype(np.int32),
                    key=np.append(key, boxes.key).astype(np.int32),
                    frame=np.append(frame, boxes.frame).astype(np.int32),
                    own=np.append(0.0, boxes.own),
                )
            )
        parent, key_of, shown, own, group = together(below)
        return Boxes(parent, key_of, shown, summed(group, own, len(parent)))


def _most(group: Int32, frame: Int32, weight: Floats, count: int) -> Int32:
    """The frame of each group with the most weight."""
    span = int(frame.max(initial=0)) + 1
    distinct, which = np.unique(group.astype(np.int64) * span + frame, return_inverse=True)
    sums = summed(which, weight, len(distinct))
    order = np.lexsort((sums, distinct // span))
    best = np.zeros(count, dtype=np.int32)
    best[(distinct // span)[order]] = (distinct % span)[
        order
    ]  # of several assignments the last one, the heaviest, stays
    return best


def together(parts: Sequence[Boxes]) -> tuple[Int32, Int32, Int32, Floats, Int32]:
    """Several parts below one root, equal boxes as one, drawn as in the first part that has it: parent, key and frame.

    With them `own` of the boxes of all parts one behind the other, and which of the merged ones each of those is.
    """
    starts = np.cumsum([0, *(len(part.own) for part in parts[:-1])])
    parent = [np.where(part.parent < 0, NONE, part.parent + at) for part, at in zip(parts, starts, strict=True)]
    key = np.concatenate([part.key for part in parts]).astype(np.int32)
    up, keys, group = merged(np.concatenate(parent).astype(np.int32), key)
    shown = np.zeros(len(up), dtype=np.int32)
    shown[group[::-1]] = np.concatenate([part.frame for part in parts])[::-1]
    return up, keys, shown, np.concatenate([part.own for part in parts]), group
