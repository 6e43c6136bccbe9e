"""Flame graphs of sampled stacks: one tree for everything, and one per phase, kind of process and rank.

Values are milliseconds per step where steady steps are known, else samples. What was sampled outside steady steps
(imports, compilation, warm-up, evaluation) then makes a tree of its own, in samples, so that it dilutes no other.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from stepscope.analyze.context import Context
from stepscope.analyze.flame.builder import ROOT, FrameIndex, Limits, flame_tree
from stepscope.analyze.flame.names import Names, drawn
from stepscope.analyze.flame.paths import Boxes, Painter
from stepscope.analyze.flame.rows import MAIN, OTHERS, THREADS, WORKERS, SampleRows, sample_rows
from stepscope.analyze.flame.trace import TraceWindows
from stepscope.analyze.flame.trace_leaves import OperatorLeaves
from stepscope.analyze.hotspots.idle import idle_sampled
from stepscope.analyze.sampled.selection import PARKED, StackSelection, check
from stepscope.engine.call_tree import CallTree
from stepscope.errors import UnreadableInputError
from stepscope.model import PHASES
from stepscope.model.sampled import FlameFrame, FlameGraph, FlameTree
from stepscope.tables.arrays import Bools, Floats

MAX_RANK_TREES = 64  # more trees than anyone chooses from; --rank draws any other
KINDS = {
    MAIN: "main threads",
    WORKERS: "loader workers",
    THREADS: "other threads of training processes",
    OTHERS: "other processes",
}
_PHASE_ORDER = {name: position for position, name in enumerate((*PHASES, "startup"))}


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
            raise UnreadableInputError(
                f"{title(context)}: holds no sampled stack of what was asked for; {_hint(self.rows)}"
            )
        roots = (*context.tables.run.user_roots, *context.options.source_roots)
        frames = drawn(context.calls.frames, context.code, roots)
        self._painter = Painter(self.rows, frames, names)
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
        phases = sorted({str(each) for each in rows.phase[main & rows.steady] if each}, key=_phase_order)
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
        boxes = self._painter.boxes((rows.kind == MAIN) & rows.steady, rows.worth, leaves)
        if sources:
            planned = self.plan(f"process:{MAIN}+operators", "main threads with operators", boxes)
            yield replace(planned, source=f"{planned.source}; {sources[0]}")

    def plan(self, key: str, label: str, boxes: Boxes, *, rank: int | None = None) -> PlannedTree:
        """A tree in the side's unit."""
        source = self.rows.source.split(", mean of")[0] if rank is not None else self.rows.source
        return PlannedTree(key, label, boxes, self.rows.unit, source)

    def boxes(self, chosen: Bools) -> Boxes:
        """The boxes of chosen rows that are in the steady state, for a tree of all ranks."""
        return self._painter.boxes(chosen & self.rows.steady, self.rows.worth)

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
        return self._painter.boxes(chosen, rows.rank_worth / len(ranks))

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
        trees += _of_rank(windows.trees(names.frames, options.limits), options.selection.rank)
    frames = names.frames.frames
    return FlameGraph(
        title=title(context),
        frames=frames,
        trees=tuple(trees),
        notes=notes,
        source=side.source(frames) if side is not None and options.source else {},
    )


def _of_rank(trees: tuple[FlameTree, ...], rank: int | None) -> list[FlameTree]:
    """The trees of traces that belong to `rank`; those of all ranks where there is one rank only."""
    if rank is None:
        return list(trees)
    several = any(tree.key.startswith("gpu:rank:") for tree in trees)
    return [tree for tree in trees if tree.key == f"gpu:rank:{rank}" or not several]


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


def _hint(rows: SampleRows) -> str:
    if not rows.left_out:
        return "record with stepscope run, or give a file of py-spy or speedscope"
    return "left out are " + ", ".join(f"{count:,} samples of {reason}" for reason, count in rows.left_out.items())


def _phase_order(name: str) -> tuple[int, str]:
    return _PHASE_ORDER.get(name, len(_PHASE_ORDER)), name
